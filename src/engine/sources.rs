//! The sources of a load: their capabilities, and direct reads of files that are not in the page cache.

use super::cold::{self, Cached, DirectReads};
use super::file_handles::Access;
use super::reading::Reading;
use crate::error::Result;
use crate::io::Capabilities;
use crate::memory_limit::MemoryLimit;
use crate::stats::Counters;

/// Loads of fewer bytes are read through the page cache even if the file is not in it. The kernel's
/// read-ahead covers them, and later reads of the file find it in the cache.
const DIRECT_FROM: u64 = 4 << 20;

/// The sources of one load.
pub struct Sources {
    /// Their capabilities, including the memory of each reader.
    pub traits: Capabilities,
    /// Their page-cache residency; None unless all are local files.
    pub cached: Option<Cached>,
    /// True if they are read with direct I/O, around the page cache.
    pub direct: bool,
}

impl Sources {
    /// Examines the sources of a load of `total` bytes. None if there are no sources.
    pub fn of(what: &Reading<'_>, total: u64, memory: MemoryLimit) -> Result<Option<Self>> {
        let Some(traits) = Capabilities::combined(what.files) else { return Ok(None) };
        let local = what.files.iter().all(|file| file.is_local());
        let cached = local.then(|| cold::cached(what.files, what.extents));
        let direct = cached == Some(Cached::Little)
            && total >= DIRECT_FROM
            && cold::may_read_directly(what.files, memory, what.shares_cache)?;
        let more = if direct { cold::READER_MEMORY } else { 0 };
        let traits = Capabilities { reader_memory: traits.reader_memory + more, ..traits };
        Ok(Some(Sources { traits, cached, direct }))
    }

    /// True if all are local files.
    pub fn are_local(&self) -> bool {
        self.cached.is_some()
    }

    /// Returns the state for direct reads by `readers` readers, if direct I/O is used.
    pub fn direct_reads<'c>(
        &self,
        readers: usize,
        counters: &'c Counters,
    ) -> Option<DirectReads<'c>> {
        self.direct.then(|| DirectReads::new(readers, counters))
    }
}

/// Returns the kind of file handles that each of `readers` readers has.
pub fn access<'r>(direct: Option<&'r DirectReads<'r>>, readers: usize) -> Access<'r> {
    match direct {
        Some(reads) => Access::Direct(reads),
        None if readers > 1 => Access::Own,
        None => Access::Shared,
    }
}
