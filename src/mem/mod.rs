//! Host memory that bytes are read into and that tensors then own.

mod arena;
pub mod device;
pub mod mapped;
pub mod pinned;
mod zeroed;

pub use crate::sys::{Buffers, Lent, filled, to_fill, zero_filled};
pub use arena::{ALIGNMENT, Arena, HostBuffer};
pub use zeroed::zeroed;
