//! Device memory from torch's allocator. One of the few modules that may use `unsafe`.
#![allow(unsafe_code)]

use cxx::UniquePtr;
use tensorizer::device::{Consumer, DeviceIndex, DeviceMemory};
use tensorizer::error::{Error, Result};
use tensorizer::{Allocate, to_usize};

use crate::torch::{self, TorchBlocks, thrown};

/// Blocks of a device's memory, from torch's allocator.
pub struct TorchAllocator {
    device: DeviceIndex,
    blocks: UniquePtr<TorchBlocks>,
}

impl TorchAllocator {
    /// Makes a list without blocks.
    pub fn new(device: DeviceIndex) -> Self {
        TorchAllocator { device, blocks: torch::new_blocks(device) }
    }

    /// Returns the blocks, which then belong to the caller.
    pub fn into_blocks(self) -> UniquePtr<TorchBlocks> {
        self.blocks
    }

    /// Takes blocks out, given by number, for use on the device's current stream.
    pub fn take(&mut self, blocks: &[usize]) -> Result<UniquePtr<TorchBlocks>> {
        self.blocks.pin_mut().take(blocks).map_err(thrown)
    }

    /// Has torch ask the driver for several of the next blocks at once: `least` to `most` bytes.
    /// Returns how many that are; 0 if it does not.
    pub fn reserve(&mut self, least: u64, most: u64) -> u64 {
        self.blocks.pin_mut().reserve(least, most)
    }
}

impl Allocate for TorchAllocator {
    fn allocate(&mut self, first: usize, lens: &[u64]) -> Result<Vec<DeviceMemory>> {
        let added = self.blocks.pin_mut().add(lens);
        added.map_err(|exception| allocation_error(&exception))?;
        let memory = lens.iter().zip(first..).map(|(&len, at)| {
            // SAFETY: the block is new, has `len` bytes, and no other code has its address. The
            // list keeps it until it is handed out, for a stream that waits for its copies, or
            // until all copies have ended.
            Ok(unsafe {
                DeviceMemory::new(self.blocks.block_address(at).map_err(thrown)?, to_usize(len))
            })
        });
        memory.collect()
    }

    fn consumer(&mut self) -> Result<Consumer> {
        Ok(Consumer(torch::current_stream(self.device).map_err(thrown)?))
    }
}

/// Returns the error for an exception of torch's allocator.
fn allocation_error(exception: &cxx::Exception) -> Error {
    let what = exception.what().to_owned();
    // The texts of torch's allocators for CUDA and for the CPU.
    if what.contains("out of memory") || what.contains("allocate memory") {
        Error::DeviceMemory { what }
    } else {
        Error::Device { device: "torch".to_owned(), what }
    }
}
