//! Host memory that bytes are read into and that tensors then own, staging memory, and device
//! memory.

mod arena;
mod block;
pub mod device;
mod host_buffer;
pub mod mapped;
mod mapping;
pub mod numa;
pub mod pinned;
mod slice_remainder;
mod spare_blocks;
mod unfilled;

pub use crate::sys::{BufferToFill, Buffers, FilledPart, FilledRanges, fill_all};
pub(crate) use crate::sys::{as_uninit, zero_fill};
pub use arena::{ALIGNMENT, Arena};
pub use host_buffer::HostBuffer;
pub use mapping::{HUGE_PAGE, Mapping};
pub use slice_remainder::SliceRemainder;
pub use spare_blocks::SpareBlocks;
pub use unfilled::{BufferPiece, UnfilledBuffer};

/// Largest block of common disks. Positions and lengths of direct reads are multiples of it, and so
/// are the ranges of files in the cache.
pub const DISK_BLOCK: usize = 4096;
