//! The torch operators over the tensorizer core: `torch.ops.tensorizer.load` and `.save`.
//!
//! As a `cdylib`, `libtensorizer_torch.so`, they are for every process that has LibTorch and no
//! Python; as an `rlib` they are part of the Python module.

mod allocator;
mod bridge;
mod devices;
pub mod fill;
pub mod guard;
pub mod handles;
pub mod iterate;
pub mod load;
pub mod lock_holder;
mod on_load;
mod operators;
#[cfg(feature = "tch")]
pub mod tch;
pub mod tensor;
mod torch;

pub use on_load::registered;
pub use operators::{set_interrupt, set_unlocked};
pub use torch::{TensorList, current_stream};

/// The `major.minor` of the torch that this was built against.
pub const TORCH_VERSION: &str = env!("TENSORIZER_TORCH_VERSION");
