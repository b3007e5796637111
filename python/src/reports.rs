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
    Ok(last_report().map(|report| report_dict(py, &report)).transpose()?)
}

/// Returns the reports of the calls after the one with this number.
#[pyfunction]
pub fn stats_since(py: Python<'_>, call: u64) -> Outcome<Vec<Bound<'_, PyDict>>> {
    let reports = reports_since(call).into_iter().map(|report| report_dict(py, &report));
    Ok(reports.collect::<PyResult<_>>()?)
}

/// Sets items of a dict: the fields of a struct, under their names.
macro_rules! set_fields {
    ($out:ident, $from:expr, $($name:ident)+) => {
        $($out.set_item(stringify!($name), &$from.$name)?;)+
    };
}
pub(crate) use set_fields;

/// Makes a dict of a report.
pub fn report_dict<'py>(py: Python<'py>, report: &Report) -> PyResult<Bound<'py, PyDict>> {
    let stages = Stage::NAMES.into_iter().zip(report.stages.map(|time| time.as_secs_f64()));
    let stages: HashMap<&str, f64> = stages.collect();
    let pinned: usize = Pool::all().into_iter().map(Pool::size).sum();
    let out = PyDict::new(py);
    set_fields!(out, report, call what uri device tensors bytes threads most_threads reading in_flight
        most_in_flight fallbacks cache_bytes disk_bytes error);
    set_fields!(out, report.traffic, requests retries network_bytes);
    out.set_item("ended", since_1970(report.ended))?;
    out.set_item("seconds", report.elapsed.as_secs_f64())?;
    out.set_item("stages", stages)?;
    out.set_item("pinned_bytes", pinned)?;
    Ok(out)
}
