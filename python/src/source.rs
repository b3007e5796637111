//! `tensorizer._C.Source`: an open source.

use std::sync::Arc;

use pyo3::prelude::*;
use pyo3::types::PyBytes;
use tensorizer::error::Result;
use tensorizer::io::{ReadAt, WantedRead, closed_error};
use tensorizer::mem::Buffers;
use tensorizer::traffic::{self, Traffic};
use tensorizer::{ForkSafeMutex, to_usize, try_resize};

use crate::calls::{enter_part, signals};
use crate::errors::Outcome;
use crate::gil;

/// Bytes for which a read allocates memory at first; then the memory doubles.
const STEP: usize = 8 << 20;

/// An open source. All methods may be called from several threads.
#[pyclass(frozen, module = "tensorizer._C")]
pub struct Source {
    source: ForkSafeMutex<Option<Arc<dyn ReadAt>>>,
    /// The address, without its secrets.
    #[pyo3(get)]
    uri: String,
    /// Position of the file's first byte.
    pub base: u64,
    front: ForkSafeMutex<Front>,
    /// The time limit of each read, in seconds.
    pub timeout: Option<f64>,
    /// The requests of the file.
    pub traffic: Arc<Traffic>,
}

/// Reads from the front on.
#[derive(Default)]
struct Front {
    /// The end of the last read.
    end: u64,
    /// The announcement that the rest follows, until a read begins elsewhere.
    wanted: Option<WantedRead>,
}

impl Source {
    pub fn new(source: Arc<dyn ReadAt>, base: u64) -> Self {
        let (uri, source) = (source.uri().to_owned(), ForkSafeMutex::new(Some(source)));
        let (front, traffic) = (ForkSafeMutex::default(), traffic::current());
        Source { uri, source, base, front, timeout: None, traffic }
    }

    /// The same source, with a time limit of each read, in seconds; its requests are counted here.
    pub fn of_call(self, timeout: Option<f64>, traffic: Arc<Traffic>) -> Self {
        Source { timeout, traffic, ..self }
    }

    /// Announces the whole file at a read of its first byte, as long as the next ones follow.
    fn note_start(&self, source: &dyn ReadAt, offset: u64) {
        let mut front = self.front.lock();
        if offset == 0 {
            front.wanted = source.facts().len.and_then(|len| source.facts().will_read(len));
        } else if offset != front.end {
            front.wanted = None;
        }
    }

    /// The source, unless it was closed.
    pub fn shared(&self) -> Result<Arc<dyn ReadAt>> {
        unless_closed(&self.source, &self.uri)
    }
}

/// The content of an open file; an error if the file was closed.
pub fn unless_closed<T: Clone>(open: &ForkSafeMutex<Option<T>>, uri: &str) -> Result<T> {
    open.lock().clone().ok_or_else(|| closed_error(uri))
}

#[pymethods]
impl Source {
    /// Reads up to `len` bytes at a position; fewer only at the end.
    fn read<'py>(&self, py: Python<'py>, offset: u64, len: usize) -> Outcome<Bound<'py, PyBytes>> {
        let source = self.shared()?;
        self.note_start(&*source, offset);
        let part = enter_part("reading", &self.uri, self.timeout, &self.traffic);
        // Another thread may close the file meanwhile.
        let go_on = || self.shared().and_then(|_| signals());
        let bytes = gil::without(py, || -> Result<_> {
            let available = source.facts().len.unwrap_or(u64::MAX).saturating_sub(offset);
            let len = len.min(to_usize(available));
            let mut bytes = Vec::new();
            let mut done = 0;
            while done < len {
                if done == bytes.len() {
                    // Allocates step by step: neither the requested length nor that which a server
                    // states is trusted.
                    let more = STEP.max(done).min(len - done);
                    try_resize(&mut bytes, done + more, &format!("bytes of `{}`", self.uri))?;
                }
                let rest = bytes.split_at_mut(done).1;
                let at = offset.saturating_add(done as u64);
                match source.read_at(at, &mut Buffers::from_slice(rest), &go_on)? {
                    0 => break,
                    read => done += read,
                }
            }
            bytes.truncate(done);
            Ok(bytes)
        });
        let bytes = bytes.inspect_err(|error| part.failed(error))?;
        self.front.lock().end = offset.saturating_add(bytes.len() as u64);
        Ok(python_bytes(py, &bytes)?)
    }

    fn close(&self) {
        *self.front.lock() = Front::default();
        let source = self.source.lock().take();
        drop(source);
    }

    /// Size in bytes; None for a server that can only be read front to back.
    #[getter]
    fn size(&self) -> Outcome<Option<u64>> {
        Ok(self.shared()?.facts().len)
    }

    /// Returns the headers of the server's response.
    fn headers(&self) -> Outcome<Vec<(String, String)>> {
        Ok(self.shared()?.facts().headers().to_vec())
    }
}

/// Copies bytes for Python. `PyBytes::new` would panic if there is no memory for them.
pub fn python_bytes<'py>(py: Python<'py>, bytes: &[u8]) -> PyResult<Bound<'py, PyBytes>> {
    PyBytes::new_with(py, bytes.len(), |to| {
        to.copy_from_slice(bytes);
        Ok(())
    })
}
