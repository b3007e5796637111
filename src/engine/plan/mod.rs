//! Plans of loads and saves: the byte ranges of a call, their order and their memory. Pure
//! functions over ranges, without I/O or a clock.

mod by_device;
mod memory_layout;

mod partition;
mod queue;
mod read_plan;
mod slice_ranges;
mod staging;

pub use by_device::partition_by_device;
pub use memory_layout::{BlockLayout, BlockLocation, LargeTensors, MemoryLayout, SMALL};

pub use partition::{
    Batch, BatchLimits, Extent, Place, Segment, SegmentKind, partition, partition_by_class,
};
pub use queue::{Next, WorkQueue};
pub use read_plan::{ExtentUse, ReadPlan};
pub use slice_ranges::SliceRanges;
pub use staging::{DeviceCopy, StagedSegment, StagingPlan, plan_staging};
