//! Files that are not in the page cache.

use crate::engine::plan::Extent;
use crate::environment::DIRECT_IO;
use crate::error::Result;
use crate::io::ReadAt;
use crate::stats::Counters;

/// What a reader that goes around the page cache takes.
pub use crate::io::local::DIRECT_MEMORY as READER_MEMORY;

/// Whether a load goes around the page cache.
pub fn wants_direct_reads(files: &[&dyn ReadAt], extents: &[Extent]) -> Result<bool> {
    Ok(DIRECT_IO.value()? != 0 && cached(files, extents) == Cached::Little)
}

/// How much of what is to be read is in the page cache.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Cached {
    /// All of it, as far as samples tell.
    All,
    /// Something between, or nobody can tell.
    Some,
    /// Less than half.
    Little,
}

/// Looks whether files are in the page cache.
pub fn cached(files: &[&dyn ReadAt], extents: &[Extent]) -> Cached {
    /// Places that are looked at, in equal distances.
    const SAMPLES: u64 = 32;
    let local: Vec<Option<&std::fs::File>> = files.iter().map(|source| source.file()).collect();
    let total = extents.iter().fold(0, |sum: u64, extent| sum.saturating_add(extent.data_len));
    let step = (total / SAMPLES).max(1);
    let (mut next, mut sampled, mut cold, mut unknown) = (step / 2, 0, 0, 0);
    for extent in extents {
        while next < extent.data_len {
            sampled += 1;
            let file = local.get(extent.file).copied().flatten();
            match file.and_then(|file| crate::sys::is_cached(file, extent.data_offset + next)) {
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

/// A reader that goes around the page cache, where there can be one.
pub fn around_the_cache(source: &dyn ReadAt, counters: &Counters) -> Option<Box<dyn ReadAt>> {
    if let Some(reader) = crate::io::local::DirectReader::open(source) {
        counters.reading(reader.name());
        return Some(Box::new(reader));
    }
    counters
        .fallback("the file system has no direct reads: a cold file goes through the page cache");
    None
}
