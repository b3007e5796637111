//! `tensorizer._C.Sink` and `.PathSink`, to which `stream_io` writes.

use std::ffi::{OsString, c_int};
use std::os::fd::IntoRawFd as _;
use std::path::Path;
use std::sync::{Arc, Mutex};

use pyo3::prelude::*;
use pyo3::types::PyBytes;
use tensorizer::engine::workers;
use tensorizer::error::{Error, Result};
use tensorizer::io::local::FileSink;
use tensorizer::io::object::UploadSink;
use tensorizer::io::uri::create_file;
use tensorizer::io::{Ending, Published, WriteAt, write_all_at};
use tensorizer::traffic::Traffic;
use tensorizer::unpoisoned;

use crate::calls::{Entered, SAVING, enter_end, enter_part, signals_in_save};
use crate::errors::Outcome;
use crate::gil;

/// Bytes that one thread sends at a time.
const CHUNK_LEN: usize = 8 << 20;

/// Describes a file that was never closed: true if it exists, and its path if it has another name
/// than its own.
pub fn describe_unclosed(outcome: Published) -> (bool, Option<OsString>) {
    match outcome {
        Published::InPlace => (true, None),
        // Not as a `Path`, which may not be importable while the interpreter ends.
        Published::OtherName(path) => (true, Some(path.into_os_string())),
        Published::Aborted | Published::Overtaken => (false, None),
    }
}

/// Publishes a file. False if a later save was complete before.
fn publish(sink: &mut dyn WriteAt, len: u64) -> Result<bool> {
    Ok(sink.publish(len, Ending::Finished, &signals_in_save)? != Published::Overtaken)
}

/// An object that appears whole, when it is published, or not at all.
#[pyclass(frozen, module = "tensorizer._C")]
pub struct Sink {
    sink: Option<UploadSink>,
    /// The time limit of each call, in seconds.
    timeout: Option<f64>,
    traffic: Arc<Traffic>,
}

impl Drop for Sink {
    fn drop(&mut self) {
        // Abandoning an object may wait for threads that need the GIL.
        Python::try_attach(|py| {
            gil::without(py, || {
                self.sink = None;
                Ok(())
            })
        });
    }
}

impl Sink {
    pub fn new(sink: UploadSink, timeout: Option<f64>, traffic: Arc<Traffic>) -> Self {
        Sink { sink: Some(sink), timeout, traffic }
    }

    fn enter(&self, sink: &UploadSink) -> Entered {
        enter_part(SAVING, sink.uri(), self.timeout, &self.traffic)
    }

    /// Returns the same object, for a writer.
    pub fn shared(&self) -> Result<UploadSink> {
        self.sink.clone().ok_or_else(|| Error::Closed("the object is closed".to_owned()))
    }
}

#[pymethods]
impl Sink {
    /// Writes bytes that were not written before. Parts that they complete are sent in parallel.
    fn write(&self, py: Python<'_>, offset: u64, data: &Bound<'_, PyBytes>) -> Outcome<()> {
        let (data, sink) = (data.as_bytes(), self.shared()?);
        let _part = self.enter(&sink);
        Ok(gil::without(py, || -> Result<_> {
            let chunks = data.chunks(CHUNK_LEN).enumerate();
            let threads = if chunks.len() < 2 { 0 } else { sink.facts().default_writers };
            let sent =
                workers::map(threads, chunks, &signals_in_save, |(number, chunk), control| {
                    let mut buffers = [std::io::IoSlice::new(chunk)];
                    let at = offset + (number * CHUNK_LEN) as u64;
                    write_all_at(&sink, at, &mut buffers, control)?;
                    sink.finish_deferred_writes(control)
                });
            sent.map(drop)
        })?)
    }

    /// Ends the object at `len` bytes and makes it visible. False if a later save of this process
    /// to its address was complete before: then it was dropped.
    fn publish(&self, py: Python<'_>, len: u64) -> Outcome<bool> {
        let mut sink = self.shared()?;
        let _part = self.enter(&sink);
        Ok(gil::without(py, || publish(&mut sink, len))?)
    }

    /// Abandons the object.
    fn abandon(&self, py: Python<'_>) -> Outcome<()> {
        let (sink, _part) = (self.shared()?, enter_end());
        Ok(gil::without(py, || sink.abort(&signals_in_save))?)
    }

    /// The address.
    #[getter]
    fn uri(&self) -> Outcome<String> {
        Ok(self.shared()?.uri().to_owned())
    }
}

/// A local file that appears whole under its path, when it is published, or not at all.
#[pyclass(frozen, module = "tensorizer._C")]
pub struct PathSink {
    sink: Mutex<Option<FileSink>>,
}

#[pymethods]
impl PathSink {
    #[new]
    fn new(path: OsString) -> Outcome<Self> {
        Ok(PathSink { sink: Mutex::new(Some(create_file(Path::new(&path))?)) })
    }

    /// Returns a descriptor for reading and writing, which belongs to the caller.
    fn open(&self) -> Outcome<c_int> {
        let sink = unpoisoned(self.sink.lock());
        let sink = sink.as_ref().ok_or_else(|| Error::Closed("the file is closed".to_owned()))?;
        Ok(sink.handle()?.into_raw_fd())
    }

    /// Ends the file at `len` bytes and makes it visible. False if a later save of this process to
    /// its path was complete before: then it was dropped.
    fn publish(&self, py: Python<'_>, len: u64) -> Outcome<bool> {
        let sink = unpoisoned(self.sink.lock()).take();
        Ok(gil::without(py, || sink.map_or(Ok(true), |mut sink| publish(&mut sink, len)))?)
    }

    /// Does the same for a file that was never closed; another file that has its name stays.
    /// Returns true if it exists, and its path if it did not get its own name.
    fn publish_unclosed(&self, py: Python<'_>, len: u64) -> Outcome<(bool, Option<OsString>)> {
        let sink = unpoisoned(self.sink.lock()).take();
        let Some(mut sink) = sink else { return Ok((false, None)) };
        Ok(describe_unclosed(gil::without(py, || {
            sink.publish(len, Ending::Unclosed, &signals_in_save)
        })?))
    }

    /// Abandons the file.
    fn abandon(&self) {
        unpoisoned(self.sink.lock()).take();
    }
}
