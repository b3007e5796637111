//! Tensors of a file one by one, in host memory or on a device, while the next are being read.
//!
//! One thread for each iterator carries out the load (`run`), with readers as every load has them.
//! Between it and the caller lies the window: tensors that have landed, and how far others are read
//! ahead. Memory of a device comes from the caller, on the caller's thread.

mod host;
mod iterator;
mod options;
mod run;
mod shared;
mod window;

pub use host::Tensors;
pub use iterator::{Allocate, Closer, Landed, TensorIterator};
pub use options::{IterateOptions, Order};
pub use shared::ToDevice;
pub use window::Memory;

#[cfg(all(test, not(feature = "models")))]
mod tests;
