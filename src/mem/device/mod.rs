//! Devices with memory of their own, to and from which copies run while the host goes on.
//!
//! Memory of a device comes from torch, host memory that it copies from and to from
//! [`crate::mem::pinned`].

mod blocks;
#[cfg(feature = "cuda")]
pub mod cuda;
#[cfg(any(test, feature = "stand-in"))]
pub mod fake;
mod interface;
mod memory;
mod streams;

use std::sync::Arc;

pub use blocks::{Block, Blocks};
pub use interface::{CPU, Consumer, Device, DeviceFile, Event, Index, Scope, Stream, Upload};
pub use memory::DeviceMemory;
pub use streams::{OnDevice, Streams, StreamsByDevice};

use crate::error::Result;

/// The device behind a number. None for host memory; what kept us from a CUDA device is the error,
/// and torch has to copy.
pub fn find(index: Index) -> Result<Option<Arc<dyn Device>>> {
    #[cfg(any(test, feature = "stand-in"))]
    if index == CPU {
        return fake::instead_of_cpu();
    }
    match u32::try_from(index) {
        #[cfg(feature = "cuda")]
        Ok(index) => cuda::CudaDevice::find(index).map(Some),
        _ => Ok(None),
    }
}
