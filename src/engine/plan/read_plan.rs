//! The plan of a read: the ranges of files that are read, and what their bytes are for. Pure; where
//! the memory is, its destination knows.

use std::ops::Range;

use super::partition::{Batch, BatchLimits, Extent, Place, SegmentKind, partition_by_class};
use super::{SliceRanges, partition_by_device};
use crate::error::Result;
use crate::numbers::{ExtentNumber, TensorNumber};

/// The tensors that the data of an extent are for.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct ExtentUse {
    /// The tensors that they are wanted for: one, or several slices of one tensor in the file.
    pub tensors: Range<TensorNumber>,
    /// Position of the extent's first byte of data in the data of that tensor.
    pub start: u64,
    /// True if the data are read to scratch memory, from which the wanted ranges are copied. False
    /// if all are wanted, and go straight to their tensor.
    pub gathered: bool,
}

impl ExtentUse {
    /// Returns each of the tensors.
    pub fn each_tensor(&self) -> impl Iterator<Item = TensorNumber> + use<> {
        (self.tensors.start.0..self.tensors.end.0).map(TensorNumber)
    }
}

/// The ranges of files that are read together.
#[derive(Debug, Clone)]
pub struct ReadPlan<'p> {
    /// The ranges, in the order in which they are read.
    pub extents: Vec<Extent>,
    /// The use of each of them.
    pub uses: Vec<ExtentUse>,
    /// For each tensor of the call, the ranges that are wanted of it; None for a whole tensor.
    pub slices: &'p [Option<SliceRanges>],
    /// The device of each tensor of the call; may be empty if there is one.
    pub devices: &'p [usize],
    /// True if the data of a tensor are never cut, because they are encrypted in one piece.
    pub uncut: bool,
}

impl<'p> ReadPlan<'p> {
    /// A plan of nothing yet.
    pub fn new(slices: &'p [Option<SliceRanges>], devices: &'p [usize], uncut: bool) -> Self {
        ReadPlan { extents: Vec::new(), uses: Vec::new(), slices, devices, uncut }
    }

    /// Adds an extent.
    pub fn push(&mut self, extent: Extent, extent_use: ExtentUse) {
        self.extents.push(extent);
        self.uses.push(extent_use);
    }

    /// Returns what an extent is for.
    pub fn use_of(&self, extent: ExtentNumber) -> Result<&ExtentUse> {
        extent.of(&self.uses)
    }

    /// True if some bytes are read to scratch memory.
    pub fn gathers(&self) -> bool {
        self.uses.iter().any(|extent_use| extent_use.gathered)
    }

    /// Returns the memory position of the wanted bytes of a tensor that come after `position` of its
    /// data in the file.
    pub fn place(&self, tensor: TensorNumber, position: u64) -> Place {
        let ranges = self.ranges_of(tensor);
        Place { tensor, offset: ranges.map_or(position, |ranges| ranges.before(position)) }
    }

    /// Returns the ranges that are wanted of a tensor; None for a whole tensor.
    pub fn ranges_of(&self, tensor: TensorNumber) -> Option<&'p SliceRanges> {
        self.slices.get(tensor.0)?.as_ref()
    }

    /// Sets the places of a batch's segments.
    pub fn place_all(&self, batch: &mut Batch) -> Result<()> {
        for segment in &mut batch.segments {
            segment.place = match segment.kind {
                SegmentKind::Gap => None,
                SegmentKind::Header { extent } => {
                    Some(Place { tensor: self.use_of(extent)?.tensors.start, offset: 0 })
                }
                SegmentKind::Data { extent, start } => {
                    let ExtentUse { tensors, start: first, .. } = self.use_of(extent)?;
                    Some(self.place(tensors.start, first.saturating_add(start)))
                }
            };
        }
        Ok(())
    }

    /// Returns the device of an extent.
    pub fn device_of(&self, extent: ExtentNumber) -> usize {
        let device = self.use_of(extent).and_then(|of| of.tensors.start.of(self.devices));
        device.copied().unwrap_or(0)
    }

    /// Cuts the extents into batches. Each is for one device, and goes either through scratch memory
    /// or not. `any_order`: the source can be read in another order than that of the file, so that
    /// several devices are kept busy.
    pub fn batches(&self, limits: &BatchLimits, any_order: bool) -> Result<Vec<Batch>> {
        let gathered =
            |extent: ExtentNumber| usize::from(self.use_of(extent).is_ok_and(|of| of.gathered));
        let devices = self.devices.iter().max().map_or(1, |most| most + 1);
        if any_order {
            let device_of = |extent| self.device_of(extent);
            return partition_by_device(&self.extents, limits, (devices, &device_of), &gathered);
        }
        let class = |extent| 2 * self.device_of(extent) + gathered(extent);
        Ok(partition_by_class(&self.extents, limits, class))
    }
}
