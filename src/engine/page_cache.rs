//! Files that are not in the page cache, and direct reads of them.

use std::collections::BTreeMap;
use std::sync::Arc;

use crate::engine::plan::Extent;
use crate::environment::{DIRECT_IO, LOCAL_WORLD_SIZE};
use crate::error::Result;
use crate::io::local::{DIRECT_READ_LEN, DirectMemory, DirectReader, DirectSupport};
use crate::io::{ReadAt, SourceIdentity};
use crate::memory_limit::MemoryLimit;
use crate::stats::Counters;
use crate::sys::sync::atomic::{AtomicU64, Ordering};
use crate::sys::sync::{Mutex, unpoisoned};

/// Memory that a reader takes for direct reads.
pub use crate::io::local::DIRECT_MEMORY as READER_MEMORY;

/// The longest gap between two ranges of a cold file that is cheaper to read than to skip. A
/// separate read takes as long as a disk of 2 GB/s needs for this gap, and costs more CPU time.
pub const DIRECT_GAP: u64 = 128 << 10;
/// Minimum number of readers that must have memory for direct reads. With less memory, files are
/// read through the page cache, which needs no buffers.
const READERS_AT_LEAST: u64 = 4;
/// The most readers with direct reads, unless the caller sets their number: these keep a disk busy.
pub const DIRECT_READERS: usize = 4;

/// Values of `TENSORIZER_DIRECT_IO`: no direct reads, and direct reads even if several processes of
/// this machine load.
const NEVER: u64 = 0;
const ALWAYS: u64 = 2;

/// The page-cache residency of a load's data.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum PageCacheResidency {
    /// All of it, as far as samples tell.
    All,
    /// Some of it, or it is unknown.
    Some,
    /// Less than half.
    Little,
}

/// Samples the page-cache residency of files.
pub fn sample_residency(files: &[&dyn ReadAt], extents: &[Extent]) -> PageCacheResidency {
    /// The most positions that are sampled, at equal distances.
    const SAMPLES: u64 = 32;
    const PAGE: u64 = 4 << 10;
    let total = extents.iter().fold(0, |sum: u64, extent| sum.saturating_add(extent.data_len));
    // One sample per page is enough; each sample is a system call.
    let samples = (total / PAGE).clamp(1, SAMPLES);
    let step = (total / samples).max(1);
    let (mut next, mut sampled, mut uncached, mut unknown) = (step / 2, 0, 0, 0);
    for extent in extents {
        while next < extent.data_len {
            sampled += 1;
            let file = files.get(extent.file).and_then(|source| source.file());
            match file
                .and_then(|file| crate::sys::is_in_page_cache(&file, extent.data_offset + next))
            {
                Some(true) => {}
                Some(false) => uncached += 1,
                None => unknown += 1,
            }
            next += step;
        }
        next -= extent.data_len;
    }
    if uncached * 2 > sampled {
        PageCacheResidency::Little
    } else if uncached + unknown == 0 {
        PageCacheResidency::All
    } else {
        PageCacheResidency::Some
    }
}

/// True if cold files of a load are read around the page cache. `shared`: other processes of this
/// machine load the same files at the same time. Then the page cache is better, as it reads each
/// byte once for all of them.
pub fn may_read_directly(files: &[&dyn ReadAt], memory: MemoryLimit, shared: bool) -> Result<bool> {
    let wanted = match DIRECT_IO.value()? {
        NEVER => false,
        ALWAYS => true,
        _ => !shared && local_ranks() <= 1,
    };
    let room = memory.bytes().is_none_or(|bytes| bytes >= READERS_AT_LEAST * READER_MEMORY);
    Ok(wanted && room && files.iter().all(|source| source.facts().is_local))
}

/// Returns how many processes on this machine a launcher says that this one is part of. They usually
/// load the same files.
pub fn local_ranks() -> usize {
    let size = LOCAL_WORLD_SIZE.value().and_then(|text| text.into_string().ok());
    size.and_then(|text| text.trim().parse().ok()).unwrap_or(1)
}

/// State that the direct reads of all readers of a load share.
pub struct DirectReads<'c> {
    readers: usize,
    counters: &'c Counters,
    /// The abilities of the file systems, by their device numbers.
    support: Mutex<BTreeMap<u64, DirectSupport>>,
    /// The sum of a thousand times each reader's mean number of reads under way.
    under_way: AtomicU64,
}

impl<'c> DirectReads<'c> {
    /// Creates the state for a number of readers.
    pub fn new(readers: usize, counters: &'c Counters) -> Self {
        let (support, under_way) = (Mutex::default(), AtomicU64::new(0));
        DirectReads { readers, counters, support, under_way }
    }

    /// Opens a file for the direct reads of one reader, with its memory; None if its file system
    /// does not support them.
    pub fn open<'s>(
        &self,
        source: &'s dyn ReadAt,
        memory: &Arc<Mutex<DirectMemory>>,
    ) -> Option<Box<dyn ReadAt + 's>> {
        let device = match &source.facts().identity {
            Some(SourceIdentity::Local(stamp)) => Some(stamp.device()),
            _ => None,
        };
        let known = |device: u64| unpoisoned(self.support.lock()).get(&device).copied();
        let mut support = device.and_then(known);
        let Some(reader) = DirectReader::open(source, memory, &mut support) else {
            self.counters.fallback(
                "the file system does not support direct reads (O_DIRECT): the file is read \
                 through the page cache",
            );
            return None;
        };
        if let Some((device, support)) = device.zip(support) {
            unpoisoned(self.support.lock()).insert(device, support);
        }
        self.counters.reading(reader.name());
        Some(Box::new(reader))
    }

    /// Counts what a reader had under way, at its end.
    pub fn ended(&self, memory: &Mutex<DirectMemory>) {
        let mean = unpoisoned(memory.lock()).mean_reads().unwrap_or(0);
        self.under_way.fetch_add(mean, Ordering::Relaxed);
    }
}

impl Drop for DirectReads<'_> {
    fn drop(&mut self) {
        let mean = self.under_way.load(Ordering::Relaxed);
        if mean > 0 {
            let bytes = mean.saturating_mul(DIRECT_READ_LEN as u64) / 1000;
            let most = READER_MEMORY.saturating_mul(self.readers as u64);
            self.counters.in_flight(bytes, most);
        }
    }
}
