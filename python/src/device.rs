//! Functions for Python about devices: staging, and staging memory.

use pyo3::prelude::*;
use tensorizer::device::{DeviceIndex, find};
use tensorizer::error::Result;
use tensorizer::mem::pinned::Pool;
use tensorizer_torch::handles::{borrow, offer};
use tensorizer_torch::tensor::{LoadedTensors, all_on_devices};

use crate::calls::signals;
use crate::errors::Outcome;
use crate::gil;
use crate::handle::Handle;

/// True if loads to a device go through staging memory into its own.
#[pyfunction]
pub fn uses_staging_memory(device: DeviceIndex) -> bool {
    find(device).is_ok_and(|found| found.is_some())
}

/// Sets the most bytes of staging memory that all loads to and saves from one device take.
#[pyfunction]
pub fn set_pinned_limit(bytes: u64) {
    Pool::limit_all(bytes);
}

/// Copies lent tensors from devices into host memory. Returns the handle with which `_take` fetches
/// the copies.
#[pyfunction]
pub fn snapshot(py: Python<'_>, handle: &Handle) -> Outcome<Handle> {
    Ok(gil::without(py, || -> Result<_> {
        let lent = borrow(&handle.0)?;
        let memory = tensorizer::snapshot(&all_on_devices(&lent)?, &signals)?;
        Ok(Handle(offer(LoadedTensors::copies(&lent, memory)?)))
    })?)
}

/// Frees staging memory that is not in use, and returns its number of bytes.
#[pyfunction]
pub fn release_pinned(py: Python<'_>) -> Outcome<usize> {
    Ok(gil::without(py, || Ok(Pool::all().into_iter().map(Pool::release).sum()))?)
}
