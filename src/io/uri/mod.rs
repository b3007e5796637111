//! Addresses: parsing them, and opening or creating the files that they name.

mod model;
mod open;
mod path_hint;
mod scheme;
mod target;

pub use model::{open_file, open_model, open_path};
#[cfg(any(feature = "clouds", feature = "s3"))]
pub use open::create_object;
pub use open::{create, display_address, open};
pub use path_hint::path_hint;
pub use scheme::{Address, Scheme, Service, parse};
pub use target::{check_target, check_tensors_name, create_file};
