//! The files that tensors of this process are mapped from.
//!
//! Code that writes into an open file checks here first. Otherwise the values of the tensors would
//! change, or touching them would end the process (SIGBUS).

use std::collections::BTreeMap;
use std::fs::File;
use std::io;
use std::os::unix::fs::MetadataExt as _;

use crate::sys::fork_safe_mutex::ForkSafeMutex;

/// Device and inode numbers.
pub type DeviceAndInode = (u64, u64);

/// The number of mappings of each file.
static MAPPED: ForkSafeMutex<BTreeMap<DeviceAndInode, usize>> = ForkSafeMutex::new(BTreeMap::new());

/// The device and inode numbers of a file.
pub fn identity(file: &File) -> io::Result<DeviceAndInode> {
    let metadata = file.metadata()?;
    Ok((metadata.dev(), metadata.ino()))
}

/// Marks a file as mapped as long as this value lives.
pub struct MappedFileGuard(DeviceAndInode);

impl MappedFileGuard {
    /// Marks a file as mapped.
    pub fn mark(file: &File) -> io::Result<Self> {
        let identity = identity(file)?;
        *MAPPED.lock().entry(identity).or_default() += 1;
        Ok(MappedFileGuard(identity))
    }
}

impl Drop for MappedFileGuard {
    fn drop(&mut self) {
        let mut mapped = MAPPED.lock();
        if let Some(count) = mapped.get_mut(&self.0) {
            *count -= 1;
            if *count == 0 {
                mapped.remove(&self.0);
            }
        }
    }
}

/// True if tensors of this process are mapped from the file.
pub fn is_mapped(file: &File) -> io::Result<bool> {
    let identity = identity(file)?;
    Ok(MAPPED.lock().contains_key(&identity))
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_file_counts_as_mapped_until_its_last_mapping_is_dropped() {
        let file = tempfile::tempfile().unwrap();
        let other = tempfile::tempfile().unwrap();
        let (one, two) =
            (MappedFileGuard::mark(&file).unwrap(), MappedFileGuard::mark(&file).unwrap());
        drop(one);
        assert!(is_mapped(&file).unwrap());
        assert!(!is_mapped(&other).unwrap());
        drop(two);
        assert!(!is_mapped(&file).unwrap());
    }
}
