//! The headers of a file's tensors, as far as they were read.

use std::collections::BTreeMap;
use std::sync::Arc;

use tensorizer::cancel::Cancel;
use tensorizer::codec::CompactHeader;
use tensorizer::error::{Error, Result};
use tensorizer::{ForkSafeMutex, TensorFile, matches_header, read_headers};
use tensorizer_torch::TensorList;
use tensorizer_torch::tensor::{LentDevices, one_to_save};

/// Headers by the numbers of their tensors.
#[derive(Default)]
pub struct HeaderCache(ForkSafeMutex<BTreeMap<usize, Arc<CompactHeader>>>);

impl HeaderCache {
    /// Returns the header of a tensor, if it was read.
    pub fn get(&self, number: usize) -> Option<Arc<CompactHeader>> {
        self.0.lock().get(&number).cloned()
    }

    /// Reads and keeps those of some headers that were not read.
    fn complete(&self, file: &TensorFile, numbers: &[usize], cancel: &dyn Cancel) -> Result<()> {
        let missing = |&number: &usize| self.get(number).is_none();
        let missing: Vec<usize> = numbers.iter().copied().filter(missing).collect();
        if !missing.is_empty() {
            self.insert(&missing, read_headers(file, &missing, cancel)?);
        }
        Ok(())
    }

    /// Keeps the headers of some tensors.
    pub fn insert(&self, numbers: &[usize], headers: Vec<CompactHeader>) {
        let headers = headers.into_iter().map(Arc::new);
        self.0.lock().extend(numbers.iter().copied().zip(headers));
    }
}

/// The hashes of a tensor: algorithm and value.
pub type NamedHashes = Vec<(&'static str, String)>;

/// Returns the hashes of tensors, as messages show them.
pub fn hashes(
    file: &TensorFile,
    headers: &HeaderCache,
    numbers: &[usize],
    cancel: &dyn Cancel,
) -> Result<Vec<NamedHashes>> {
    headers.complete(file, numbers, cancel)?;
    let found = numbers.iter().map(|&number| headers.get(number));
    Ok(found.map(|header| header.iter().flat_map(|header| header.hashes()).collect()).collect())
}

/// Compares the bytes, types and shapes of tensors with those of a file.
pub fn matching(
    file: &TensorFile,
    headers: &HeaderCache,
    tensors: &TensorList,
    numbers: &[usize],
    cancel: &dyn Cancel,
) -> Result<Vec<bool>> {
    file.check_hashes()?;
    headers.complete(file, numbers, cancel)?;
    let mut devices = LentDevices::default();
    let mut out = Vec::with_capacity(numbers.len());
    for (at, &number) in numbers.iter().enumerate() {
        let entry = file.entry(number)?;
        let name = entry.name.clone();
        let tensor = one_to_save(name, entry.kind, 0, tensors, at, &mut devices)?;
        let header = headers.get(number).ok_or_else(|| Error::Bug("no header".to_owned()))?;
        let same = tensor.dtype == entry.dtype && tensor.shape == *entry.shape;
        out.push(same && matches_header(&tensor.data, &header, entry, file.uri(), cancel)?);
    }
    Ok(out)
}
