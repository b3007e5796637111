//! The headers of a file's tensors, as far as they were read.

use std::sync::Arc;

use tensorizer::codec::KeptHeader;
use tensorizer::error::{Error, Result};
use tensorizer::{ForkSafeMutex, TensorFile, matches_header, read_headers};
use tensorizer_torch::exchange::Lent;
use tensorizer_torch::tensor::{Devices, one_to_save};

use crate::signals;

/// Headers by the numbers of their tensors.
#[derive(Default)]
pub struct Headers(ForkSafeMutex<Vec<Option<Arc<KeptHeader>>>>);

impl Headers {
    /// Returns the header of a tensor, if it was read.
    pub fn known(&self, number: usize) -> Option<Arc<KeptHeader>> {
        self.0.lock().get(number).cloned().flatten()
    }

    /// Returns those of some numbers whose headers were not read.
    pub fn missing(&self, numbers: &[usize]) -> Vec<usize> {
        let missing = |&number: &usize| self.known(number).is_none();
        numbers.iter().copied().filter(missing).collect()
    }

    /// Keeps the headers of some tensors.
    pub fn keep(&self, numbers: &[usize], headers: Vec<KeptHeader>) {
        let mut known = self.0.lock();
        for (&number, header) in numbers.iter().zip(headers) {
            if known.len() <= number {
                known.resize_with(number + 1, || None);
            }
            if let Some(slot) = known.get_mut(number) {
                *slot = Some(Arc::new(header));
            }
        }
    }
}

/// Compares the bytes, types and shapes of tensors with those of a file.
pub fn matching(
    file: &TensorFile,
    headers: &Headers,
    lent: &Lent,
    numbers: &[usize],
) -> Result<Vec<bool>> {
    file.check_hashes()?;
    let missing = headers.missing(numbers);
    headers.keep(&missing, read_headers(file, &missing, &signals)?);
    let (tensors, mut devices) = (lent.list()?, Devices::default());
    let mut out = Vec::with_capacity(numbers.len());
    for (at, &number) in numbers.iter().enumerate() {
        let entry = file.entry(number)?;
        let name = entry.name.clone();
        let tensor = one_to_save(name, entry.kind, 0, tensors, at, &mut devices)?;
        let header = headers.known(number).ok_or_else(|| Error::Bug("no header".to_owned()))?;
        let same = tensor.dtype == entry.dtype && tensor.shape == *entry.shape;
        out.push(same && matches_header(&tensor.data, &header, entry, file.uri(), &signals)?);
    }
    Ok(out)
}
