//! The Rust functions that C++ calls: those behind the operators, and access to loaded tensors.
//! From Rust, only `tch.rs` uses this module.
#![allow(unsafe_code)]
// The code that the bridge expands to is not documented.
#![allow(missing_docs, clippy::missing_safety_doc)]

use crate::handles::{lend_to_handle, take_from_handle};
use crate::iterate::device_of;
use crate::operators::{
    op_describe, op_iterate, op_iterate_close, op_iterate_next, op_load, op_load_checked,
    op_load_into, op_names, op_save, reaches,
};
use crate::tensor::{LoadedTensors, TorchHostMemory};

#[cxx::bridge(namespace = "tensorizer")]
mod ffi {
    unsafe extern "C++" {
        include!("tensorizer-torch/torch.rs.h");

        type OpOptions = crate::torch::OpOptions;
        type TensorList = crate::torch::TensorList;
        type TensorPlace = crate::torch::TensorPlace;
        type TorchBlocks = crate::torch::TorchBlocks;
    }

    extern "Rust" {
        type TorchHostMemory;
        fn data(self: &TorchHostMemory) -> *mut u8;
        fn size(self: &TorchHostMemory) -> usize;

        type LoadedTensors;
        fn size(self: &LoadedTensors) -> usize;
        fn name(self: &LoadedTensors, at: usize) -> &str;
        fn dtype(self: &LoadedTensors, at: usize) -> i8;
        fn shape(self: &LoadedTensors, at: usize) -> &[i64];
        fn take(self: &mut LoadedTensors, at: usize) -> Box<TorchHostMemory>;
        fn place(self: &LoadedTensors, at: usize) -> TensorPlace;
        fn devices(self: &LoadedTensors) -> usize;
        fn take_blocks(self: &mut LoadedTensors, device: usize) -> UniquePtr<TorchBlocks>;

        fn op_load(
            uri: &str,
            names: Vec<String>,
            all: bool,
            options: OpOptions,
        ) -> Result<Box<LoadedTensors>>;
        fn op_load_checked(
            uri: &str,
            names: Vec<String>,
            expected: Vec<String>,
            options: OpOptions,
        ) -> Result<Box<LoadedTensors>>;
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
            device: &str,
            options: OpOptions,
        ) -> Result<i64>;
        fn device_of(iterator: i64) -> String;
        fn op_iterate_next(iterator: i64) -> Result<Box<LoadedTensors>>;
        fn op_iterate_close(iterator: i64) -> Result<()>;
        fn op_save(uri: &str, names: Vec<String>, tensors: &TensorList, key: Vec<u8>)
        -> Result<()>;

        fn lend_to_handle(handle: i64, tensors: UniquePtr<TensorList>) -> Result<()>;
        fn take_from_handle(handle: i64) -> Result<Box<LoadedTensors>>;
    }

    #[cfg(feature = "tch")]
    unsafe extern "C++" {
        fn new_tensors(loaded: &mut LoadedTensors) -> Result<Vec<usize>>;
    }
}

#[cfg(feature = "tch")]
pub use ffi::new_tensors;
