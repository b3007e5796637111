//! The sources of a load: their capabilities, and direct reads of files that are not in the page cache.

use super::cold::{self, Cached, DirectReads};
use super::file_handles::Access;
use super::reading::Reading;
use crate::error::Result;
use crate::io::Capabilities;
use crate::memory_limit::MemoryLimit;
use crate::stats::Counters;

/// Less of a cold file comes with what the kernel reads ahead, which stays for those who read on there.
const DIRECT_FROM: u64 = 4 << 20;

/// The sources of one load.
pub struct Sources {
    /// Their capabilities, with the memory that each reader takes.
    pub traits: Capabilities,
    /// The share of them that is in the page cache; None unless all are local files.
    pub cached: Option<Cached>,
    /// True if they are read around it.
    pub direct: bool,
}

impl Sources {
    /// Looks at the sources of so many bytes. None if there are no sources.
    pub fn of(what: &Reading<'_>, total: u64, memory: MemoryLimit) -> Result<Option<Self>> {
        let Some(traits) = Capabilities::of_all(what.files) else { return Ok(None) };
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

    /// Direct reads of so many readers, if there are to be any.
    pub fn direct_reads<'c>(
        &self,
        readers: usize,
        counters: &'c Counters,
    ) -> Option<DirectReads<'c>> {
        self.direct.then(|| DirectReads::new(readers, counters))
    }
}

/// The kind of handles that each of so many readers has.
pub fn access<'r>(direct: Option<&'r DirectReads<'r>>, readers: usize) -> Access<'r> {
    match direct {
        Some(reads) => Access::Direct(reads),
        None if readers > 1 => Access::Own,
        None => Access::Shared,
    }
}
