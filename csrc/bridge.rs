//! The only bridge between Rust and C++: what the operators call, and the tensors they hand over.
#![allow(unsafe_code)]
// The bridge's own expansion is not documented.
#![allow(missing_docs, clippy::missing_safety_doc)]

use tensorizer::error::Error;

use crate::exchange::{exchange_lend, exchange_take};
use crate::operators::{
    op_describe, op_load, op_load_all, op_load_checked, op_load_into, op_names, op_save, reaches,
};
use crate::tensor::{HostMemory, Loaded};

#[cxx::bridge(namespace = "tensorizer")]
mod ffi {
    /// What the core needs to know of a tensor.
    struct TensorInfo {
        /// `c10::ScalarType`.
        dtype: i8,
        shape: Vec<u64>,
        /// On the `meta` device.
        meta: bool,
        /// In row-major order in memory.
        ready: bool,
        /// -1 for the CPU, the index for CUDA, -2 for others.
        device: i16,
    }

    /// How an operator is to load.
    struct OpOptions {
        verify: bool,
        /// 0 for the source's own number.
        readers: u64,
        /// Empty for none.
        key: Vec<u8>,
        /// Where the tensors go: -1 for the CPU, the index for CUDA.
        device: i16,
    }

    unsafe extern "C++" {
        include!("tensor.h");
        include!("ops.h");

        type TensorList;
        fn size(self: &TensorList) -> usize;
        fn info(self: &TensorList, at: usize) -> Result<TensorInfo>;
        fn bytes(self: &TensorList, at: usize) -> Result<&[u8]>;
        /// This thread's stream of a tensor's device, for `host_copy` on another thread.
        fn stream(self: &TensorList, at: usize) -> Result<i64>;
        fn host_copy(self: &TensorList, at: usize, stream: i64) -> Result<UniquePtr<TensorList>>;

        /// Uninitialised blocks of so many bytes each.
        fn new_blocks(device: i16, lens: &[u64]) -> Result<UniquePtr<TensorList>>;
        /// The stream that the driver knows as this thread's current one of a device.
        fn current_stream(device: i16) -> Result<usize>;
        fn address(self: &TensorList, at: usize) -> Result<usize>;
        fn writable(self: &TensorList, at: usize) -> Result<usize>;
        fn len(self: &TensorList, at: usize) -> Result<u64>;
        fn fill_zero(self: &TensorList, at: usize) -> Result<()>;
        /// Tells autograd that the tensors were changed.
        fn changed(self: &TensorList) -> Result<()>;

        fn register_operators() -> Result<()>;
    }

    extern "Rust" {
        type HostMemory;
        fn data(self: &HostMemory) -> *mut u8;

        type Loaded;
        fn size(self: &Loaded) -> usize;
        fn name(self: &Loaded, at: usize) -> &str;
        fn dtype(self: &Loaded, at: usize) -> i8;
        fn shape(self: &Loaded, at: usize) -> &[i64];
        fn take(self: &mut Loaded, at: usize) -> Box<HostMemory>;
        fn block(self: &Loaded, at: usize) -> i64;
        fn offset(self: &Loaded, at: usize) -> u64;
        fn take_blocks(self: &mut Loaded) -> UniquePtr<TensorList>;

        fn op_load_all(uri: &str, options: OpOptions) -> Result<Box<Loaded>>;
        fn op_load(uri: &str, names: Vec<String>, options: OpOptions) -> Result<Box<Loaded>>;
        fn op_load_checked(
            uri: &str,
            names: Vec<String>,
            expected: Vec<String>,
            options: OpOptions,
        ) -> Result<Box<Loaded>>;
        fn op_load_into(
            uri: &str,
            names: Vec<String>,
            out: &TensorList,
            options: OpOptions,
        ) -> Result<()>;
        fn reaches(device: i16) -> bool;
        fn op_names(uri: &str) -> Result<Vec<String>>;
        fn op_describe(uri: &str, names: Vec<String>) -> Result<Vec<String>>;
        fn op_save(uri: &str, names: Vec<String>, tensors: &TensorList, key: Vec<u8>)
        -> Result<()>;
    }

    #[cfg(feature = "tch")]
    unsafe extern "C++" {
        /// # Safety
        /// Each address is that of an `at::Tensor`.
        unsafe fn list_tensors(addresses: &[usize]) -> Result<UniquePtr<TensorList>>;

        fn new_tensors(loaded: &mut Loaded) -> Result<Vec<usize>>;
        fn load_into_list(uri: &str, names: &[String], out: &TensorList) -> Result<()>;
    }

    extern "Rust" {
        fn exchange_lend(handle: i64, tensors: UniquePtr<TensorList>) -> Result<()>;
        fn exchange_take(handle: i64) -> Result<Box<Loaded>>;
    }
}

pub use ffi::*;

// SAFETY: a list of `at::Tensor`s that is never changed after it was made. Their reference counts
// are atomic, and the methods of the bridge only read the tensors or make new ones.
unsafe impl Send for TensorList {}
// SAFETY: as above.
unsafe impl Sync for TensorList {}

/// Everything that the C++ side throws is about tensors that cannot be handled.
pub fn thrown(exception: cxx::Exception) -> Error {
    Error::Unsupported(exception.what().to_owned())
}
