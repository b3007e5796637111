//! Rules for the contiguous ranges of slices: read each by itself, or with the bytes between them.

use super::selection::Selection;
use crate::engine::load_options::LoadOptions;
use crate::engine::page_cache::{self, PageCacheResidency};
use crate::engine::plan::SliceRanges;
use crate::error::Result;
use crate::io::{Capabilities, as_refs};

/// Ranges of at least this length are read one by one, because their plan is small compared with
/// their bytes. Shorter ranges are read together with the bytes between them.
const SHORT: u64 = 16 << 10;
/// Rules for the contiguous ranges of the slices of a load. The default suits loads without slices.
#[derive(Clone, Copy, Default)]
pub struct RangeRules {
    /// Shorter ranges are read with the bytes between them, if these are no more than `gap`.
    long: u64,
    /// The most bytes between two short ranges that are cheaper to read than to skip.
    pub gap: u64,
}

impl RangeRules {
    /// The rules for slices of a file.
    pub fn of(selection: &Selection<'_>, options: &LoadOptions) -> Result<Self> {
        if !selection.is_sliced() {
            return Ok(RangeRules::default());
        }
        let sources = selection.file.sources();
        let files = as_refs(&sources);
        if page_cache::may_read_directly(
            &files,
            options.memory.or_environment()?,
            options.shares_cache,
        )? && page_cache::sample_residency(&files, &selection.extents())
            == PageCacheResidency::Little
        {
            return Ok(RangeRules { long: page_cache::DIRECT_GAP, gap: page_cache::DIRECT_GAP });
        }
        let gap = Capabilities::combined(&files).map_or(0, |capabilities| capabilities.merge_gap);
        Ok(RangeRules { long: SHORT, gap })
    }

    /// True if each range is read by itself, straight to its destination.
    pub fn are_long(&self, ranges: &SliceRanges) -> bool {
        let between = ranges.gap().is_none_or(|gap| gap > self.gap);
        ranges.range_len() >= if between { SHORT } else { self.long }
    }
}
