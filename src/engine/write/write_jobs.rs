//! The jobs of a save, each of them done by one thread, and their order.

use std::collections::VecDeque;
use std::ops::Range;

use super::tensor_data::TensorData;
use super::write_tensor::WriteTensor;
use crate::codec::crypt::PIECE_LEN;
use crate::engine::plan::{Batch, BatchLimits, Extent, SegmentKind, partition};

use crate::numbers::ExtentNumber;

/// Bytes of one write: long enough for a disk to stream, and short enough to stay in the CPU cache.
pub const BATCH_LEN: u64 = 4 << 20;
/// Bytes of one write of an upload, which is a copy into a part of the multipart upload. Long
/// enough that taking the next job costs little in comparison.
pub const UPLOAD_BATCH_LEN: u64 = 512 << 10;
/// SHA-256 must see a tensor front to back. The batches of tensors of at least this length are
/// interleaved, so that several tensors are hashed at once.
const INTERLEAVE_LEN: u64 = 16 << 20;
/// Maximum number of tensors of a device that are written together. Each has a header and data, and
/// the number of buffers of one system call is limited.
const MAX_GROUP: usize = crate::sys::MAX_VECTORS / 2;

/// A part of the data of one tensor. A tensor without data has one range, of no bytes.
pub struct DataRange {
    /// Index of the tensor.
    pub tensor: usize,
    /// Position within the data.
    pub start: u64,
    /// Number of bytes.
    pub len: u64,
}

pub enum WriteJob {
    /// Data in memory that are written together.
    Memory(Vec<DataRange>),
    /// A tensor that must first be copied into memory, by itself.
    Deferred(usize),
    /// A tensor on a device that does not fit into a staging buffer.
    Device(usize),
    /// Tensors on a device that fit into one staging buffer together.
    DeviceGroup(Range<usize>),
}

/// Cuts adjacent tensors in memory into batches of at most `batch_len` bytes; other tensors become
/// jobs of their own.
///
/// Jobs are in file order, except that up to `max_interleaved` large tensors are interleaved; the
/// batches of each tensor stay in order. `staging`: bytes of a device's staging buffer.
pub fn plan_jobs(
    items: &[WriteTensor<'_>],
    max_interleaved: usize,
    staging: usize,
    batch_len: u64,
) -> Vec<WriteJob> {
    let (mut jobs, mut interleaved) = (Vec::new(), Vec::new());
    let in_memory = |tensors| batches(items, tensors, batch_len).into_iter().map(WriteJob::Memory);
    let mut first = 0;
    for (tensor, item) in items.iter().enumerate() {
        // Already in a group with tensors before it.
        if tensor < first {
            continue;
        }
        let alone = match &item.data {
            TensorData::Deferred(_) => WriteJob::Deferred(tensor),
            TensorData::Device(bytes) if bytes.memory.size() > staging => WriteJob::Device(tensor),
            TensorData::Device(_) => {
                WriteJob::DeviceGroup(tensor..group_end(items, tensor, staging))
            }
            TensorData::Bytes(_)
                if max_interleaved > 1 && item.entry.data_len >= INTERLEAVE_LEN =>
            {
                jobs.extend(in_memory(first..tensor));
                interleaved.push(in_memory(tensor..tensor + 1).collect());
                if interleaved.len() == max_interleaved {
                    jobs.extend(interleave(std::mem::take(&mut interleaved)));
                }
                first = tensor + 1;
                continue;
            }
            TensorData::Bytes(_) | TensorData::Meta => continue,
        };
        jobs.extend(in_memory(first..tensor));
        first = if let WriteJob::DeviceGroup(group) = &alone { group.end } else { tensor + 1 };
        jobs.push(alone);
    }
    jobs.extend(in_memory(first..items.len()));
    jobs.extend(interleave(interleaved));
    jobs
}

const LIMITS: BatchLimits = BatchLimits {
    len: BATCH_LEN,
    tapers: false,
    merge_gap: 0,
    segments: crate::sys::MAX_VECTORS,
    unit: PIECE_LEN,
    separate_len: u64::MAX,
    block: 1,
    overhead: u64::MAX,
};

/// Cuts the data of tensors that are adjacent in the file into batches of at most `len` bytes.
pub fn batches(items: &[WriteTensor<'_>], tensors: Range<usize>, len: u64) -> Vec<Vec<DataRange>> {
    let first = tensors.start;
    let adjacent = items.get(tensors).unwrap_or(&[]).iter();
    let extents = adjacent.map(|item| Extent {
        file: 0,
        header_offset: item.entry.header_offset,
        data_offset: item.entry.data_offset,
        data_len: item.entry.data_len,
    });
    let extents = extents.collect::<Vec<_>>();
    let batches = partition(&extents, &BatchLimits { len, unit: len.min(PIECE_LEN), ..LIMITS });
    batches.iter().map(|batch| data_ranges(batch, &extents, first)).collect()
}

fn data_ranges(batch: &Batch, extents: &[Extent], first: usize) -> Vec<DataRange> {
    let empty = |extent: ExtentNumber| extent.of(extents).is_ok_and(|of| of.data_len == 0);
    let ranges = batch.segments.iter().filter_map(|segment| match segment.kind {
        SegmentKind::Data { extent, start } => {
            Some(DataRange { tensor: first + extent.0, start, len: segment.len })
        }
        SegmentKind::Header { extent } if empty(extent) => {
            Some(DataRange { tensor: first + extent.0, start: 0, len: 0 })
        }
        SegmentKind::Header { .. } | SegmentKind::Gap => None,
    });
    ranges.collect()
}

/// Returns the end of the group of tensors, from `first` on, that are downloaded together into one
/// staging buffer. They are adjacent in the file, and on the same device.
fn group_end(items: &[WriteTensor<'_>], first: usize, staging: usize) -> usize {
    let mut used = 0usize;
    let mut end: Option<(u64, &str)> = None;
    let mut count = 0;
    for item in items.iter().skip(first).take(MAX_GROUP) {
        let TensorData::Device(bytes) = &item.data else { break };
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

/// Returns the batches of several tensors by turns.
fn interleave(mut tensors: Vec<VecDeque<WriteJob>>) -> Vec<WriteJob> {
    let mut jobs = Vec::new();
    while !tensors.is_empty() {
        jobs.extend(tensors.iter_mut().filter_map(VecDeque::pop_front));
        tensors.retain(|tensor| !tensor.is_empty());
    }
    jobs
}
