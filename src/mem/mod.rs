//! Host memory that bytes are read into and that tensors then own, staging memory, and device
//! memory.

mod arena;
pub mod device;
pub mod mapped;
pub mod numa;
pub mod pinned;
mod slice_remainder;

pub(crate) use crate::sys::as_uninit;
pub use crate::sys::{ArrivalObserver, BufferToFill, Buffers, FilledPart, fill_all};
pub use arena::{ALIGNMENT, Arena, BufferPiece, HUGE_PAGE, HostBuffer, UnfilledBuffer};
pub use slice_remainder::SliceRemainder;

/// Largest block of common disks. Positions and lengths of direct reads are multiples of it, and so
/// are the ranges of files in the cache.
pub const DISK_BLOCK: usize = 4096;
