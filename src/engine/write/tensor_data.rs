//! The origin of a tensor's bytes: host memory, a device, or a function that copies them into
//! memory.

use crate::error::Result;
use crate::mem::device::DeviceBytes;

/// A contiguous copy of a tensor in host memory, made for the save.
pub type HostCopy = Box<dyn AsRef<[u8]> + Send + Sync>;

/// The origin of a tensor's bytes.
pub enum TensorData<'a> {
    /// A tensor of the `meta` device, which has no bytes.
    Meta,
    /// In memory, in row-major order.
    Bytes(&'a [u8]),
    /// On a device, in row-major order; downloaded into staging memory chunk by chunk.
    Device(DeviceBytes),
    /// Elsewhere, or in another order. The tensor is copied into memory when it is its turn, so
    /// that each thread holds only one copy at a time.
    Deferred(Box<dyn Fn() -> Result<HostCopy> + Send + Sync + 'a>),
}

impl TensorData<'_> {
    /// Returns the number of bytes, if it is known.
    pub fn size(&self) -> Option<u64> {
        match self {
            TensorData::Bytes(bytes) => Some(bytes.len() as u64),
            TensorData::Device(bytes) => Some(bytes.memory.size() as u64),
            TensorData::Meta | TensorData::Deferred(_) => None,
        }
    }
}
