//! What one thread feeds at a time, and in which order.

use std::collections::VecDeque;
use std::ops::Range;

use super::item::Item;
use super::origin::Origin;
use crate::codec::crypt::PIECE_LEN;
use crate::engine::plan::{Batch, Extent, Limits, PLAN, SegmentKind, partition};
use crate::error::Result;
use crate::fallible::{collected, listed, more_room, push};

/// Bytes a write; long enough for a disk to stream and short enough to stay in the cache.
pub const BATCH_LEN: u64 = 4 << 20;
/// The same of an upload, where a write is a copy into a part: long enough that taking the next one costs
/// nothing beside it.
pub const UPLOAD_BATCH_LEN: u64 = 512 << 10;
/// SHA-256 sees a tensor front to back: tensors of this size take turns, so that several are hashed
/// at once.
const TURN_LEN: u64 = 16 << 20;
/// The most tensors of a device that are written together: each has a header and data, and one
/// call may name only so many buffers.
const MOST: usize = crate::sys::MAX_VECTORS / 2;

/// Some of the data of one tensor. A tensor without data has one span, of no bytes.
pub struct Span {
    /// Whose.
    pub tensor: usize,
    /// Position within the data.
    pub start: u64,
    /// Bytes.
    pub len: u64,
}

pub enum Job {
    /// Data in memory that are written together.
    Memory(Vec<Span>),
    /// A tensor that must be brought into memory first, by itself.
    Deferred(usize),
    /// A tensor on a device that does not fit into a staging buffer.
    Device(usize),
    /// Tensors on a device that fit into one staging buffer together.
    DeviceGroup(Range<usize>),
}

/// Cuts runs of tensors in memory into batches; the others are jobs of their own. In file order,
/// except that so many large tensors take turns. Batches of each tensor stay in order, and have
/// `batch_len` bytes at most. A device's staging buffers have `staging` bytes.
pub fn jobs(
    items: &[Item<'_>],
    in_turns: usize,
    staging: usize,
    batch_len: u64,
) -> Result<Vec<Job>> {
    let mut jobs = Turns { in_turns, begun: Vec::new(), jobs: Vec::new() };
    let in_memory =
        |tensors| listed(batches(items, tensors, batch_len)?.into_iter().map(Job::Memory), PLAN);
    let mut first = 0;
    for (tensor, item) in items.iter().enumerate() {
        // A tensor that was grouped with those before.
        if tensor < first {
            continue;
        }
        let alone = match &item.origin {
            Origin::Deferred(_) => Job::Deferred(tensor),
            Origin::Device(bytes) if bytes.memory.size() > staging => Job::Device(tensor),
            Origin::Device(_) => Job::DeviceGroup(tensor..group_end(items, tensor, staging)),
            Origin::Bytes(_) if in_turns > 1 && item.entry.data_len >= TURN_LEN => {
                jobs.then(in_memory(first..tensor)?)?;
                jobs.begin(in_memory(tensor..tensor + 1)?)?;
                first = tensor + 1;
                continue;
            }
            Origin::Bytes(_) | Origin::Meta => continue,
        };
        jobs.then(in_memory(first..tensor)?)?;
        first = if let Job::DeviceGroup(group) = &alone { group.end } else { tensor + 1 };
        push(&mut jobs.jobs, alone, PLAN)?;
    }
    jobs.then(in_memory(first..items.len())?)?;
    jobs.take_turns()?;
    Ok(jobs.jobs)
}

const LIMITS: Limits = Limits {
    len: BATCH_LEN,
    tapers: false,
    merge_gap: 0,
    segments: crate::sys::MAX_VECTORS,
    unit: PIECE_LEN,
    apart: u64::MAX,
    block: 1,
    passing: u64::MAX,
};

/// The data of neighbours in the file, in batches of so many bytes at most.
pub fn batches(items: &[Item<'_>], tensors: Range<usize>, len: u64) -> Result<Vec<Vec<Span>>> {
    let first = tensors.start;
    let run = items.get(tensors).unwrap_or(&[]).iter();
    let extents = run.map(|item| Extent {
        file: 0,
        header_offset: item.entry.header_offset,
        data_offset: item.entry.data_offset,
        data_len: item.entry.data_len,
    });
    let extents = listed(extents, PLAN)?;
    let batches = partition(&extents, &Limits { len, unit: len.min(PIECE_LEN), ..LIMITS })?;
    collected(batches.iter().map(|batch| spans(batch, &extents, first)), PLAN)
}

fn spans(batch: &Batch, extents: &[Extent], first: usize) -> Result<Vec<Span>> {
    let empty = |tensor: usize| extents.get(tensor).is_some_and(|extent| extent.data_len == 0);
    let spans = batch.segments.iter().filter_map(|segment| match segment.kind {
        SegmentKind::Data { tensor, start } => {
            Some(Span { tensor: first + tensor, start, len: segment.len })
        }
        SegmentKind::Header { tensor } if empty(tensor) => {
            Some(Span { tensor: first + tensor, start: 0, len: 0 })
        }
        SegmentKind::Header { .. } | SegmentKind::Gap => None,
    });
    listed(spans, PLAN)
}

/// Where the tensors end that are downloaded together with one that fits into a staging buffer:
/// neighbours in the file, on the same device.
fn group_end(items: &[Item<'_>], first: usize, staging: usize) -> usize {
    let mut used = 0usize;
    let mut end: Option<(u64, &str)> = None;
    let mut count = 0;
    for item in items.iter().skip(first).take(MOST) {
        let Origin::Device(bytes) = &item.origin else { break };
        let name = bytes.device.name();
        used += bytes.memory.size().next_multiple_of(crate::mem::ALIGNMENT);
        if end.is_some_and(|end| end != (item.entry.header_offset, name) || used > staging) {
            break;
        }
        end = Some((item.entry.end(), name));
        count += 1;
    }
    first + count
}

struct Turns {
    in_turns: usize,
    /// The batches of tensors that take turns.
    begun: Vec<VecDeque<Job>>,
    jobs: Vec<Job>,
}

impl Turns {
    fn then(&mut self, jobs: Vec<Job>) -> Result<()> {
        more_room(&mut self.jobs, jobs.len(), PLAN)?;
        self.jobs.extend(jobs);
        Ok(())
    }

    fn begin(&mut self, tensor: Vec<Job>) -> Result<()> {
        self.begun.push(tensor.into());
        if self.begun.len() == self.in_turns { self.take_turns() } else { Ok(()) }
    }

    fn take_turns(&mut self) -> Result<()> {
        while !self.begun.is_empty() {
            more_room(&mut self.jobs, self.begun.len(), PLAN)?;
            self.jobs.extend(self.begun.iter_mut().filter_map(VecDeque::pop_front));
            self.begun.retain(|tensor| !tensor.is_empty());
        }
        Ok(())
    }
}
