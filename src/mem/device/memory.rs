//! A range of a device's memory. `unsafe` is allowed in this file: it handles addresses of a
//! device.
#![allow(unsafe_code)]

use std::io;

use super::DeviceFile;

/// A range of device memory in exclusive use, by its address on the device.
#[derive(Debug, PartialEq, Eq)]
pub struct DeviceMemory {
    address: usize,
    len: usize,
}

impl DeviceMemory {
    /// # Safety
    /// The range is memory of the device for which it will be used. Until every copy has ended that
    /// was begun while this value lived, the range exists and nothing else uses it. For saving, it
    /// may also be read by others.
    pub unsafe fn new(address: usize, len: usize) -> Self {
        DeviceMemory { address, len }
    }

    /// Returns the number of bytes.
    pub fn size(&self) -> usize {
        self.len
    }

    /// Lets the device read bytes of a file to `offset` of this memory.
    pub fn read_from(
        &self,
        file: &dyn DeviceFile,
        offset: usize,
        len: usize,
        position: u64,
    ) -> io::Result<usize> {
        let to = self.at(offset, len);
        let to = to.ok_or_else(|| {
            io::Error::other(format!(
                "read of {len} bytes at {offset} exceeds device memory of {} bytes",
                self.len
            ))
        })?;
        // SAFETY: inside the range, for which the creator of this value has given the promise of
        // `new`.
        unsafe { file.read(to, len, position) }
    }

    /// Returns the address of a range within, if it lies within.
    pub fn at(&self, offset: usize, len: usize) -> Option<usize> {
        let end = offset.checked_add(len)?;
        (end <= self.len).then(|| self.address + offset)
    }
}
