//! How Python's parts of a call share a memory limit, and whether new memory is timed.

use pyo3::prelude::*;
use tensorizer::MemoryLimit;
use tensorizer::memory_limit::SaveNeeds;

use crate::errors::Answer;

/// How a limit is shared between tensors that are held, of which the largest has so many bytes, and
/// what reads them, which takes `reader` at least: bytes of tensors, and what is not for what reads
/// them, with what the caller keeps of the limit. Without a limit the `wanted`.
#[pyfunction]
#[pyo3(signature = (limit, wanted, largest, reader, kept = 0))]
pub fn shares_of_tensors(
    limit: Option<u64>,
    wanted: u64,
    largest: u64,
    reader: u64,
    kept: u64,
) -> Answer<(u64, u64)> {
    let limit = MemoryLimit::of(limit).without(kept).known()?;
    let (tensors, rest) = limit.tensors(wanted, largest, reader)?;
    Ok((tensors, rest.beside()))
}

/// How a member of a group shares a limit: bytes of a batch, how many it fetches at once, and what is
/// not for one of them. `most`: bytes of a batch at most; `reads` at once, while `others` are sent or
/// wait; `whole`: bytes of a batch at least; `reader`: what reads one takes at least.
#[pyfunction]
pub fn shares_of_group(
    limit: Option<u64>,
    most: u64,
    reads: u64,
    others: u64,
    whole: u64,
    reader: u64,
) -> Answer<(u64, u64, u64)> {
    let shares = MemoryLimit::of(limit).known()?.group(most, reads, others, whole, reader)?;
    Ok((shares.batch, shares.at_once, shares.load.beside()))
}

/// The bytes of a limit, or of that of the environment; None for none.
#[pyfunction]
pub fn known_limit(limit: Option<u64>) -> Answer<Option<u64>> {
    Ok(MemoryLimit::of(limit).known()?.bytes())
}

/// The least that a save takes which writes tensors in host memory and hashes them.
#[pyfunction]
pub fn least_of_save(uploads: bool, encrypted: bool) -> u64 {
    SaveNeeds::of_host(uploads, encrypted).least()
}

/// Has the loads of this process time how long the system takes to give new memory, or not.
#[pyfunction]
pub fn time_first_touch(timed: bool) {
    tensorizer::stats::time_first_touch(timed);
}
