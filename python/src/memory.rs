//! Division of a memory limit for the Python parts of a call, and the switch for timing memory
//! allocation.

use pyo3::prelude::*;
use tensorizer::MemoryLimit;
use tensorizer::memory_limit::SaveNeeds;

use crate::errors::Outcome;

/// Divides a limit between tensors in memory and the readers that load them. `largest`: bytes of
/// the largest tensor; `reader`: minimum bytes for the readers; `reserved`: bytes that are reserved
/// for the caller. Returns the bytes for tensors, and the bytes that are not for the readers,
/// `reserved` included. Without a limit, tensors get the `wanted` bytes.
#[pyfunction]
#[pyo3(signature = (limit, wanted, largest, reader, reserved = 0))]
pub fn split_tensor_memory(
    limit: Option<u64>,
    wanted: u64,
    largest: u64,
    reader: u64,
    reserved: u64,
) -> Outcome<(u64, u64)> {
    let limit = MemoryLimit::of(limit).reserving(reserved).or_environment()?;
    let (tensors, rest) = limit.tensors(wanted, largest, reader)?;
    Ok((tensors, rest.reserved()))
}

/// Returns the bytes of a limit, or of that of the environment; None for no limit.
#[pyfunction]
pub fn effective_memory_limit(limit: Option<u64>) -> Outcome<Option<u64>> {
    Ok(MemoryLimit::of(limit).or_environment()?.bytes())
}

/// Returns the minimum memory of a save that writes tensors from host memory and hashes them.
#[pyfunction]
pub fn minimum_save_memory(uploads: bool, encrypted: bool) -> u64 {
    SaveNeeds::of_host(uploads, encrypted).minimum()
}

/// Enables or disables timing of memory allocation in the loads of this process.
#[pyfunction]
pub fn time_first_touch(timed: bool) {
    tensorizer::stats::time_first_touch(timed);
}
