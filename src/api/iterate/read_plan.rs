//! The plan of a read that hands out tensors one by one.

use std::collections::HashSet;

use crate::api::selection::Selection;
use crate::api::slice_rules::RangeRules;
use crate::api::slices::direct_ranges;
use crate::codec::hash::Verify;
use crate::engine::plan::Extent;
use crate::engine::target::owned::ExtentLocation;
use crate::error::{Error, Result};
use crate::fallible::{LISTS, try_push};

/// The plan of one read.
#[derive(Default)]
pub(super) struct ReadPlan {
    pub(super) extents: Vec<Extent>,
    /// The destination of each extent's data.
    pub(super) locations: Vec<ExtentLocation>,
    /// The position of each extent's tensor in the order of the file.
    pub(super) tensors: Vec<usize>,
    /// The number of each extent's tensor in the selection.
    pub(super) selected: Vec<usize>,
    /// Tensors of which nothing is read, by their positions in the order of the file.
    pub(super) unread: Vec<usize>,
    /// Tensors without data, of which only the header is read.
    pub(super) without_data: HashSet<usize>,
}

impl ReadPlan {
    pub(super) fn new(
        selection: &Selection<'_>,
        tensors: &[(usize, usize)],
        verify: Verify,
        rules: &RangeRules,
    ) -> Result<Self> {
        let mut plan = ReadPlan::default();
        let extents = selection.extents()?;
        for (at, (entry, extent)) in selection.entries.iter().zip(extents).enumerate() {
            let &(tensor, _) = tensors.get(at).ok_or_else(|| missing_from_plan(at))?;
            if entry.whole.is_none() && extent.end() > extent.header_offset {
                if extent.data_len == 0 {
                    plan.without_data.insert(tensor);
                }
                let file_position = extent.data_offset;
                plan.add(at, extent, ExtentLocation { tensor, offset: 0, file_position })?;
                continue;
            }
            let ranges = match entry.whole {
                Some(_) => direct_ranges(selection.file, entry, verify, rules)?,
                None => None,
            };
            let ranges = ranges.unwrap_or(Vec::new());
            if ranges.is_empty() {
                try_push(&mut plan.unread, tensor, LISTS)?;
            }
            for (extent, offset) in ranges {
                let file_position = extent.data_offset.wrapping_sub(offset);
                plan.add(at, extent, ExtentLocation { tensor, offset, file_position })?;
            }
        }
        Ok(plan)
    }

    fn add(&mut self, selected: usize, extent: Extent, location: ExtentLocation) -> Result<()> {
        try_push(&mut self.extents, extent, LISTS)?;
        try_push(&mut self.tensors, location.tensor, LISTS)?;
        try_push(&mut self.locations, location, LISTS)?;
        try_push(&mut self.selected, selected, LISTS)
    }
}

pub(super) fn missing_from_plan(number: usize) -> Error {
    Error::Bug(format!("no tensor {number} in a plan"))
}
