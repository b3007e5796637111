//! The loads or writes of a file: their options, and their progress, which is reported to a callable
//! while they run.

use std::sync::atomic::{AtomicBool, AtomicU64, Ordering};
use std::sync::{Arc, OnceLock};
use std::time::Instant;

use pyo3::prelude::*;
use tensorizer::cancel::Cancel;
use tensorizer::error::{Error, Result};
use tensorizer::stats::Counters;
use tensorizer::traffic::Traffic;
use tensorizer::{ForkSafeMutex, LoadOptions, MemoryLimit, Verify};

use crate::calls::{self, Entered, HEARTBEAT, signals};
use crate::errors::Outcome;
use crate::gil;
use crate::logs::log;

/// Reports progress to a callable.
#[derive(Default)]
pub struct Watch {
    /// The callable. It takes the bytes of tensor data that all calls have moved.
    callback: OnceLock<Py<PyAny>>,
    /// Bytes of the calls that have ended.
    ended_bytes: AtomicU64,
    reported: AtomicU64,
    last_report: ForkSafeMutex<Option<Instant>>,
}

impl Watch {
    /// Sets the callable that gets reports from now on; later calls have no effect.
    pub fn set(&self, callback: Py<PyAny>) {
        let _ = self.callback.set(callback);
    }

    /// Reports the bytes that a running call has moved, on the thread that checks for signals; while
    /// nothing more is moved, at intervals those that have arrived. An exception of the callable ends the call.
    pub fn tick(&self, moved: u64, arrived: u64) -> Result<()> {
        let Some(callback) = self.callback.get() else { return Ok(()) };
        let mut last = self.last_report.lock();
        let is_late = last.get_or_insert_with(Instant::now).elapsed() >= HEARTBEAT;
        let done = if is_late { arrived.max(moved) } else { moved };
        let sum = self.ended_bytes.load(Ordering::Relaxed).saturating_add(done);
        if self.reported.fetch_max(sum, Ordering::Relaxed) >= sum && !is_late {
            return Ok(());
        }
        *last = Some(Instant::now());
        drop(last);
        let reported = gil::with(|py| callback.call1(py, (sum,)).map(drop))?;
        reported.map_err(|e| Error::Caller(Box::new(e)))
    }

    /// Adds the bytes of an ended call, and reports the sum.
    pub fn end(&self, moved: u64) -> Result<()> {
        self.ended_bytes.fetch_add(moved, Ordering::Relaxed);
        self.tick(0, 0)
    }
}

/// Returns the hashes that a load compares, by Python's name; unknown names mean all.
fn verification(name: &str) -> Verify {
    match name {
        "nothing" => Verify::Nothing,
        "crc32" => Verify::Crc32,
        _ => Verify::All,
    }
}

/// The same for a string of Python.
fn verification_of(name: &Bound<'_, PyAny>) -> PyResult<Verify> {
    Ok(verification(name.extract()?))
}

/// The options of the loads of a file, which a call may override.
#[derive(Clone, Copy, Default, FromPyObject)]
#[pyo3(from_item_all)]
pub struct ReadOptions {
    #[pyo3(from_py_with = verification_of)]
    pub verify: Verify,
    /// Threads; None for as many as help.
    pub readers: Option<usize>,
    /// True to use tensors in place in a mapping of the file.
    pub map: bool,
    /// True if each tensor on a device gets memory of its own.
    pub separate_memory: bool,
    /// The time limit of each load, in seconds.
    pub timeout: Option<f64>,
}

/// The state that all loads of a file share.
#[derive(Default)]
pub struct LoadState {
    /// The way in which later loads read.
    pub reading: ForkSafeMutex<ReadOptions>,
    /// The number of times that its file was closed.
    closed: AtomicU64,
    pub watch: Watch,
    /// The limit of the memory that later loads have in flight.
    pub memory: ForkSafeMutex<MemoryLimit>,
    shares_cache: AtomicBool,
    /// The requests of its files.
    traffic: Arc<Traffic>,
    /// A fallback that the next load reports.
    pub fallback: ForkSafeMutex<Option<String>>,
}

impl LoadState {
    /// The state of the loads of a file whose requests are counted here.
    pub fn counted_in(traffic: &Arc<Traffic>) -> Self {
        LoadState { traffic: Arc::clone(traffic), ..LoadState::default() }
    }

    /// Ends loads that are under way.
    pub fn end(&self) {
        self.closed.fetch_add(1, Ordering::Relaxed);
    }

    /// The number of times that the file was closed, for [`Self::report_and_check`].
    pub fn closed(&self) -> u64 {
        self.closed.load(Ordering::Relaxed)
    }

    /// Returns the options of a load that may use mappings or not. `verify` and `readers` override
    /// what was set.
    pub fn options(&self, verify: Option<&str>, readers: Option<usize>, maps: bool) -> LoadOptions {
        let set = *self.reading.lock();
        LoadOptions {
            verify: verify.map_or(set.verify, verification),
            readers: readers.or(set.readers),
            map: maps && set.map,
            memory: *self.memory.lock(),
            shares_cache: self.shares_cache.load(Ordering::Relaxed),
        }
    }

    /// Makes later loads read files through the page cache even if they are not in it, because
    /// other processes of this machine load them too.
    pub fn share_cache(&self) {
        self.shares_cache.store(true, Ordering::Relaxed);
    }

    /// Reports the bytes that a load has moved and received. Returns an error if the load is to end:
    /// also if the file was closed since it began, at `closed`.
    pub fn report_and_check(
        &self,
        uri: &str,
        closed: u64,
        (moved, arrived): (u64, u64),
    ) -> Result<()> {
        if self.closed() != closed {
            return Err(Error::Closed(format!("the load of `{uri}` was stopped before its end")));
        }
        signals()?;
        self.watch.tick(moved, arrived)
    }

    /// Begins a load as a part of the call that this thread is in.
    pub fn enter(&self, uri: &str) -> Entered {
        *self.watch.last_report.lock() = Some(Instant::now());
        calls::enter_part("loading", uri, self.reading.lock().timeout, &self.traffic)
    }

    /// Runs a part of a load without the GIL.
    pub fn run_part<T: Send>(
        &self,
        py: Python<'_>,
        uri: &str,
        part: impl FnOnce(&dyn Cancel) -> Result<T> + Send,
    ) -> Outcome<T> {
        let (_part, closed) = (self.enter(uri), self.closed());
        Ok(gil::without(py, || part(&|| self.report_and_check(uri, closed, (0, 0))))?)
    }

    /// Runs a load without the GIL. Its progress is reported while it runs, and it is logged.
    pub fn run<T: Send>(
        &self,
        py: Python<'_>,
        uri: &str,
        load: impl FnOnce(&Counters, &dyn Cancel) -> Result<T> + Send,
    ) -> Outcome<T> {
        let (part, closed) = (self.enter(uri), self.closed());
        let counters = Counters::default().lazy(part.is_outermost());
        if let Some(why) = self.fallback.lock().take() {
            counters.fallback(&why);
        }
        let loaded = gil::without(py, || {
            let report_and_check =
                || self.report_and_check(uri, closed, (counters.moved(), counters.arrived()));
            let loaded = load(&counters, &report_and_check)?;
            self.watch.end(counters.moved())?;
            Ok(loaded)
        });
        let loaded = loaded.inspect_err(|error| part.failed(error))?;
        log(py)?;
        Ok(loaded)
    }
}
