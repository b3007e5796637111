//! A range of a device's memory. One of the few doors to `unsafe`.
#![allow(unsafe_code)]

/// Memory of a device that nobody else uses, by its address there.
#[derive(Debug, PartialEq, Eq)]
pub struct DeviceMemory {
    address: usize,
    len: usize,
}

impl DeviceMemory {
    /// # Safety
    /// The range is memory of the device for which it will be used. It exists, and nobody else
    /// uses it, until every copy has ended that was begun while this value lived. For saving,
    /// others may read it too.
    pub unsafe fn new(address: usize, len: usize) -> Self {
        DeviceMemory { address, len }
    }

    /// Bytes.
    pub fn size(&self) -> usize {
        self.len
    }

    /// The address of a range within, if it lies within.
    pub fn at(&self, offset: usize, len: usize) -> Option<usize> {
        let end = offset.checked_add(len)?;
        (end <= self.len).then(|| self.address + offset)
    }
}
