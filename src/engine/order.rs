//! In which order batches are read.

use super::plan::{Batch, Extent, PLAN, Segment, SegmentKind};
use super::target::Target;
use crate::error::Result;
use crate::fallible::{collected, listed, with_room};

/// When SHA-256 is verified, a tensor of this size is begun before smaller ones: its hash cannot be
/// shared out, and would otherwise be waited for at the end.
pub const LARGE: u64 = if cfg!(test) { 1 << 20 } else { 64 << 20 };

/// Batches for one reader, read one after another, each with what the target has planned for it.
pub type Job<T> = Vec<(Batch, <T as Target>::Job)>;

/// Plans all batches, in the order in which they are begun.
pub fn jobs<T: Target>(
    extents: &[Extent],
    batches: Vec<Batch>,
    target: &mut T,
    (step, whole): (u64, u64),
    large_first: bool,
) -> Result<Vec<Job<T>>> {
    let mut jobs = with_room(batches.len(), PLAN)?;
    for batch in batches {
        let largest = batch.segments.iter().filter_map(|segment| match segment.kind {
            SegmentKind::Data { tensor, .. } => extents.get(tensor).map(|extent| extent.data_len),
            _ => None,
        });
        let first = largest.max().filter(|&len| large_first && len >= LARGE);
        let steps = if step == u64::MAX { vec![batch] } else { batch.steps(step, whole)? };
        let steps = steps.into_iter().map(|batch| {
            let job = target.plan(&batch)?;
            Ok((batch, job))
        });
        jobs.push((first, collected(steps, PLAN)?));
    }
    // Targets plan in file order; only then are jobs put into their own.
    jobs.sort_by_key(|(first, _)| std::cmp::Reverse(*first));
    listed(jobs.into_iter().map(|(_, job)| job), PLAN)
}

/// The first and the last tensor of a job; None if it has none.
pub fn outer_tensors<J>(job: &[(Batch, J)]) -> Option<(usize, usize)> {
    let segments = job.iter().flat_map(|(batch, _)| &batch.segments);
    let mut tensors = segments.filter_map(tensor_of);
    let first = tensors.next()?;
    let back = job.iter().rev().flat_map(|(batch, _)| batch.segments.iter().rev());
    Some((first, back.filter_map(tensor_of).next().unwrap_or(first)))
}

fn tensor_of(segment: &Segment) -> Option<usize> {
    match segment.kind {
        SegmentKind::Header { tensor } | SegmentKind::Data { tensor, .. } => Some(tensor),
        SegmentKind::Gap => None,
    }
}

/// The tensor that all of a job is of, header and data; None if it is of several.
pub fn only_tensor<J>(job: &[(Batch, J)]) -> Option<usize> {
    let segments = job.iter().flat_map(|(batch, _)| &batch.segments);
    let mut tensors = segments.filter_map(tensor_of);
    let first = tensors.next()?;
    tensors.all(|tensor| tensor == first).then_some(first)
}
