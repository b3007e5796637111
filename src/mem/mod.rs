//! Host memory that bytes are read into and that tensors then own.

mod arena;
pub mod device;
pub mod mapped;
pub mod pinned;
mod rest;

pub(crate) use crate::sys::to_fill;
pub use crate::sys::{Buffers, Lent, filled, zero_filled};
pub use arena::{ALIGNMENT, Arena, HostBuffer};
pub use rest::Rest;
