//! How far the loads or the writes of a file have come: told to a callable while they run, and to the
//! log when they have ended.

use std::sync::OnceLock;
use std::sync::atomic::{AtomicBool, AtomicU64, Ordering};

use pyo3::prelude::*;
use pyo3::sync::PyOnceLock;
use tensorizer::cancel::Cancel;
use tensorizer::error::{Error, Result};
use tensorizer::stats::{Counters, Report, take_own};
use tensorizer::{Brief, LoadOptions, MemoryLimit};

use crate::errors::Answer;
use crate::verification::verification;
use crate::{gil, signals};

/// What a callable is told.
#[derive(Default)]
pub struct Watch {
    /// Takes the bytes of tensor data that were moved by all calls.
    tell: OnceLock<Py<PyAny>>,
    /// Of the calls that have ended.
    before: AtomicU64,
    told: AtomicU64,
}

impl Watch {
    /// Has a callable told from here on; the first one stays.
    pub fn set(&self, tell: Py<PyAny>) {
        let _ = self.tell.set(tell);
    }

    /// Tells what a call that is under way has moved, on the thread that looks for signals. What the
    /// callable raises ends the call.
    pub fn tick(&self, moved: u64) -> Result<()> {
        let Some(tell) = self.tell.get() else { return Ok(()) };
        let sum = self.before.load(Ordering::Relaxed).saturating_add(moved);
        if self.told.fetch_max(sum, Ordering::Relaxed) >= sum {
            return Ok(());
        }
        let told = gil::with(|py| tell.call1(py, (sum,)).map(drop))?;
        told.map_err(|e| Error::Caller(Box::new(e)))
    }

    /// Counts what a call has moved that has ended, and tells it.
    pub fn end(&self, moved: u64) -> Result<()> {
        self.before.fetch_add(moved, Ordering::Relaxed);
        self.tick(0)
    }
}

/// What all loads of a file share.
#[derive(Default)]
pub struct Loads {
    stopped: AtomicBool,
    pub watch: Watch,
    memory: Brief<MemoryLimit>,
    shares_cache: AtomicBool,
}

impl Loads {
    /// Ends those that are under way, and refuses more.
    pub fn stop(&self) {
        self.stopped.store(true, Ordering::Relaxed);
    }

    /// How each of them loads.
    pub fn options(&self, readers: Option<usize>, verify: &str, map: bool) -> LoadOptions {
        let memory = *self.memory.lock();
        let shares_cache = self.shares_cache.load(Ordering::Relaxed);
        LoadOptions { readers, verify: verification(verify), map, memory, shares_cache }
    }

    /// Has those that begin from here on read cold files through the page cache, as other processes of
    /// this machine load them too.
    pub fn share_cache(&self) {
        self.shares_cache.store(true, Ordering::Relaxed);
    }

    /// Bounds what those have in flight that begin from here on.
    pub fn set_memory(&self, limit: MemoryLimit) {
        *self.memory.lock() = limit;
    }

    /// Says whether a load goes on that has moved so many bytes, and tells them.
    pub fn go_on(&self, uri: &str, moved: u64) -> Result<()> {
        if self.stopped.load(Ordering::Relaxed) {
            return Err(Error::Closed(format!("the load of `{uri}` was given up")));
        }
        signals()?;
        self.watch.tick(moved)
    }

    /// Runs one without the GIL; it is told of while it runs, and logged.
    pub fn run<T: Send>(
        &self,
        py: Python<'_>,
        uri: &str,
        load: impl FnOnce(&Counters, &dyn Cancel) -> Result<T> + Send,
    ) -> Answer<T> {
        let counters = Counters::default();
        let loaded = gil::without(py, || {
            let go_on = || self.go_on(uri, counters.moved());
            let loaded = load(&counters, &go_on)?;
            self.watch.end(counters.moved())?;
            Ok(loaded)
        })?;
        log(py)?;
        Ok(loaded)
    }
}

const INFO: u8 = 20;

/// Logs the load or save that has ended on this thread.
pub fn log(py: Python<'_>) -> PyResult<()> {
    static LOGGER: PyOnceLock<Py<PyAny>> = PyOnceLock::new();
    let Some(report) = take_own() else { return Ok(()) };
    let logger = LOGGER.get_or_try_init(py, || {
        let logging = py.import("logging")?;
        logging.call_method1("getLogger", ("tensorizer",)).map(Bound::unbind)
    })?;
    if logger.call_method1(py, "isEnabledFor", (INFO,))?.is_truthy(py)? {
        logger.call_method1(py, "info", ("%s", line(&report)))?;
    }
    Ok(())
}

/// What a call did, in one line.
fn line(report: &Report) -> String {
    let Report { what, uri, device, tensors, bytes, threads, elapsed, reading, fallbacks, .. } =
        report;
    let (what, way) = if *what == "save" { ("saved", "from") } else { ("loaded", "to") };
    let seconds = elapsed.as_secs_f64();
    #[allow(clippy::cast_precision_loss)] // For people.
    let rate = *bytes as f64 / seconds.max(1e-9) / 1e9;
    let mut line = format!(
        "{what} {tensors} tensors, {bytes} bytes in {seconds:.3} s ({rate:.2} GB/s) {way} {device}, \
         {threads} threads: {uri}"
    );
    if !reading.is_empty() {
        line += &format!("; {reading}");
    }
    for fallback in fallbacks {
        line += &format!("; {fallback}");
    }
    line
}
