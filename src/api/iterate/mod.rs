//! Tensors of a file one by one, in host memory or on a device, while the next are being read.
//!
//! Each iterator has a thread for its load (`load`), which has readers as every load does. The
//! window is between the load and the caller: it holds tensors that were delivered, and bounds how
//! far others are read ahead. Device memory is allocated by the caller, on the caller's thread.

mod host;
mod iterator;
mod load;
mod options;
mod shared;
mod window;

pub use host::Tensors;
pub use iterator::{Allocate, Closer, ReadyTensor, TensorIterator};
pub use options::{IterateOptions, Order};
pub use shared::IteratorDevice;
pub use window::ReadyMemory;

#[cfg(all(test, not(feature = "models")))]
mod tests;
