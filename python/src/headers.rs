//! The headers of a file's tensors, as far as they were read.

use std::sync::Arc;

use tensorizer::Brief;
use tensorizer::codec::KeptHeader;

/// By number.
#[derive(Default)]
pub struct Headers(Brief<Vec<Option<Arc<KeptHeader>>>>);

impl Headers {
    /// That of a tensor, if it is here.
    pub fn known(&self, number: usize) -> Option<Arc<KeptHeader>> {
        self.0.lock().get(number).cloned().flatten()
    }

    /// Which of some are not here.
    pub fn missing(&self, numbers: &[usize]) -> Vec<usize> {
        let missing = |&number: &usize| self.known(number).is_none();
        numbers.iter().copied().filter(missing).collect()
    }

    /// Keeps some.
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
