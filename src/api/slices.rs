//! Slices of tensors, as tensors of a file.

use std::ops::Range;
use std::sync::Arc;

use super::file::TensorFile;
use super::tensor::dtype_of;
use crate::engine::plan::SliceRanges;
use crate::error::{Error, Result};
use crate::fallible::collect_all;
use crate::format::catalog::{Entry, WholeTensor};

/// A slice: a range of indices for each dimension.
pub type Slice = Box<[Range<u64>]>;

impl TensorFile {
    /// Returns the same file with slices of some of its tensors as its only tensors, in the order
    /// given and under the names of the tensors. A tensor may have several slices.
    pub fn sliced(&self, slices: Vec<(usize, Slice)>) -> Result<Self> {
        self.with_slices(slices.into_iter().map(|(number, slice)| (number, Some(slice))))
    }

    /// Does the same; tensors without a slice are taken whole.
    #[doc(hidden)]
    pub fn with_slices(
        &self,
        slices: impl IntoIterator<Item = (usize, Option<Slice>)>,
    ) -> Result<Self> {
        let entries = slices.into_iter().map(|(number, slice)| {
            let entry = self.entry(number)?;
            let Some(slice) = slice else { return Ok(entry.clone()) };
            let shape: Box<[u64]> =
                slice.iter().map(|range| range.end.saturating_sub(range.start)).collect();
            if SliceRanges::new(entry.dtype.size(), &entry.shape, &slice).is_none()
                || entry.whole.is_some()
            {
                return Err(Error::InvalidArgument(format!(
                    "invalid slice {slice:?} of tensor `{}`, whose shape is {:?}",
                    entry.name, entry.shape
                )));
            }
            let whole = Some(Arc::new(WholeTensor { shape: entry.shape.clone(), slice }));
            Ok(Entry { shape, whole, ..entry.clone() })
        });
        self.with_entries(collect_all(entries)?, true)
    }

    /// Returns the same file, each of whose tensors is its bytes in the file. Slices of them are
    /// parts of tensors that are cut at any byte.
    #[doc(hidden)]
    pub fn as_bytes(&self) -> Result<Self> {
        let dtype = dtype_of::<u8>()?;
        let bytes =
            |entry: &Entry| Entry { dtype, shape: [entry.data_len].into(), ..entry.clone() };
        self.with_entries(self.entries().iter().map(bytes).collect(), true)
    }
}
