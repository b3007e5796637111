//! The C++ functions that Rust calls, for lists of tensors, and the types that both sides share.
//! Uses no other Rust file of this folder, so that all of them can use it. `bridge.rs` has the
//! other direction.
#![allow(unsafe_code)]
// The code that the bridge expands to is not documented.
#![allow(missing_docs, clippy::missing_safety_doc)]

use tensorizer::error::Error;

#[cxx::bridge(namespace = "tensorizer")]
mod ffi {
    /// The properties of a tensor that the core needs.
    struct TensorInfo {
        /// The dtype, as a `c10::ScalarType`.
        dtype: i8,
        shape: Vec<u64>,
        /// The number of bytes.
        len: u64,
        /// True for tensors of the `meta` device.
        meta: bool,
        /// True if its bytes can be used as they are: in row-major order, on a device that the core
        /// knows.
        ready: bool,
        /// The device: -1 for the CPU, the index for CUDA, -2 for others.
        device: i16,
    }

    /// Load options of an operator.
    struct OpOptions {
        verify: bool,
        /// The number of reader threads; 0 for the source's own number.
        readers: u64,
        /// The bytes of the key; empty for none.
        key: Vec<u8>,
        /// The device that tensors go to: -1 for the CPU, the index for CUDA.
        device: i16,
    }

    /// The place of a loaded tensor in the memory of devices.
    struct TensorPlace {
        /// The position of the device in the call's list of devices.
        device: usize,
        /// The number of the block; -1 for host memory, -2 for zeros that are not created yet.
        block: i64,
        /// The position of the first byte in the block.
        offset: u64,
    }

    unsafe extern "C++" {
        include!("blocks.h");
        include!("tensor.h");
        include!("ops.h");

        type TensorList;
        fn size(self: &TensorList) -> usize;
        fn info(self: &TensorList, at: usize) -> Result<TensorInfo>;
        fn bytes(self: &TensorList, at: usize) -> Result<&[u8]>;
        /// Returns this thread's stream of a tensor's device, for `host_copy` on another thread.
        fn stream(self: &TensorList, at: usize) -> Result<i64>;
        fn host_copy(self: &TensorList, at: usize, stream: i64) -> Result<UniquePtr<TensorList>>;

        /// Uninitialised blocks of a device's memory.
        type TorchBlocks;
        /// Makes an empty list of blocks.
        fn new_blocks(device: i16) -> UniquePtr<TorchBlocks>;
        /// Adds blocks of these lengths.
        fn add(self: Pin<&mut TorchBlocks>, lens: &[u64]) -> Result<()>;
        #[cxx_name = "address"]
        fn block_address(self: &TorchBlocks, at: usize) -> Result<usize>;
        /// Has torch's allocator ask the driver for several of the next blocks at once.
        fn reserve(self: Pin<&mut TorchBlocks>, least: u64, most: u64) -> u64;
        /// Takes blocks out, for the current stream of their device.
        fn take(self: Pin<&mut TorchBlocks>, numbers: &[usize]) -> Result<UniquePtr<TorchBlocks>>;
        /// Returns the driver's handle of this thread's current stream of a device.
        fn current_stream(device: i16) -> Result<usize>;
        fn address(self: &TensorList, at: usize) -> Result<usize>;
        fn writable(self: &TensorList, at: usize) -> Result<usize>;
        fn fill_zero(self: &TensorList, at: usize) -> Result<()>;
        /// Tells autograd that the tensors were changed.
        fn changed(self: &TensorList) -> Result<()>;

        fn register_operators() -> Result<()>;
    }

    #[cfg(feature = "tch")]
    unsafe extern "C++" {
        /// # Safety
        /// Each address is that of an `at::Tensor`.
        unsafe fn list_tensors(addresses: &[usize]) -> Result<UniquePtr<TensorList>>;

        fn load_into_list(uri: &str, names: &[String], out: &TensorList) -> Result<()>;
    }
}

pub use ffi::*;

// SAFETY: holds storages, whose reference counts are atomic, and only its owner changes it.
unsafe impl Send for TorchBlocks {}

// SAFETY: a list of `at::Tensor`s that is never changed after it was made. Their reference counts
// are atomic, and the methods of the bridge only read the tensors or make new ones.
unsafe impl Send for TensorList {}
// SAFETY: as for `Send` above: shared references only read the tensors or make new ones.
unsafe impl Sync for TensorList {}

/// Converts an exception of torch: missing memory, an error of a device, or else a tensor that
/// cannot be handled. Only the texts tell them apart.
pub fn thrown(exception: cxx::Exception) -> Error {
    let what = exception.what();
    if let Some((_, after)) = what.split_once("you tried to allocate ") {
        let digits = after.split(' ').next().unwrap_or("");
        return Error::OutOfMemory {
            bytes: digits.parse().unwrap_or(0),
            what: "a copy by torch".to_owned(),
            error: std::io::Error::from(std::io::ErrorKind::OutOfMemory),
        };
    }
    if what.contains("out of memory") {
        return Error::DeviceMemory { what: what.to_owned() };
    }
    if what.contains("CUDA error") {
        return Error::Device { device: "torch".to_owned(), what: what.to_owned() };
    }
    Error::Unsupported(what.to_owned())
}
