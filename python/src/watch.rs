//! The progress of the loads or writes of a file: reported to a callable while they run, and logged
//! when they have ended.

use std::collections::BTreeSet;
use std::sync::OnceLock;
use std::sync::atomic::{AtomicBool, AtomicU64, Ordering};

use pyo3::prelude::*;
use pyo3::sync::PyOnceLock;
use tensorizer::cancel::Cancel;
use tensorizer::error::{Error, Result};
use tensorizer::io::cache::NOT_CACHED;
use tensorizer::stats::{Counters, OLDER_COPY, Report, take_thread_report};
use tensorizer::{ForkSafeMutex, LoadOptions, MemoryLimit, Verify};

use crate::errors::Outcome;
use crate::verification::verification;
use crate::{gil, signals};

/// Reports progress to a callable.
#[derive(Default)]
pub struct Watch {
    /// The callable. It takes the bytes of tensor data that all calls have moved.
    callback: OnceLock<Py<PyAny>>,
    /// Bytes of the calls that have ended.
    ended_bytes: AtomicU64,
    reported: AtomicU64,
}

impl Watch {
    /// Sets the callable that gets reports from now on; later calls have no effect.
    pub fn set(&self, callback: Py<PyAny>) {
        let _ = self.callback.set(callback);
    }

    /// Reports the bytes that a running call has moved, on the thread that checks for signals. An
    /// exception of the callable ends the call.
    pub fn tick(&self, moved: u64) -> Result<()> {
        let Some(callback) = self.callback.get() else { return Ok(()) };
        let sum = self.ended_bytes.load(Ordering::Relaxed).saturating_add(moved);
        if self.reported.fetch_max(sum, Ordering::Relaxed) >= sum {
            return Ok(());
        }
        let reported = gil::with(|py| callback.call1(py, (sum,)).map(drop))?;
        reported.map_err(|e| Error::Caller(Box::new(e)))
    }

    /// Adds the bytes of an ended call, and reports the sum.
    pub fn end(&self, moved: u64) -> Result<()> {
        self.ended_bytes.fetch_add(moved, Ordering::Relaxed);
        self.tick(0)
    }
}

/// The options of the loads of a file, which a call may override.
#[derive(Clone, Copy)]
pub struct ReadOptions {
    pub verify: Verify,
    /// Threads; None for as many as help.
    pub readers: Option<usize>,
    /// True to use tensors in place in a mapping of the file.
    pub map: bool,
    /// True if each tensor on a device gets memory of its own.
    pub separate_memory: bool,
}

impl Default for ReadOptions {
    fn default() -> Self {
        let verify = Verify::Nothing;
        ReadOptions { verify, readers: None, map: false, separate_memory: false }
    }
}

/// The state that all loads of a file share.
#[derive(Default)]
pub struct LoadState {
    reading: ForkSafeMutex<ReadOptions>,
    stopped: AtomicBool,
    pub watch: Watch,
    memory: ForkSafeMutex<MemoryLimit>,
    shares_cache: AtomicBool,
    /// A fallback that the next load reports.
    fallback: ForkSafeMutex<Option<String>>,
}

impl LoadState {
    /// Ends loads that are under way, and refuses new ones.
    pub fn stop(&self) {
        self.stopped.store(true, Ordering::Relaxed);
    }

    /// Sets how later loads read.
    pub fn set_reading(&self, options: ReadOptions) {
        *self.reading.lock() = options;
    }

    /// True if each tensor on a device gets memory of its own.
    pub fn separate_memory(&self) -> bool {
        self.reading.lock().separate_memory
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

    /// Makes the next load report a fallback.
    pub fn report_fallback(&self, why: String) {
        *self.fallback.lock() = Some(why);
    }

    /// Limits the memory that later loads have in flight.
    pub fn set_memory(&self, limit: MemoryLimit) {
        *self.memory.lock() = limit;
    }

    /// Reports the bytes that a load has moved. Returns an error if the load is to end.
    pub fn report_and_check(&self, uri: &str, moved: u64) -> Result<()> {
        if self.stopped.load(Ordering::Relaxed) {
            return Err(Error::Closed(format!("the load of `{uri}` was stopped before its end")));
        }
        signals()?;
        self.watch.tick(moved)
    }

    /// Runs a load without the GIL. Its progress is reported while it runs, and it is logged.
    pub fn run<T: Send>(
        &self,
        py: Python<'_>,
        uri: &str,
        load: impl FnOnce(&Counters, &dyn Cancel) -> Result<T> + Send,
    ) -> Outcome<T> {
        let counters = Counters::default();
        if let Some(why) = self.fallback.lock().take() {
            counters.fallback(&why);
        }
        let loaded = gil::without(py, || {
            let report_and_check = || self.report_and_check(uri, counters.moved());
            let loaded = load(&counters, &report_and_check)?;
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
    let Some(report) = take_thread_report() else { return Ok(()) };
    warn_of_caches(py, &report)?;
    let logger = LOGGER.get_or_try_init(py, || {
        let logging = py.import("logging")?;
        logging.call_method1("getLogger", ("tensorizer",)).map(Bound::unbind)
    })?;
    if logger.call_method1(py, "isEnabledFor", (INFO,))?.is_truthy(py)? {
        logger.call_method1(py, "info", ("%s", line(&report)))?;
    }
    Ok(())
}

/// Warns, once for each reason, that the cache does not keep a file, or that another cache was used.
fn warn_of_caches(py: Python<'_>, report: &Report) -> PyResult<()> {
    static WARNED: ForkSafeMutex<BTreeSet<String>> = ForkSafeMutex::new(BTreeSet::new());
    let of_cache = |why: &&String| why.starts_with(NOT_CACHED) || why.starts_with(OLDER_COPY);
    for why in report.fallbacks.iter().filter(of_cache) {
        let is_new = WARNED.lock().insert(why.clone());
        if is_new {
            py.import("warnings")?.call_method1("warn", (why,))?;
        }
    }
    Ok(())
}

/// Describes a call in one line.
fn line(report: &Report) -> String {
    let Report { what, uri, device, tensors, bytes, threads, elapsed, reading, fallbacks, .. } =
        report;
    let (what, direction) = if *what == "save" { ("saved", "from") } else { ("loaded", "to") };
    let seconds = elapsed.as_secs_f64();
    #[allow(clippy::cast_precision_loss)] // Only for a log message.
    let rate = *bytes as f64 / seconds.max(1e-9) / 1e9;
    let mut line = format!(
        "{what} {tensors} tensors, {bytes} bytes in {seconds:.3} s ({rate:.2} GB/s) {direction} {device}, \
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
