//! What programs call: open a file, load from it, save to one.

pub mod file;
pub mod load;
pub mod save;
pub mod snapshot;
pub mod typed;
