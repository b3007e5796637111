//! The torch operators over the tensorizer core: `torch.ops.tensorizer.load` and `.save`.
//!
//! The crate in `library` makes them `libtensorizer_torch.so`, for every process that has LibTorch and
//! no Python; in the Python module they are included.

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
pub use operators::{INTERRUPT, UNLOCKED};
pub use torch::{TensorList, thrown};

/// The `major.minor` of the torch that this was built against.
pub const TORCH_VERSION: &str = env!("TENSORIZER_TORCH_VERSION");
