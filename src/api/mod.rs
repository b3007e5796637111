//! What programs call: open a file, load from it, save to one.

pub mod archive;
mod copies;
pub mod device;
pub mod file;
mod head;
pub mod headers;
pub mod iterate;
mod known;
mod least;
pub mod load;
pub mod load_options;
mod open;
pub mod part;
pub mod parts;
mod proven;
pub mod save;
pub mod save_options;
mod save_safetensors;
mod selection;
pub mod slice_rules;
pub mod slices;
mod small;
pub mod snapshot;
pub mod tensor;
pub mod typed;
mod unlock;
pub mod verify;
