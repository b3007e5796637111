//! Which bytes, in what order, in what segments: pure functions over ranges. No I/O, no clock.

mod pack;
mod partition;
mod shares;
mod staging;

pub use pack::{MemoryRange, pack};
pub use partition::{Batch, Extent, Segment, SegmentKind, partition};
pub use shares::Shares;
pub use staging::{Grain, Move, Staging, Target, blocks, stage};
