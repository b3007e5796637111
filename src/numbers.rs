//! Numbers of the things of a call. Types, so that one is not taken for another.

use std::ops::Range;

use crate::error::{Error, Result};

/// The number of a tensor among those of a call, in the order of the file.
#[derive(Debug, Clone, Copy, Default, PartialEq, Eq, PartialOrd, Ord, Hash)]
pub struct TensorNumber(pub usize);

impl TensorNumber {
    /// Returns the numbers from one position to another.
    pub fn range(positions: Range<usize>) -> Range<TensorNumber> {
        TensorNumber(positions.start)..TensorNumber(positions.end)
    }

    /// Returns the tensor's item of a list that has one for each.
    pub fn of<T>(self, list: &[T]) -> Result<&T> {
        list.get(self.0).ok_or_else(|| Error::Bug(format!("no tensor {}", self.0)))
    }
}

/// The number of an extent of a plan, in the order of its list.
#[derive(Debug, Clone, Copy, Default, PartialEq, Eq, PartialOrd, Ord, Hash)]
pub struct ExtentNumber(pub usize);

impl ExtentNumber {
    /// Returns the extent's item of a list that has one for each.
    pub fn of<T>(self, list: &[T]) -> Result<&T> {
        list.get(self.0).ok_or_else(|| Error::Bug(format!("no extent {}", self.0)))
    }
}
