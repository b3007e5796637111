//! Devices with memory of their own. Copies to and from it run while the host goes on.
//!
//! Device memory comes from torch; the host memory of copies comes from [`crate::mem::pinned`].

mod blocks;
#[cfg(feature = "cuda")]
pub mod cuda;
mod interface;
mod memory;
#[cfg(test)]
pub mod simulated;
mod streams;

use std::sync::Arc;

pub use blocks::{DeviceBlock, DeviceBlocks};
pub use interface::{
    CPU, Consumer, Device, DeviceFile, DeviceIndex, DeviceScope, Event, HostToDeviceCopy, Stream,
};
pub use memory::DeviceMemory;
pub use streams::{DeviceBytes, Streams, StreamsByDevice};

use crate::error::Result;

/// Returns the device with torch's number `index`; None for host memory. An error says why a CUDA
/// device cannot be used; then torch has to copy.
pub fn find(index: DeviceIndex) -> Result<Option<Arc<dyn Device>>> {
    match u32::try_from(index) {
        #[cfg(feature = "cuda")]
        Ok(index) => cuda::CudaDevice::get_or_open(index).map(Some),
        _ => Ok(None),
    }
}
