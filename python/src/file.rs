//! Python file objects as sources and sinks. During a transfer, only this code takes the GIL. One
//! of the few modules that may use `unsafe`.
#![allow(unsafe_code)]

use std::ffi::c_int;
use std::fs::File;
use std::io::{self, IoSlice};
use std::os::fd::BorrowedFd;
use std::sync::Mutex;

use crate::gil;
use pyo3::prelude::*;
use pyo3::sync::MutexExt as _;
use pyo3::types::PyBytes;
use tensorizer::cancel::{Cancel, Never};
use tensorizer::error::{Error, Result};
use tensorizer::io::{Capabilities, Ending, Facts, Published, ReadAt, SinkFacts, Stream, WriteAt};
use tensorizer::mem::Buffers;
use tensorizer::{PerProcess, unpoisoned};

/// Bytes per call of a Python object; each of them is copied once.
const REQUEST_LEN: usize = 1 << 20;

/// A Python object with `read`, and perhaps `seek` and `write`. Calls run one at a time: a position
/// and the transfer at it belong together.
pub struct PyFile {
    object: Py<PyAny>,
    call_lock: PerProcess<Mutex<()>>,
    facts: Facts,
}

fn raised(error: PyErr) -> io::Error {
    io::Error::other(error)
}

impl PyFile {
    /// Wraps an object. `len` is its size, if it can seek.
    pub fn new(object: Py<PyAny>, uri: String, len: Option<u64>) -> Self {
        let facts = Facts { uri, len, ..Facts::default() };
        PyFile { object, call_lock: PerProcess::new(), facts }
    }

    /// Reads once; 0 at the end.
    fn read_some(&self, py: Python<'_>, buffers: &mut Buffers<'_>) -> io::Result<usize> {
        let wanted = buffers.remaining_in_range().min(REQUEST_LEN);
        if wanted == 0 {
            return Ok(0);
        }
        let read = self.object.call_method1(py, "read", (wanted,)).map_err(raised)?;
        let read = read.bind(py);
        // bytes as they are; bytearray, memoryview and others through one more copy.
        let owned;
        let bytes: &[u8] = match read.cast::<PyBytes>() {
            Ok(bytes) => bytes.as_bytes(),
            Err(_) if read.is_none() => {
                return Err(io::Error::new(
                    io::ErrorKind::WouldBlock,
                    "the file object returned no bytes",
                ));
            }
            Err(_) => {
                owned = py.get_type::<PyBytes>().call1((read,)).map_err(raised)?;
                owned.cast::<PyBytes>().map_err(|e| raised(e.into()))?.as_bytes()
            }
        };
        if bytes.len() > wanted {
            return Err(io::Error::other("the file object returned more bytes than asked for"));
        }
        Ok(buffers.fill_from(bytes))
    }

    fn locked<T>(&self, body: impl FnOnce(Python<'_>) -> io::Result<T>) -> io::Result<T> {
        let done = gil::with(|py| {
            // Waits for the lock without the GIL, which the thread that holds the lock may need.
            let call_lock = self.call_lock.get().lock_py_attached(py);
            let _guard = unpoisoned(call_lock);
            body(py)
        });
        done.map_err(io::Error::other)?
    }

    fn seek(&self, py: Python<'_>, offset: u64) -> io::Result<()> {
        self.object.call_method1(py, "seek", (offset,)).map(drop).map_err(raised)
    }
}

/// Front to back, for objects that cannot seek.
impl Stream for PyFile {
    fn read_next(&mut self, buffers: &mut Buffers<'_>, _cancel: &dyn Cancel) -> io::Result<usize> {
        self.locked(|py| self.read_some(py, buffers))
    }
}

impl ReadAt for PyFile {
    fn facts(&self) -> &Facts {
        &self.facts
    }

    fn capabilities(&self) -> Capabilities {
        Capabilities { merge_gap: 64 << 10, reader_memory: 2 << 20, ..Capabilities::SEQUENTIAL }
    }

    fn read_at(
        &self,
        offset: u64,
        buffers: &mut Buffers<'_>,
        _cancel: &dyn Cancel,
    ) -> Result<usize> {
        self.locked(|py| {
            self.seek(py, offset)?;
            self.read_some(py, buffers)
        })
        .map_err(|e| Error::io("reading", &self.facts.uri, e))
    }
}

impl WriteAt for PyFile {
    fn uri(&self) -> &str {
        &self.facts.uri
    }

    fn facts(&self) -> SinkFacts {
        SinkFacts {
            max_writers: 1,
            default_writers: 1,
            max_positions: usize::MAX,
            is_visible_early: true,
            retained: 0,
            part_len: 0,
        }
    }

    fn write_at(
        &self,
        offset: u64,
        buffers: &[IoSlice<'_>],
        _cancel: &dyn Cancel,
    ) -> Result<usize> {
        self.locked(|py| {
            self.seek(py, offset)?;
            let mut total = 0;
            for chunk in buffers.iter().flat_map(|buffer| buffer.chunks(REQUEST_LEN)) {
                let written = self
                    .object
                    .call_method1(py, "write", (PyBytes::new(py, chunk),))
                    .map_err(raised)?;
                let written: Option<usize> = written.extract(py).map_err(raised)?;
                // An object that returns None has written everything.
                let written = written.unwrap_or(chunk.len()).min(chunk.len());
                total += written;
                if written < chunk.len() {
                    break;
                }
            }
            Ok(total)
        })
        .map_err(|e| Error::io("writing", &self.facts.uri, e))
    }

    fn read_back(&self, offset: u64, buffer: &mut [u8]) -> Result<()> {
        let what = "bytes written before";
        tensorizer::io::read_exact_at(self, offset, &mut Buffers::from_slice(buffer), what, &Never)
    }

    fn publish(&mut self, len: u64, _ending: Ending, _cancel: &dyn Cancel) -> Result<Published> {
        self.locked(|py| {
            self.seek(py, len)?;
            match self.object.bind(py).getattr_opt("flush").map_err(raised)? {
                Some(flush) => flush.call0().map(drop).map_err(raised),
                None => Ok(()),
            }
        })
        .map(|()| Published::InPlace)
        .map_err(|e| Error::io("finishing", &self.facts.uri, e))
    }
}

/// Duplicates a descriptor that the caller owns.
pub fn duplicate(descriptor: c_int) -> io::Result<File> {
    if descriptor < 0 {
        return Err(io::Error::from_raw_os_error(libc::EBADF));
    }
    // SAFETY: the descriptor is not negative, and is borrowed only for the duplication, which
    // returns an error if it is closed.
    let borrowed = unsafe { BorrowedFd::borrow_raw(descriptor) };
    borrowed.try_clone_to_owned().map(File::from)
}
