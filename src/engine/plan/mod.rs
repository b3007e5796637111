//! Plans of loads and saves: the byte ranges of a call, their order and their memory. Pure
//! functions over ranges, without I/O or a clock.

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
