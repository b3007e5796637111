//! The Rust functions that C++ calls: those behind the operators, and access to loaded tensors.
//! From Rust, only `tch.rs` uses this module.
#![allow(unsafe_code)]
// The code that the bridge expands to is not documented.
#![allow(missing_docs, clippy::missing_safety_doc)]

use crate::exchange::{exchange_lend, exchange_take};
use crate::operators::{
    op_describe, op_iterate, op_iterate_close, op_iterate_next, op_load, op_load_all,
    op_load_checked, op_load_into, op_names, op_save, reaches,
};
use crate::tensor::{HostMemory, Loaded};

#[cxx::bridge(namespace = "tensorizer")]
mod ffi {
    unsafe extern "C++" {
        include!("tensorizer-torch/torch.rs.h");

        type OpOptions = crate::torch::OpOptions;
        type TensorList = crate::torch::TensorList;
        type Blocks = crate::torch::Blocks;
    }

    extern "Rust" {
        type HostMemory;
        fn data(self: &HostMemory) -> *mut u8;
        fn size(self: &HostMemory) -> usize;

        type Loaded;
        fn size(self: &Loaded) -> usize;
        fn name(self: &Loaded, at: usize) -> &str;
        fn dtype(self: &Loaded, at: usize) -> i8;
        fn shape(self: &Loaded, at: usize) -> &[i64];
        fn take(self: &mut Loaded, at: usize) -> Box<HostMemory>;
        fn block(self: &Loaded, at: usize) -> i64;
        fn device(self: &Loaded, at: usize) -> usize;
        fn offset(self: &Loaded, at: usize) -> u64;
        fn devices(self: &Loaded) -> usize;
        fn take_blocks(self: &mut Loaded, device: usize) -> UniquePtr<Blocks>;

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
        fn op_iterate(
            uri: &str,
            names: Vec<String>,
            all: bool,
            buffer_bytes: u64,
            ready: bool,
            options: OpOptions,
        ) -> Result<i64>;
        fn op_iterate_next(iterator: i64) -> Result<Box<Loaded>>;
        fn op_iterate_close(iterator: i64) -> Result<()>;
        fn op_save(uri: &str, names: Vec<String>, tensors: &TensorList, key: Vec<u8>)
        -> Result<()>;

        fn exchange_lend(handle: i64, tensors: UniquePtr<TensorList>) -> Result<()>;
        fn exchange_take(handle: i64) -> Result<Box<Loaded>>;
    }

    #[cfg(feature = "tch")]
    unsafe extern "C++" {
        fn new_tensors(loaded: &mut Loaded) -> Result<Vec<usize>>;
    }
}

#[cfg(feature = "tch")]
pub use ffi::new_tensors;
