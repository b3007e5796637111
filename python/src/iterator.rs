//! `tensorizer._C.TensorIterator`: tensors of a file one by one, for `tensorizer.iterate`.

use std::sync::{Arc, Mutex};

use pyo3::prelude::*;
use tensorizer::error::{Error, Result};
use tensorizer::{Closer, unpoisoned};
use tensorizer_torch::handles::offer;
use tensorizer_torch::iterate::TorchTensors;
use tensorizer_torch::lock_holder::LockHolder;

use crate::errors::Outcome;
use crate::gil;
use crate::handle::Handle;
use crate::watch::LoadState;

/// Tensors of a file one by one, while the next are being read.
#[pyclass(frozen, module = "tensorizer._C")]
pub struct TensorIterator {
    /// None once it was closed.
    tensors: Mutex<Option<TorchTensors>>,
    holder: LockHolder,
    closer: Closer,
    /// State that is shared with other loads of the file.
    loads: Arc<LoadState>,
    /// The number of times that its file had been closed at its beginning.
    closed: u64,
    uri: String,
}

impl TensorIterator {
    /// Wraps an iterator whose load has begun.
    pub fn new(tensors: TorchTensors, loads: Arc<LoadState>, uri: &str) -> Self {
        let closer = tensors.closer();
        TensorIterator {
            tensors: Mutex::new(Some(tensors)),
            holder: LockHolder::default(),
            closer,
            closed: loads.closed(),
            loads,
            uri: uri.to_owned(),
        }
    }

    fn take_next(&self) -> Result<Option<(Handle, Vec<usize>)>> {
        let closed = |what: &str| Error::Closed(what.to_owned());
        if self.holder.is_this_thread() {
            return Err(closed("the iterator is used by one of its own callbacks"));
        }
        let mut held = unpoisoned(self.tensors.lock());
        let _mark = self.holder.mark();
        let tensors = held.as_mut().ok_or_else(|| closed("the iterator is closed"))?;
        let cancel = || {
            let bytes = (self.closer.counters().moved(), self.closer.counters().arrived());
            self.loads.report_and_check(&self.uri, self.closed, bytes)
        };
        let (loaded, numbers) = tensors.next(&cancel)?;
        self.loads.watch.tick(self.closer.counters().moved(), 0)?;
        if numbers.is_empty() {
            self.loads.watch.end(self.closer.counters().moved())?;
            return Ok(None);
        }
        Ok(Some((Handle(offer(loaded)), numbers)))
    }
}

impl Drop for TensorIterator {
    /// Releases the GIL while it waits for the load, which may read from a Python object.
    fn drop(&mut self) {
        let mut tensors = unpoisoned(self.tensors.get_mut()).take();
        if tensors.is_none() {
            return;
        }
        let dropped = Python::try_attach(|py| py.detach(|| drop(tensors.take())));
        if dropped.is_none() {
            // The interpreter is ending; the load ends with the process.
            self.closer.close();
            std::mem::forget(tensors);
        }
    }
}

#[pymethods]
impl TensorIterator {
    /// Waits for the next tensors: one, or several small ones. Several count as taken only when
    /// this is called again. Returns the handle with which `_take` fetches them, and their numbers;
    /// None at the end.
    fn next(&self, py: Python<'_>) -> Outcome<Option<(Handle, Vec<usize>)>> {
        self.closer.check_process()?;
        let part = self.loads.enter(&self.uri);
        let next = gil::without(py, || self.take_next()).inspect_err(|error| part.failed(error))?;
        if next.is_none() {
            crate::logs::log(py)?;
        }
        Ok(next)
    }

    /// Ends the load, and waits for its reads and copies. Closing again does nothing.
    fn close(&self, py: Python<'_>) -> Outcome<()> {
        if self.closer.check_process().is_err() {
            return Ok(());
        }
        self.closer.close();
        if self.holder.is_this_thread() {
            // A call of `next` on this thread is under way, and ends now.
            return Ok(());
        }
        gil::without(py, || {
            drop(unpoisoned(self.tensors.lock()).take());
            Ok(())
        })?;
        Ok(())
    }
}
