//! Host memory that bytes are read into and that tensors then own.

mod arena;
#[cfg(any(feature = "torch", test))]
pub mod pinned;

pub use arena::{ALIGNMENT, Arena, HostBuffer};
