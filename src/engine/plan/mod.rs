//! Which bytes, in what order, in what segments: pure functions over ranges. No I/O, no clock.

mod by_device;
mod image;
mod pack;
mod partition;
mod queue;
mod runs;
mod staging;

pub use by_device::partition_by_device;
pub use image::{Block, Large, Layout, Place, SMALL};
pub use pack::{MemoryRange, pack};
pub use partition::{Batch, Extent, Limits, PLAN, Segment, SegmentKind, partition};
pub use queue::{Next, WorkQueue};
pub use runs::Runs;
pub use staging::{Copy, Staged, Staging, stage};
