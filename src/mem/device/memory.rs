//! A range of a device's memory. One of the few doors to `unsafe`.
#![allow(unsafe_code)]

use std::io;

use super::DeviceFile;

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

    /// Has the device read bytes of a file to `offset`.
    pub fn read_from(
        &self,
        file: &dyn DeviceFile,
        offset: usize,
        len: usize,
        position: u64,
    ) -> io::Result<usize> {
        let to = self.at(offset, len);
        let to = to.ok_or_else(|| io::Error::other(format!("{len} bytes at {offset}")))?;
        // SAFETY: inside the range that the maker of this value has promised.
        unsafe { file.read(to, len, position) }
    }

    /// The address of a range within, if it lies within.
    pub fn at(&self, offset: usize, len: usize) -> Option<usize> {
        let end = offset.checked_add(len)?;
        (end <= self.len).then(|| self.address + offset)
    }
}
