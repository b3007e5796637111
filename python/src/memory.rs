//! How Python's parts of a call share a memory limit, and how fast new memory is had.

use std::time::Instant;

use pyo3::prelude::*;
use tensorizer::MemoryLimit;
use tensorizer::mem::Arena;

use crate::errors::Answer;
use crate::gil;

const PAGE: usize = 4096;

/// How a limit is shared between tensors that are held, of which the largest has so many bytes, and
/// what reads them: bytes of tensors, and what they take of the limit. Without a limit the `wanted`.
#[pyfunction]
pub fn shares_of_tensors(limit: Option<u64>, wanted: u64, largest: u64) -> Answer<(u64, u64)> {
    let (tensors, rest) = MemoryLimit::of(limit).known()?.tensors(wanted, largest)?;
    Ok((tensors, rest.beside()))
}

/// How a member of a group shares a limit: bytes of a batch, how many it fetches at once, and what is
/// not for one of them. `most`: bytes of a batch at most; `reads` at once, while `others` are sent or
/// wait; `whole`: bytes of a batch at least.
#[pyfunction]
pub fn shares_of_group(
    limit: Option<u64>,
    most: u64,
    reads: u64,
    others: u64,
    whole: u64,
) -> Answer<(u64, u64, u64)> {
    let shares = MemoryLimit::of(limit).known()?.group(most, reads, others, whole)?;
    Ok((shares.batch, shares.at_once, shares.load.beside()))
}

/// Seconds until so many bytes of new memory were written to for the first time, by one thread.
#[pyfunction]
pub fn first_touch(py: Python<'_>, bytes: usize) -> Answer<f64> {
    Ok(gil::without(py, || {
        let begun = Instant::now();
        let mut memory = Arena::new(bytes)?;
        memory.bytes_mut().iter_mut().step_by(PAGE).for_each(|byte| *byte = 1);
        Ok(begun.elapsed().as_secs_f64())
    })?)
}
