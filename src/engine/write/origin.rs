//! Where the bytes of a tensor are before they are written.

use crate::error::Result;
use crate::mem::device::OnDevice;

/// Bytes of a tensor that had to be brought into one piece of host memory first.
pub type HostCopy = Box<dyn AsRef<[u8]> + Send + Sync>;

/// Where the bytes of a tensor are.
pub enum Origin<'a> {
    /// A tensor of the `meta` device: nowhere.
    Meta,
    /// In memory, in row-major order.
    Bytes(&'a [u8]),
    /// On a device, in row-major order: brought into staging memory chunk by chunk.
    Device(OnDevice),
    /// Elsewhere, or in another order: brought into memory when their turn comes, so that only
    /// one copy a thread is held at a time.
    Deferred(Box<dyn Fn() -> Result<HostCopy> + Send + Sync + 'a>),
}

impl Origin<'_> {
    /// How many bytes there are, as far as that is known.
    pub fn size(&self) -> Option<u64> {
        match self {
            Origin::Bytes(bytes) => Some(bytes.len() as u64),
            Origin::Device(bytes) => Some(bytes.memory.size() as u64),
            Origin::Meta | Origin::Deferred(_) => None,
        }
    }
}
