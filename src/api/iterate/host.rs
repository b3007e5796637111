//! Tensors in host memory, as a Rust iterator.

use std::collections::VecDeque;
use std::sync::Arc;

use super::iterator::{ReadyTensor, TensorIterator};
use super::options::IterateOptions;
use super::window::ReadyMemory;
use crate::api::file::TensorFile;
use crate::api::tensor::Tensor;
use crate::cancel::Never;
use crate::codec::CompactHeader;
use crate::error::{Error, Result};
use crate::format::catalog::Entry;

/// Tensors of a file in host memory, one by one, while the next are being read. Dropping it ends
/// the load, and so does an error.
pub struct Tensors {
    tensors: TensorIterator,
    entries: Arc<Vec<Entry>>,
    ready: VecDeque<Tensor>,
    ended: bool,
}

impl TensorFile {
    /// Iterates over tensors, given by number: each as soon as it has arrived, in memory of its
    /// own.
    ///
    /// # Errors
    /// An encrypted file without a key, a number that the file does not have, or a memory limit
    /// that is too small. Errors of reading come from the iterator.
    pub fn iterate(&self, numbers: &[usize], options: &IterateOptions) -> Result<Tensors> {
        let tensors = TensorIterator::new(self, numbers, None, options, None)?;
        let entries = Arc::clone(self.shared_entries());
        Ok(Tensors { tensors, entries, ready: VecDeque::new(), ended: false })
    }
}

impl Tensors {
    fn wait(&mut self) -> Result<()> {
        for ReadyTensor { number, memory } in self.tensors.next(None, &Never)? {
            let ReadyMemory::Host(memory) = memory else {
                return Err(Error::Bug("a tensor that is not in host memory".to_owned()));
            };
            let (header, entries) = (CompactHeader::none(), Arc::clone(&self.entries));
            self.ready.push_back(Tensor { number, header, memory, entries });
        }
        self.ended = self.ready.is_empty();
        Ok(())
    }
}

impl Iterator for Tensors {
    type Item = Result<Tensor>;

    fn next(&mut self) -> Option<Result<Tensor>> {
        if self.ready.is_empty()
            && !self.ended
            && let Err(error) = self.wait()
        {
            self.ended = true;
            return Some(Err(error));
        }
        self.ready.pop_front().map(Ok)
    }
}
