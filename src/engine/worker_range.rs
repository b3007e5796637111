//! The number of readers of a load, and what they may have in memory.

use super::cold::Cached;
use super::target::Target;
use super::workers::WorkerRange;
use crate::environment::READERS;
use crate::error::Result;
use crate::io::{Capabilities, ReadAt};
use crate::memory_limit::MemoryLimit;

/// The number of readers to begin with, and the most there may be; `wanted` if the caller asks for a
/// number. `cached`: what is in the page cache, if all files are local.
pub fn range(
    traits: &Capabilities,
    cached: Option<Cached>,
    wanted: Option<usize>,
) -> Result<WorkerRange> {
    let of_files = || match (cached, READERS.value()?) {
        (None, _) | (_, 0) => Ok(None),
        (_, number) => Ok(usize::try_from(number).ok()),
    };
    let asked = wanted.map_or_else(of_files, |number| Ok(Some(number)))?;
    let range = WorkerRange::of(traits, asked);
    if range.first == range.most {
        return Ok(range);
    }
    Ok(match cached {
        // Memory gets no faster by more readers than cores.
        Some(Cached::All) => WorkerRange::fixed(crate::cpu_count().clamp(range.first, range.most)),
        Some(Cached::Some) | None => range,
        // A disk is kept busy by all of them from the first byte on.
        Some(Cached::Little) => WorkerRange::fixed(range.most),
    })
}

/// The memory limit of a load; its sources are told.
pub fn limit(memory: MemoryLimit, files: &[&dyn ReadAt]) -> Result<MemoryLimit> {
    let memory = memory.known()?;
    if memory.bytes().is_some() {
        let window = memory.window(u64::MAX);
        files.iter().for_each(|source| source.limit_connection(window));
    }
    Ok(memory)
}

/// The number of readers that there is memory for, and the bytes of a batch that may be no data. The
/// target is told.
pub fn share<T: Target>(
    memory: MemoryLimit,
    range: WorkerRange,
    traits: &Capabilities,
    decrypts: bool,
    target: &mut T,
) -> Result<(WorkerRange, u64)> {
    let shares = memory.load(&target.needs(traits, range.most, decrypts))?;
    if memory.bytes().is_some() {
        target.bound(&shares);
    }
    Ok((range.at_most(shares.readers), shares.passing))
}
