//! Rules for the contiguous ranges of slices: read each by itself, or with the bytes between them.

use std::ops::Range;

use super::load_options::LoadOptions;
use super::selection::Selection;
use crate::engine::page_cache::{self, PageCacheResidency};
use crate::engine::plan::SliceRanges;
use crate::error::Result;
use crate::io::{Capabilities, as_refs};

/// Ranges of at least this length are read one by one, because their plan is small compared with
/// their bytes. Shorter ranges are read together with the bytes between them.
const SHORT: u64 = 16 << 10;
/// Approximate bytes that are planned and read together. The limit is needed because a file may
/// claim any number of ranges.
pub const MAX_GROUP_LEN: u64 = 16 << 30;

/// Rules for the contiguous ranges of the slices of a load.
#[derive(Clone, Copy)]
pub struct RangeRules {
    /// Shorter ranges are read with the bytes between them, if these are no more than `gap`.
    long: u64,
    /// Bytes between two ranges that are cheaper to read than to skip.
    gap: u64,
    seekable: bool,
}

impl RangeRules {
    /// The rules for slices of a file.
    pub fn of(selection: &Selection<'_>, options: &LoadOptions) -> Result<Self> {
        let sources = selection.file.sources();
        let files = as_refs(&sources);
        let seekable = selection.file.is_seekable();
        if page_cache::may_read_directly(
            &files,
            options.memory.or_environment()?,
            options.shares_cache,
        )? && page_cache::sample_residency(&files, &selection.extents()?)
            == PageCacheResidency::Little
        {
            return Ok(RangeRules {
                long: page_cache::DIRECT_GAP,
                gap: page_cache::DIRECT_GAP,
                seekable,
            });
        }
        let gap = Capabilities::combined(&files).map_or(0, |capabilities| capabilities.merge_gap);
        // A stream is read front to back, so the bytes between ranges are read in any case.
        Ok(RangeRules { long: SHORT, gap: if seekable { gap } else { u64::MAX }, seekable })
    }

    /// True if each range is read by itself, straight to its destination.
    pub fn are_long(&self, ranges: &SliceRanges) -> bool {
        let between = ranges.gap().is_none_or(|gap| gap > self.gap);
        self.seekable && ranges.range_len() >= if between { SHORT } else { self.long }
    }

    /// Returns the ranges of a tensor that are read to gather short ones from, in rising order.
    pub fn reads<'r>(&self, ranges: &'r SliceRanges) -> impl Iterator<Item = Range<u64>> + use<'r> {
        let reads = ranges.coalesced(self.gap).filter(|_| ranges.total() > 0);
        reads.flat_map(|Range { start, end }| {
            let len = usize::try_from(MAX_GROUP_LEN).unwrap_or(usize::MAX);
            let cut = move |from: u64| from..end.min(from.saturating_add(MAX_GROUP_LEN));
            (start..end).step_by(len).map(cut)
        })
    }
}
