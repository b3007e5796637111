//! Files that are not in the page cache, and direct reads of them.

use std::sync::Arc;

use crate::engine::plan::Extent;
use crate::environment::{DIRECT_IO, LOCAL_WORLD_SIZE};
use crate::error::Result;
use crate::io::ReadAt;
use crate::io::local::{DIRECT_READ, DirectReader, InFlight, READS_AT_MOST, READS_FOR_EACH};
use crate::memory_limit::MemoryLimit;
use crate::stats::Counters;

/// Memory that a reader takes for direct reads.
pub use crate::io::local::DIRECT_MEMORY as READER_MEMORY;

/// Bytes between two ranges of a cold file that are cheaper to read than to skip: a separate read takes
/// the time in which a disk of 2 GB/s reads as much, and more CPU time than this takes.
pub const DIRECT_GAP: u64 = 128 << 10;
/// With less memory than for so many readers, files are read through the page cache, which takes none.
const READERS_AT_LEAST: u64 = 4;

/// Values of `TENSORIZER_DIRECT_IO`: by the page cache always, and around it also where several
/// processes of this machine load.
const NEVER: u64 = 0;
const ALWAYS: u64 = 2;

/// The share of the data of a load that is in the page cache.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Cached {
    /// All of it, as far as samples tell.
    All,
    /// Something between, or it is unknown.
    Some,
    /// Less than half.
    Little,
}

/// Looks whether files are in the page cache.
pub fn cached(files: &[&dyn ReadAt], extents: &[Extent]) -> Cached {
    /// Places that are looked at, in equal distances.
    const SAMPLES: u64 = 32;
    const PAGE: u64 = 4 << 10;
    let total = extents.iter().fold(0, |sum: u64, extent| sum.saturating_add(extent.data_len));
    // One of a page is enough: each of them is a call of the system.
    let samples = (total / PAGE).clamp(1, SAMPLES);
    let step = (total / samples).max(1);
    let (mut next, mut sampled, mut cold, mut unknown) = (step / 2, 0, 0, 0);
    for extent in extents {
        while next < extent.data_len {
            sampled += 1;
            let file = files.get(extent.file).and_then(|source| source.file());
            match file.and_then(|file| crate::sys::is_cached(&file, extent.data_offset + next)) {
                Some(true) => {}
                Some(false) => cold += 1,
                None => unknown += 1,
            }
            next += step;
        }
        next -= extent.data_len;
    }
    if cold * 2 > sampled {
        Cached::Little
    } else if cold + unknown == 0 {
        Cached::All
    } else {
        Cached::Some
    }
}

/// True if cold files of a load are read around the page cache. `shared`: other processes of this
/// machine load them at the same time, and the page cache has each byte once for all.
pub fn may_read_directly(files: &[&dyn ReadAt], memory: MemoryLimit, shared: bool) -> Result<bool> {
    let wanted = match DIRECT_IO.value()? {
        NEVER => false,
        ALWAYS => true,
        _ => !shared && !has_local_ranks(),
    };
    let room = memory.bytes().is_none_or(|bytes| bytes >= READERS_AT_LEAST * READER_MEMORY);
    Ok(wanted && room && files.iter().all(|source| source.is_local()))
}

/// True if a launcher says that this process is one of several on this machine, which load the same
/// files as a rule.
fn has_local_ranks() -> bool {
    let size = LOCAL_WORLD_SIZE.value().and_then(|text| text.into_string().ok());
    size.and_then(|text| text.trim().parse().ok()).is_some_and(|size: u64| size > 1)
}

/// Direct reads of the readers of one load.
pub struct DirectReads<'c> {
    in_flight: Arc<InFlight>,
    counters: &'c Counters,
}

impl<'c> DirectReads<'c> {
    /// For so many readers.
    pub fn new(readers: usize, counters: &'c Counters) -> Self {
        let reads = readers.saturating_mul(READS_FOR_EACH).max(READS_AT_MOST);
        let in_flight = Arc::new(InFlight::new(reads));
        DirectReads { in_flight, counters }
    }

    /// A handle of one reader to a file; None where its file system has no direct reads.
    pub fn open(&self, source: &dyn ReadAt) -> Option<Box<dyn ReadAt>> {
        let Some(reader) = DirectReader::open(source, &self.in_flight) else {
            self.counters.fallback(
                "the file system has no direct reads: a cold file goes through the page cache",
            );
            return None;
        };
        self.counters.reading(reader.name());
        Some(Box::new(reader))
    }
}

impl Drop for DirectReads<'_> {
    fn drop(&mut self) {
        let (mean, most) = self.in_flight.mean();
        if let Some(mean) = mean {
            let bytes = |reads: u64| reads.saturating_mul(DIRECT_READ as u64);
            self.counters.in_flight(bytes(mean) / 1000, bytes(most as u64));
        }
    }
}
