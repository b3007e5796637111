//! The headers of a file's tensors, as far as they were read.

use std::sync::{Mutex, MutexGuard, PoisonError};

use tensorizer::codec::KeptHeader;

/// By number.
#[derive(Default)]
pub struct Headers(Mutex<Vec<Option<KeptHeader>>>);

impl Headers {
    /// Those that are here.
    pub fn known(&self) -> MutexGuard<'_, Vec<Option<KeptHeader>>> {
        self.0.lock().unwrap_or_else(PoisonError::into_inner)
    }

    /// Which of some are not here.
    pub fn missing(&self, numbers: &[usize]) -> Vec<usize> {
        let known = self.known();
        let missing = |&number: &usize| !matches!(known.get(number), Some(Some(_)));
        numbers.iter().copied().filter(missing).collect()
    }

    /// Keeps some.
    pub fn keep(&self, numbers: &[usize], headers: Vec<KeptHeader>) {
        let mut known = self.known();
        for (&number, header) in numbers.iter().zip(headers) {
            if known.len() <= number {
                known.resize_with(number + 1, || None);
            }
            if let Some(slot) = known.get_mut(number) {
                *slot = Some(header);
            }
        }
    }
}
