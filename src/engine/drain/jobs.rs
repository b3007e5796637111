//! What one thread writes at a time, and in which order.
// A broken invariant ends the call by a panic that its boundary catches.
#![allow(clippy::indexing_slicing)]

use std::collections::VecDeque;

use super::{Item, staged};
use crate::api::save::Data;
use crate::codec::crypt::PIECE_LEN;
use crate::engine::plan::{Batch, Extent, Limits, SegmentKind, partition};
use crate::error::Result;

/// Bytes a write; long enough for a disk to stream and short enough to stay in the cache.
const PART_LEN: u64 = 4 << 20;
/// SHA-256 sees a tensor front to back: tensors of this size take turns, so that several are hashed
/// at once.
const LARGE: u64 = 16 << 20;

pub enum Job {
    Batch(Batch),
    /// A tensor that must be brought into memory first, by itself.
    Deferred(usize),
    /// Tensors that are on a device.
    Staged(Vec<usize>),
}

/// Cuts runs of tensors in memory into parts; the others are jobs of their own. In file order, except
/// that so many large tensors take turns. Parts of each tensor stay in order.
pub fn jobs(items: &[Item<'_>], extents: &[Extent], in_turns: usize) -> Result<Vec<Job>> {
    let mut jobs = Turns { in_turns, begun: Vec::new(), jobs: Vec::new() };
    let mut first = 0;
    for (tensor, item) in items.iter().enumerate() {
        // A tensor that was grouped with those before.
        if tensor < first {
            continue;
        }
        match &item.data {
            Data::Deferred(_) => {
                jobs.jobs.extend(parts(extents, first..tensor));
                jobs.jobs.push(Job::Deferred(tensor));
                first = tensor + 1;
            }
            Data::Device(_) => {
                jobs.jobs.extend(parts(extents, first..tensor));
                let group = staged::group(items, tensor)?;
                first = tensor + group.len();
                jobs.jobs.push(Job::Staged(group));
            }
            Data::Bytes(_) if in_turns > 1 && item.entry.data_len >= LARGE => {
                jobs.jobs.extend(parts(extents, first..tensor));
                jobs.begin(parts(extents, tensor..tensor + 1).collect());
                first = tensor + 1;
            }
            Data::Bytes(_) | Data::Meta => {}
        }
    }
    jobs.jobs.extend(parts(extents, first..items.len()));
    jobs.take_turns();
    Ok(jobs.jobs)
}

fn parts(extents: &[Extent], tensors: std::ops::Range<usize>) -> impl Iterator<Item = Job> {
    let (first, run) = (tensors.start, &extents[tensors]);
    let limits =
        Limits { len: PART_LEN, merge_gap: 0, segments: crate::sys::MAX_VECTORS, unit: PIECE_LEN };
    let parts = partition(run, &limits);
    parts.into_iter().map(move |mut part| {
        for piece in &mut part.segments {
            match &mut piece.kind {
                SegmentKind::Header { tensor } | SegmentKind::Data { tensor, .. } => {
                    *tensor += first
                }
                SegmentKind::Gap => {}
            }
        }
        Job::Batch(part)
    })
}

struct Turns {
    in_turns: usize,
    /// The parts of tensors that take turns.
    begun: Vec<VecDeque<Job>>,
    jobs: Vec<Job>,
}

impl Turns {
    fn begin(&mut self, tensor: VecDeque<Job>) {
        self.begun.push(tensor);
        if self.begun.len() == self.in_turns {
            self.take_turns();
        }
    }

    fn take_turns(&mut self) {
        while !self.begun.is_empty() {
            self.jobs.extend(self.begun.iter_mut().filter_map(VecDeque::pop_front));
            self.begun.retain(|tensor| !tensor.is_empty());
        }
    }
}
