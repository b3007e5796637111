//! What programs call: open a file, load from it, save to one.

pub mod device;
pub mod file;
pub mod headers;
pub mod load;
pub mod save;
pub mod save_options;
mod selection;
pub mod snapshot;
pub mod tensor;
pub mod typed;
mod unlock;
pub mod verify;
