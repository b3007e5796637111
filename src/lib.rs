//! Reads and writes files of tensors, `.tensors` and `.safetensors`, and reads checkpoints that
//! consist of several files.
//!
//! The path of the data:
//!
//! ```text
//! source → batch → codec → target → tensor        load
//! tensor → data → chunk → codec → sink            save
//! ```
//!
//! The layers, each of which uses those below it:
//!
//! ```text
//! api      open a file, load from it, save to one: the items at the top of this crate
//! engine   plan, read, write: moves bytes, whatever their format, source and target
//! io       sources and sinks: files, pipes, servers
//! mem      host memory, staging buffers, devices
//! codec    encryption and hashes
//! format   the bytes of a file to structs and back
//! error, cancel, environment, memory_limit, stats, traffic, sys
//! ```
//!
//! An *entry* is a tensor in the index of a file, an *extent* its range of the file, a *batch* one
//! contiguous range that one request moves, a *segment* the bytes of a batch with one destination.
//!
//! ```
//! use tensorizer::{SaveTensor, TensorFile, half::bf16};
//!
//! # fn main() -> tensorizer::Result<()> {
//! # let folder = tempfile::tempdir().unwrap();
//! let path = folder.path().join("model.tensors");
//! let bias = [bf16::from_f32(0.5), bf16::from_f32(-1.0)];
//! tensorizer::write(&path, vec![
//!     SaveTensor::new("weight", &[2, 3], &[1.0f32, 2.0, 3.0, 4.0, 5.0, 6.0])?,
//!     SaveTensor::new("bias", &[2], &bias)?,
//! ])?;
//!
//! let file = TensorFile::open(&path)?;
//! for entry in file.entries() {
//!     println!("{} {} {:?}", entry.name, entry.dtype, entry.shape);
//! }
//! let weight = file.read("weight")?; // owns its memory
//! assert_eq!(weight.shape(), [2, 3]);
//! assert_eq!(weight.as_slice::<f32>()?[4], 5.0);
//! let mut mine = [bf16::ZERO; 2]; // memory of the caller
//! file.read_into("bias", &mut mine)?;
//! assert_eq!(mine, bias);
//! # Ok(())
//! # }
//! ```
//!
//! Tensors one by one, while the next are being read:
//!
//! ```
//! use tensorizer::{IterateOptions, SaveTensor, TensorFile};
//!
//! # fn main() -> tensorizer::Result<()> {
//! # let folder = tempfile::tempdir().unwrap();
//! let path = folder.path().join("model.tensors");
//! tensorizer::write(&path, vec![SaveTensor::new("weight", &[2], &[1.0f32, 2.0])?])?;
//! let file = TensorFile::open(&path)?;
//! for tensor in file.iterate(&[0], &IterateOptions::default())? {
//!     assert_eq!(tensor?.as_slice::<f32>()?, [1.0, 2.0]);
//! }
//! # Ok(())
//! # }
//! ```
//!
//! [`load`], [`load_into`], [`save`] and [`Writer`] do the same with options, by number, and with
//! a [`Cancel`].

mod api;
pub mod cancel;
pub mod error;
mod fallible;
pub mod format;
pub mod stats;
mod sys;
#[cfg(test)]
mod tests;

// Internals of the torch operators and the Python module, without any promise of stability.
#[doc(hidden)]
pub mod codec;
#[doc(hidden)]
pub mod engine;
#[doc(hidden)]
pub mod environment;
#[cfg(feature = "fuzzing")]
#[doc(hidden)]
pub mod fuzzing;
#[doc(hidden)]
pub mod io;
#[doc(hidden)]
pub mod mem;
#[doc(hidden)]
pub mod memory_limit;
#[doc(hidden)]
pub mod numbers;
#[doc(hidden)]
pub mod traffic;

pub use half;

#[doc(hidden)]
pub use api::archive::PickledTensor;
pub use api::catalog_part::Opening;
#[doc(hidden)]
pub use api::device::DeviceLoad;
pub use api::device::{DestinationDevice, DeviceMemoryBlocks};
pub use api::file::TensorFile;
#[doc(hidden)]
pub use api::headers::read_headers;
#[doc(hidden)]
pub use api::iterate::{
    Allocate, Closer, IteratorDevice, ReadyMemory, ReadyTensor, TensorIterator,
};
pub use api::iterate::{IterateOptions, Order, Tensors};
pub use api::load::{load, load_into};
#[doc(hidden)]
pub use api::load::{load_counted, load_into_uninit};
pub use api::save::Writer;
pub use api::save_all::{save, save_to};
pub use api::save_options::{IdentitySource, SaveOptions, SaveTensor};
pub use api::shard_index::ShardIndex;
#[doc(hidden)]
pub use api::snapshot::snapshot;
pub use api::tensor::{Element, Tensor};
pub use api::typed::write;
#[doc(hidden)]
pub use api::verify::matches_header;
pub use cancel::{Cancel, Never};
pub use codec::CompactHeader;
#[doc(inline)]
pub use codec::crypt;
pub use codec::hash::Verify;
pub use engine::load_options::LoadOptions;
pub use engine::write::{HostCopy, TensorData};
pub use error::{Error, Result};
#[doc(hidden)]
pub use fallible::try_resize;
pub use format::tensors::header::Hashes;
pub use io::local::{FileSink, FileSource};
pub use io::{Capabilities, Facts, MemorySource, ReadAt, StreamSource, WriteAt};
#[doc(hidden)]
pub use mem::device;
pub use mem::{Buffers, HostBuffer};
pub use memory_limit::MemoryLimit;
pub use sys::cpu_count;
#[doc(hidden)]
pub use sys::fork_safe_mutex::ForkSafeMutex;
#[doc(hidden)]
pub use sys::process::{DropInOwner, OwnerProcess, PerProcess};
#[doc(hidden)]
pub use sys::sync::unpoisoned;
#[doc(hidden)]
pub use sys::to_usize;

/// Initialises a library while it is loaded, before there are threads. Otherwise the process might
/// be forked while a thread does this at the first use.
#[doc(hidden)]
pub fn before_threads() {
    sys::fork_safe_mutex::install_fork_handlers();
    codec::crypt::start();
}
