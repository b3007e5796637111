//! Shares of a memory limit for the Python parts of a call, and the switch that times new memory.

use pyo3::prelude::*;
use tensorizer::MemoryLimit;
use tensorizer::memory_limit::SaveNeeds;

use crate::errors::Answer;

/// Divides a limit between tensors that are held and the readers that bring them. `largest`: bytes
/// of the largest tensor; `reader`: bytes that the readers need at least; `kept`: bytes of the
/// limit that the caller uses itself. Returns the bytes of tensors, and the bytes that are not for
/// the readers, with `kept`. Without a limit, tensors get the `wanted` bytes.
#[pyfunction]
#[pyo3(signature = (limit, wanted, largest, reader, kept = 0))]
pub fn shares_of_tensors(
    limit: Option<u64>,
    wanted: u64,
    largest: u64,
    reader: u64,
    kept: u64,
) -> Answer<(u64, u64)> {
    let limit = MemoryLimit::of(limit).reserving(kept).or_environment()?;
    let (tensors, rest) = limit.tensors(wanted, largest, reader)?;
    Ok((tensors, rest.reserved()))
}

/// Divides a limit for a member of a group. `most`: bytes of a batch at most; `reads`: batches that
/// are fetched at once, while `others` are sent or wait; `whole`: bytes of a batch at least;
/// `reader`: bytes that fetching a batch needs at least. Returns the bytes of a batch, the number
/// that is fetched at once, and the bytes of the limit that are not for fetching one of them.
#[pyfunction]
pub fn shares_of_group(
    limit: Option<u64>,
    most: u64,
    reads: u64,
    others: u64,
    whole: u64,
    reader: u64,
) -> Answer<(u64, u64, u64)> {
    let shares =
        MemoryLimit::of(limit).or_environment()?.group(most, reads, others, whole, reader)?;
    Ok((shares.batch, shares.at_once, shares.load.reserved()))
}

/// Returns the bytes of a limit, or of that of the environment; None for no limit.
#[pyfunction]
pub fn known_limit(limit: Option<u64>) -> Answer<Option<u64>> {
    Ok(MemoryLimit::of(limit).or_environment()?.bytes())
}

/// Returns the minimum memory of a save that writes tensors from host memory and hashes them.
#[pyfunction]
pub fn least_of_save(uploads: bool, encrypted: bool) -> u64 {
    SaveNeeds::of_host(uploads, encrypted).minimum()
}

/// Makes the loads of this process measure, or not, how long the system takes to provide new memory.
#[pyfunction]
pub fn time_first_touch(timed: bool) {
    tensorizer::stats::time_first_touch(timed);
}
