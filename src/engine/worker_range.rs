//! The number of readers of a load, and their share of the memory limit.

use super::page_cache::{DIRECT_READERS, PageCacheResidency, local_ranks};
use super::workers::WorkerRange;
use crate::environment::NUM_READERS;
use crate::error::Result;
use crate::io::{Capabilities, ReadAt};
use crate::memory_limit::MemoryLimit;

/// Returns the initial and the maximum number of readers. `wanted`: the number that the caller asks
/// for. `residency`: the page-cache residency, if all files are local. `direct`: they are read around
/// the page cache. `spared_cores`: the cores that the destination needs.
pub fn range(
    capabilities: &Capabilities,
    (residency, direct): (Option<PageCacheResidency>, bool),
    spared_cores: usize,
    wanted: Option<usize>,
) -> Result<WorkerRange> {
    let of_files = || match (residency, NUM_READERS.value()?) {
        (None, _) | (_, 0) => Ok(None),
        (_, number) => Ok(usize::try_from(number).ok()),
    };
    let wanted_or_environment = wanted.map_or_else(of_files, |number| Ok(Some(number)))?;
    let range = WorkerRange::of(capabilities, wanted_or_environment);
    if range.initial == range.max {
        return Ok(range);
    }
    Ok(match residency {
        // The page cache is not read faster by more readers than cores.
        Some(PageCacheResidency::All) => {
            let cores = crate::cpu_count().saturating_sub(spared_cores);
            WorkerRange::fixed(cores.clamp(range.initial, range.max))
        }
        Some(PageCacheResidency::Some) | None => range,
        // Each has several reads under way.
        Some(PageCacheResidency::Little) if direct => {
            WorkerRange::fixed(range.max.min(crate::cpu_count().clamp(2, DIRECT_READERS)))
        }
        // All readers are needed to keep a disk busy, from the first byte on. Processes of one job
        // share them.
        Some(PageCacheResidency::Little) => {
            let share = range.max / local_ranks().max(1);
            WorkerRange::fixed(share.max(2).min(range.max))
        }
    })
}

/// Returns the memory limit of a load, and limits the receive windows of its sources accordingly.
pub fn limit(memory: MemoryLimit, files: &[&dyn ReadAt]) -> Result<MemoryLimit> {
    let memory = memory.or_environment()?;
    if memory.bytes().is_some() {
        let window = memory.window(u64::MAX);
        files.iter().for_each(|source| source.facts().connection_limit.lower(window));
    }
    Ok(memory)
}
