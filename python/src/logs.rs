//! The records of the logger `tensorizer`: a line for each load and save, and warnings.

use std::collections::BTreeSet;

use pyo3::prelude::*;
use pyo3::sync::PyOnceLock;
use pyo3::types::PyDict;
use tensorizer::ForkSafeMutex;
use tensorizer::io::cache::NOT_CACHED;
use tensorizer::stats::{OLDER_COPY, Report, take_thread_report};
use tensorizer::traffic::take_reports;

use crate::reports::{report_dict, set_fields};

const DEBUG: u8 = 10;
const INFO: u8 = 20;
const WARNING: u8 = 30;

/// Logs a line with fields, which is made if the level is enabled.
fn record<'py>(
    py: Python<'py>,
    level: u8,
    line: impl FnOnce() -> PyResult<(String, Bound<'py, PyDict>)>,
) -> PyResult<()> {
    static LOGGER: PyOnceLock<Py<PyAny>> = PyOnceLock::new();
    let logger = LOGGER.get_or_try_init(py, || {
        let logging = py.import("logging")?;
        logging.call_method1("getLogger", ("tensorizer",)).map(Bound::unbind)
    })?;
    if logger.call_method1(py, "isEnabledFor", (level,))?.is_truthy(py)? {
        let ((line, fields), extra) = (line()?, PyDict::new(py));
        extra.set_item("extra", fields)?;
        logger.call_method(py, "log", (level, "%s", line), Some(&extra))?;
    }
    Ok(())
}

/// Logs the load or save that has ended on this thread, after its warnings.
pub fn log(py: Python<'_>) -> PyResult<()> {
    warn_of_repeats(py)?;
    let Some(report) = take_thread_report() else { return Ok(()) };
    warn_of_caches(py, &report)?;
    let level = if report.is_lazy { DEBUG } else { INFO };
    record(py, level, || Ok((line(&report), report_dict(py, &report)?)))
}

/// Warns of requests that were repeated.
pub fn warn_of_repeats(py: Python<'_>) -> PyResult<()> {
    take_reports().into_iter().try_for_each(|repeated| {
        record(py, WARNING, || {
            let fields = PyDict::new(py);
            set_fields!(fields, repeated, uri error attempt limit byte);
            Ok((repeated.to_string(), fields))
        })
    })
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
    let reading = Some(*reading).filter(|reading| !reading.is_empty());
    let notes = reading.into_iter().chain(fallbacks.iter().map(String::as_str));
    notes.for_each(|note| line += &format!("; {note}"));
    line
}
