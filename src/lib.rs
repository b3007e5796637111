//! Reads and writes `.tensors` files.
//!
//! The path of the data, and the order of the modules:
//!
//! ```text
//! source → plan → buffer → transform → tensor        load
//! tensor → plan → transform → sink                   save
//! ```
//!
//! An *entry* is a tensor in the index of a file, an *extent* its range of the file, a *part* one
//! contiguous range that one call moves, a *piece* the bytes of a part with one destination.
//!
//! ```
//! use tensorizer::format::{TensorKind, dtype::DType, name::Name};
//! use tensorizer::{Data, LoadOptions, SaveOptions, SaveTensor, TensorFile};
//!
//! # fn main() -> Result<(), Box<dyn std::error::Error>> {
//! let folder = tempfile::tempdir()?;
//! let path = folder.path().join("model.tensors");
//! let weight = [1.0f32, 2.0].map(f32::to_le_bytes).concat();
//! let tensor = SaveTensor {
//!     name: Name::from_key("weight")?,
//!     kind: TensorKind::StateDict,
//!     module_index: 0,
//!     dtype: DType::from_name("float32").ok_or("no such type")?,
//!     shape: vec![2],
//!     data: Data::Bytes(&weight),
//! };
//! tensorizer::save(&path, vec![tensor], SaveOptions::default(), &|| Ok(()))?;
//!
//! let file = TensorFile::open(&path)?;
//! let selection = file.select(&["weight"])?;
//! let loaded = tensorizer::load(&file, &selection, &LoadOptions::default(), &|| Ok(()))?;
//! assert_eq!(loaded[0].memory.bytes(), weight);
//! # Ok(())
//! # }
//! ```

pub mod buffer;
mod drain;
pub mod error;
#[cfg(feature = "torch")]
mod ffi;
mod fill;
pub mod format;
mod job;
mod load;
pub mod plan;
#[cfg(feature = "python")]
mod py;
mod save;
pub mod sink;
pub mod source;
mod sys;
#[cfg(feature = "torch")]
mod tensor;
mod tensor_file;
pub mod transform;
mod workers;

pub use error::{Error, Result};
pub use fill::read_headers;
pub use load::{LoadOptions, LoadedTensor, Mapping, load, load_into};
pub use save::{Data, HostCopy, SaveOptions, SaveTensor, Writer, save};
pub use tensor_file::TensorFile;
pub use workers::Interrupt;

/// Cores that this process may use; the quota of its control group is respected.
pub fn cpu_count() -> usize {
    std::thread::available_parallelism().map_or(1, std::num::NonZero::get)
}
