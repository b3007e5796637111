//! The order in which batches are read.

use super::plan::{Batch, Extent, PLAN, Segment, SegmentKind};
use super::target::Target;
use crate::error::Result;
use crate::fallible::{try_collect, try_collect_results, try_with_capacity};

/// When SHA-256 is verified, tensors of at least this size are read before smaller ones. The hash
/// of one tensor cannot be split among threads; begun last, it would delay the end of the load.
pub const LARGE: u64 = if cfg!(test) { 1 << 20 } else { 64 << 20 };

/// Batches that one reader reads one after another, each with the target's plan for it.
pub type ReadJob<T> = Vec<(Batch, <T as Target>::BatchPlan)>;

/// Plans all batches, and returns them in the order in which they are read. `step` and `max_uncut`:
/// see [`Batch::steps`].
pub fn plan_jobs<T: Target>(
    extents: &[Extent],
    batches: Vec<Batch>,
    target: &mut T,
    (step, max_uncut): (u64, u64),
    large_first: bool,
) -> Result<Vec<ReadJob<T>>> {
    let mut jobs = try_with_capacity(batches.len(), PLAN)?;
    for batch in batches {
        let largest = batch.segments.iter().filter_map(|segment| match segment.kind {
            SegmentKind::Data { tensor, .. } => extents.get(tensor).map(|extent| extent.data_len),
            _ => None,
        });
        let first = largest.max().filter(|&len| large_first && len >= LARGE);
        let steps = if step == u64::MAX { vec![batch] } else { batch.steps(step, max_uncut)? };
        let steps = steps.into_iter().map(|batch| {
            let job = target.plan(&batch)?;
            Ok((batch, job))
        });
        jobs.push((first, try_collect_results(steps, PLAN)?));
    }
    // Targets must plan batches in file order, so the jobs are sorted only afterwards.
    jobs.sort_by_key(|(first, _)| std::cmp::Reverse(*first));
    try_collect(jobs.into_iter().map(|(_, job)| job), PLAN)
}

/// Returns the first and the last tensor of a job; None if it has none.
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

/// Returns the tensor that all headers and data of a job belong to; None if they belong to several.
pub fn only_tensor<J>(job: &[(Batch, J)]) -> Option<usize> {
    let segments = job.iter().flat_map(|(batch, _)| &batch.segments);
    let mut tensors = segments.filter_map(tensor_of);
    let first = tensors.next()?;
    tensors.all(|tensor| tensor == first).then_some(first)
}
