//! Host memory that bytes are read into and that tensors then own.

mod arena;
pub mod device;
pub mod mapped;
pub mod numa;
pub mod pinned;
mod rest;

pub(crate) use crate::sys::to_fill;
pub use crate::sys::{Buffers, Filled, Lent, Progress, filled, zero_filled};
pub use arena::{ALIGNMENT, Arena, HUGE_PAGE, HostBuffer, Piece, Unfilled};
pub use rest::Rest;

/// Positions and lengths of direct reads are multiples of this, and files of the cache have their parts
/// there: the largest block of usual disks.
pub const DISK_BLOCK: usize = 4096;
