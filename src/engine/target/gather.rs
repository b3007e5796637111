//! Gathers slices in host memory: whole batches are read, and the wanted bytes are copied out.
//!
//! For slices whose contiguous ranges are short, or that must be decrypted together with adjacent
//! bytes.

use std::mem::MaybeUninit;
use std::ops::Range;

use super::scratch::{Scratch, ScratchPool};
use super::{BatchMemory, CommittedBatch, SegmentBytes, Target, batch_limits};
use crate::cancel::Cancel;
use crate::codec::crypt::PIECE_LEN;
use crate::engine::plan::{Batch, BatchLimits, Segment, SegmentKind, SliceRanges};
use crate::engine::workers::WorkerRange;
use crate::error::{Error, Result};
use crate::io::Capabilities;
use crate::mem::Buffers;
use crate::memory_limit::{LoadNeeds, LoadShares};

/// Maximum bytes of a batch; each reader has one batch in memory.
pub const MAX_BATCH_LEN: u64 = 16 << 20;
/// The smallest value of that maximum, in bytes.
const MIN_BATCH_LEN: u64 = 1 << 20;

/// A batch may be this many times as long as planned.
const MAX_OVERSHOOT: u64 = 2;

/// Returns the minimum memory that a reader needs for its batch.
pub fn min_memory(decrypts: bool) -> u64 {
    MAX_OVERSHOOT * if decrypts { PIECE_LEN } else { MIN_BATCH_LEN }
}

/// Returns the maximum bytes of a batch under a memory limit.
pub fn max_batch_len(shares: &LoadShares) -> u64 {
    (shares.gather_bytes / MAX_OVERSHOOT).min(MAX_BATCH_LEN)
}

/// A range of a tensor that is read for the contiguous ranges in it. The engine treats it as a
/// tensor of its own.
pub struct CoalescedRead<'a> {
    /// Position of its first byte in the tensor.
    pub start: u64,
    /// The wanted contiguous ranges of the tensor.
    pub ranges: &'a SliceRanges,
    /// Memory for the wanted bytes that are not planned yet.
    pub to: &'a mut [MaybeUninit<u8>],
}

/// Memory of slices, as a target.
pub struct GatherTarget<'a> {
    reads: Vec<CoalescedRead<'a>>,
    scratch: ScratchPool,
    /// Maximum bytes of a batch.
    max_batch_len: u64,
}

impl<'a> GatherTarget<'a> {
    /// Creates the target for reads, in the order of the engine's tensor numbers.
    pub fn new(reads: Vec<CoalescedRead<'a>>) -> Self {
        GatherTarget { reads, scratch: ScratchPool::default(), max_batch_len: MAX_BATCH_LEN }
    }
}

/// A range of a tensor in a batch, of which some bytes are wanted.
pub struct SliceInBatch<'a> {
    /// Position in the batch of the byte at `range.start` of the tensor.
    pub at: u64,
    /// The range.
    pub range: Range<u64>,
    /// The wanted contiguous ranges of the tensor.
    pub ranges: &'a SliceRanges,
}

impl SliceInBatch<'_> {
    /// Returns the wanted bytes of the batch, in rising order.
    pub fn of<'b>(&self, batch: &'b [u8]) -> impl Iterator<Item = Result<&'b [u8]>> {
        self.ranges.within(&self.range).map(|(position, len)| {
            let bug = || Error::Bug("a contiguous range beyond its batch".to_owned());
            let from = usize::try_from(self.at + position - self.range.start).map_err(|_| bug())?;
            let len = usize::try_from(len).map_err(|_| bug())?;
            batch.get(from..).and_then(|bytes| bytes.get(..len)).ok_or_else(bug)
        })
    }
}

/// Wanted bytes of a batch, and the memory that they are copied to.
pub struct SliceCopy<'a> {
    part: SliceInBatch<'a>,
    to: &'a mut [MaybeUninit<u8>],
}

impl<'a> Target for GatherTarget<'a> {
    type BatchPlan = Vec<SliceCopy<'a>>;
    type QueueTicket<'t>
        = ()
    where
        Self: 't;
    type Lease<'t>
        = GatherBatch<'a>
    where
        Self: 't;
    type Bytes = &'static [u8];

