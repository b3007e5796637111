//! The order in which batches are read.

use std::cmp::Reverse;

use super::destination::Destination;
use super::plan::{Batch, ReadPlan, Segment};
use crate::error::Result;
use crate::fallible::collect_all;
use crate::numbers::ExtentNumber;

/// When SHA-256 is verified, tensors of at least this size are read before smaller ones. The hash
/// of one tensor cannot be split among threads; begun last, it would delay the end of the load.
pub const LARGE: u64 = if cfg!(test) { 1 << 20 } else { 64 << 20 };

/// Batches that one reader reads one after another, each with the destination's plan for it.
pub type ReadJob<D> = Vec<(Batch, <D as Destination>::BatchPlan)>;

/// Plans all batches, and returns them in the order in which they are read. `step` and `max_uncut`:
/// see [`Batch::steps`].
pub fn plan_jobs<D: Destination>(
    plan: &ReadPlan<'_>,
    batches: Vec<Batch>,
    to: &mut D,
    (step, max_uncut): (u64, u64),
    large_first: bool,
) -> Result<Vec<ReadJob<D>>> {
    let data_len =
        |extent: ExtentNumber| extent.of(&plan.extents).map_or(0, |extent| extent.data_len);
    let mut jobs = Vec::with_capacity(batches.len());
    for batch in batches {
        let largest = batch.segments.iter().filter_map(Segment::extent).map(data_len).max();
        let first = largest.filter(|&len| large_first && len >= LARGE);
        let steps = if step == u64::MAX { vec![batch] } else { batch.steps(step, max_uncut) };
        let steps = steps.into_iter().map(|mut batch| {
            plan.place_all(&mut batch)?;
            let planned = to.plan(&batch)?;
            Ok((batch, planned))
        });
        jobs.push((first, collect_all(steps)?));
    }
    // Destinations plan batches in file order, so the jobs are sorted only afterwards.
    jobs.sort_by_key(|(first, _)| Reverse(*first));
    Ok(jobs.into_iter().map(|(_, job)| job).collect())
}

fn segments<P>(job: &[(Batch, P)]) -> impl DoubleEndedIterator<Item = &Segment> {
    job.iter().flat_map(|(batch, _)| &batch.segments)
}

/// Returns the first and the last extent of a job; None if it has none.
pub fn outer_extents<P>(job: &[(Batch, P)]) -> Option<(ExtentNumber, ExtentNumber)> {
    let first = segments(job).find_map(Segment::extent)?;
    Some((first, segments(job).rev().find_map(Segment::extent).unwrap_or(first)))
}

/// Returns the extent that all headers and data of a job belong to; None if they belong to several.
pub fn only_extent<P>(job: &[(Batch, P)]) -> Option<ExtentNumber> {
    let mut extents = segments(job).filter_map(Segment::extent);
    let first = extents.next()?;
    extents.all(|extent| extent == first).then_some(first)
}
