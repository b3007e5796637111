//! How many readers a load has, and what they may have in memory.

use super::cold::{self, Cached};
use super::plan::Extent;
use super::target::Target;
use super::workers::Crew;
use crate::environment::READERS;
use crate::error::Result;
use crate::io::{Capabilities, ReadAt};
use crate::memory_limit::MemoryLimit;

/// With how many readers to begin, and how many there may be, if the caller wants so many.
pub fn crew(
    traits: &Capabilities,
    files: &[&dyn ReadAt],
    extents: &[Extent],
    wanted: Option<usize>,
) -> Result<Crew> {
    let local = files.iter().all(|source| source.file().is_some());
    let of_files = || match (local, READERS.value()?) {
        (false, _) | (_, 0) => Ok(None),
        (_, number) => Ok(usize::try_from(number).ok()),
    };
    let asked = wanted.map_or_else(of_files, |number| Ok(Some(number)))?;
    let crew = Crew::of(traits, asked);
    if crew.first == crew.most {
        return Ok(crew);
    }
    Ok(match cold::cached(files, extents) {
        // Memory gets no faster by more readers than cores.
        Cached::All => Crew::fixed(crate::cpu_count().clamp(crew.first, crew.most)),
        Cached::Some => crew,
        // Who waits for a disk has use for all of them from the first byte on.
        Cached::Little => Crew::fixed(crew.most),
    })
}

/// What a load may have in memory; tells its sources.
pub fn limit(memory: MemoryLimit, files: &[&dyn ReadAt]) -> Result<MemoryLimit> {
    let memory = memory.known()?;
    if memory.bytes().is_some() {
        let window = memory.window(u64::MAX);
        files.iter().for_each(|source| source.limit_connection(window));
    }
    Ok(memory)
}

/// Readers for whom there is memory, and bytes of a batch that may be no data. Tells the target.
pub fn share<T: Target>(
    memory: MemoryLimit,
    crew: Crew,
    traits: &Capabilities,
    decrypts: bool,
    target: &mut T,
) -> Result<(Crew, u64)> {
    let shares = memory.load(&target.needs(traits, crew.most, decrypts))?;
    if memory.bytes().is_some() {
        target.bound(&shares);
    }
    Ok((crew.at_most(shares.readers), shares.passing))
}
