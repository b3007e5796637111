//! Reports of calls, as dicts.

use std::collections::HashMap;
use std::time::{Duration, SystemTime, UNIX_EPOCH};

use pyo3::prelude::*;
use pyo3::types::PyDict;
use tensorizer::mem::pinned::Pool;
use tensorizer::stats::{Report, Stage, last_report, reports_since};

use crate::errors::Outcome;

/// Seconds since 1970.
pub fn since_1970(time: SystemTime) -> f64 {
    time.duration_since(UNIX_EPOCH).unwrap_or(Duration::ZERO).as_secs_f64()
}

/// Returns the report of the last load or save that has succeeded; None before the first.
#[pyfunction]
pub fn stats(py: Python<'_>) -> Outcome<Option<Bound<'_, PyDict>>> {
    Ok(last_report().map(|report| report_dict(py, report)).transpose()?)
}

/// Returns the reports of the calls after the one with this number.
#[pyfunction]
pub fn stats_since(py: Python<'_>, call: u64) -> Outcome<Vec<Bound<'_, PyDict>>> {
    let reports = reports_since(call).into_iter().map(|report| report_dict(py, report));
    Ok(reports.collect::<PyResult<_>>()?)
}

/// Makes a dict of a report.
pub fn report_dict(py: Python<'_>, report: Report) -> PyResult<Bound<'_, PyDict>> {
    let Report {
        call,
        ended,
        what,
        uri,
        device,
        tensors,
        bytes,
        threads,
        most_threads,
        elapsed,
        stages,
        reading,
        in_flight,
        most_in_flight,
        fallbacks,
        traffic,
        cache_bytes,
        disk_bytes,
        error,
        is_lazy: _,
    } = report;
    let pinned: usize = Pool::all().into_iter().map(Pool::size).sum();
    let stages: HashMap<&str, f64> = Stage::ALL
        .iter()
        .zip(stages)
        .map(|((_, name), time)| (*name, time.as_secs_f64()))
        .collect();
    let out = PyDict::new(py);
    out.set_item("call", call)?;
    out.set_item("ended", since_1970(ended))?;
    out.set_item("what", what)?;
    out.set_item("uri", uri)?;
    out.set_item("device", device)?;
    out.set_item("tensors", tensors)?;
    out.set_item("bytes", bytes)?;
    out.set_item("threads", threads)?;
    out.set_item("most_threads", most_threads)?;
    out.set_item("seconds", elapsed.as_secs_f64())?;
    out.set_item("stages", stages)?;
    out.set_item("reading", reading)?;
    out.set_item("in_flight", in_flight)?;
    out.set_item("most_in_flight", most_in_flight)?;
    out.set_item("fallbacks", fallbacks)?;
    out.set_item("pinned_bytes", pinned)?;
    out.set_item("requests", traffic.requests)?;
    out.set_item("retries", traffic.retries)?;
    out.set_item("network_bytes", traffic.network_bytes)?;
    out.set_item("cache_bytes", cache_bytes)?;
    out.set_item("disk_bytes", disk_bytes)?;
    out.set_item("error", error)?;
    Ok(out)
}