    fn limits(
        &self,
        source: &Capabilities,
        readers: WorkerRange,
        total: u64,
        decrypts: bool,
    ) -> BatchLimits {
        let even = total.div_ceil(readers.max.max(1) as u64).max(MIN_BATCH_LEN);
        batch_limits(even.min(source.request_len).min(self.max_batch_len), source, decrypts)
    }

    fn needs(&self, source: &Capabilities, readers: usize, decrypts: bool) -> LoadNeeds {
        let gather_bytes = min_memory(decrypts);
        LoadNeeds { readers, reader_bytes: source.reader_memory, gather_bytes, staging: None }
    }

    fn limit_memory(&mut self, shares: &LoadShares) {
        self.max_batch_len = max_batch_len(shares);
    }

    fn unit(&self) -> u64 {
        u64::MAX
    }

    fn plan(&mut self, batch: &Batch) -> Result<Vec<SliceCopy<'a>>> {
        let bug = || Error::Bug("a coalesced read without memory".to_owned());
        let mut wanted = Vec::new();
        let mut at = 0;
        for segment in &batch.segments {
            if let SegmentKind::Data { tensor, start } = segment.kind {
                let CoalescedRead { start: first, ranges, to } =
                    self.reads.get_mut(tensor).ok_or_else(bug)?;
                let from = *first + start;
                let range = from..from + segment.len;
                let len = ranges.before(range.end) - ranges.before(range.start);
                let len = usize::try_from(len).map_err(|_| bug())?;
                let (now, later) = std::mem::take(to).split_at_mut_checked(len).ok_or_else(bug)?;
                *to = later;
                wanted.push(SliceCopy { part: SliceInBatch { at, range, ranges }, to: now });
            }
            at += segment.len;
        }
        Ok(wanted)
    }

    fn enqueue(&self, _batch: &Batch) -> Result<()> {
        Ok(())
    }

    fn acquire<'t>(
        &'t self,
        _turn: (),
        batch: Batch,
        wanted: Vec<SliceCopy<'a>>,
        _idle: &dyn Fn() -> Result<bool>,
        _cancel: &dyn Cancel,
    ) -> Result<GatherBatch<'a>> {
        let bug = |_| Error::Bug("a batch beyond memory".to_owned());
        let len = usize::try_from(batch.len()).map_err(bug)?;
        let scratch = self.scratch.acquire(batch.offset, len)?;
        Ok(GatherBatch { segments: batch.segments, wanted, scratch })
    }

    fn commit(
        &self,
        mut lease: GatherBatch<'a>,
        _keep: bool,
        _cancel: &dyn Cancel,
    ) -> Result<CommittedBatch<&'static [u8]>> {
        let bug = || Error::Bug("a contiguous range beyond its destination".to_owned());
        let all = lease.scratch.bytes();
        for SliceCopy { part, to } in lease.wanted {
            let mut rest = to;
            for bytes in part.of(all) {
                let bytes = bytes?;
                let cut = std::mem::take(&mut rest).split_at_mut_checked(bytes.len());
                let (now, later) = cut.ok_or_else(bug)?;
                for (slot, byte) in now.iter_mut().zip(bytes) {
                    slot.write(*byte);
                }
                rest = later;
            }
        }
        self.scratch.release(lease.scratch);
        Ok(CommittedBatch::in_host(Vec::new()))
    }
}

/// Memory for one batch.
pub struct GatherBatch<'a> {
    segments: Vec<Segment>,
    wanted: Vec<SliceCopy<'a>>,
    scratch: Scratch,
}

impl BatchMemory for GatherBatch<'_> {
    fn fill(&mut self, read: &dyn Fn(u64, &mut Buffers<'_>) -> Result<()>) -> Result<()> {
        read(0, &mut Buffers::from_slice(self.scratch.bytes()))
    }

    fn chunks(&mut self) -> Result<Vec<SegmentBytes<'_>>> {
        let mut rest = self.scratch.bytes();
        let mut chunks = Vec::with_capacity(self.segments.len());
        for segment in &self.segments {
            let len = usize::try_from(segment.len).unwrap_or(usize::MAX);
            let cut = std::mem::take(&mut rest).split_at_mut_checked(len);
            let (bytes, later) = cut.ok_or_else(|| Error::Bug("a short batch".to_owned()))?;
            rest = later;
            chunks.push(SegmentBytes { kind: segment.kind, bytes });
        }
        Ok(chunks)
    }
}
