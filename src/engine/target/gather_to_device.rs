//! Gathers slices in staging buffers on their way to a device, for slices whose contiguous ranges
//! are short.

use super::device::{DeviceTarget, StagedBatch, StagedBytes};
use super::gather::{self, SliceInBatch};
use super::scratch::{Scratch, ScratchPool};
use super::{BatchMemory, CommittedBatch, SegmentBytes, Target};
use crate::cancel::Cancel;
use crate::engine::plan::{Batch, BatchLimits, PLAN, Segment, SegmentKind, SliceRanges};
use crate::engine::workers::WorkerRange;
use crate::error::{Error, Result};
use crate::fallible::try_push;
use crate::io::Capabilities;
use crate::mem::Buffers;
use crate::mem::pinned::QueueTicket;
use crate::memory_limit::{LoadNeeds, LoadShares};

/// A range of a tensor that is read for a slice of it. The engine treats it as a tensor of its own.
#[derive(Clone, Copy)]
pub struct DeviceCoalescedRead<'a> {
    /// Position of its first byte in the tensor.
    pub start: u64,
    /// The contiguous ranges of the slice.
    pub ranges: &'a SliceRanges,
}

/// Device memory as a target for slices, whose contiguous ranges are copied without the bytes
/// between them.
pub struct DeviceGatherTarget<'d> {
    to: DeviceTarget<'d>,
    reads: &'d [DeviceCoalescedRead<'d>],
    scratch: ScratchPool,
    /// Maximum bytes of a batch.
    max_batch_len: u64,
}

impl<'d> DeviceGatherTarget<'d> {
    /// Creates the target for reads, in the order of the engine's tensor numbers. The locations of
    /// `to` are those of their slices.
    pub fn new(to: DeviceTarget<'d>, reads: &'d [DeviceCoalescedRead<'d>]) -> Self {
        DeviceGatherTarget {
            to,
            reads,
            scratch: ScratchPool::default(),
            max_batch_len: gather::MAX_BATCH_LEN,
        }
    }
}

impl<'d> Target for DeviceGatherTarget<'d> {
    type BatchPlan = ();
    type QueueTicket<'t>
        = QueueTicket<'d>
    where
        Self: 't;
    type Lease<'t>
        = DeviceGatherBatch<'d>
    where
        Self: 't;
    type Bytes = StagedBytes<'d>;

    /// The limits of `to` suit here too: the wanted bytes of a batch are no more than the batch,
    /// and so fit into its staging buffers.
    fn limits(
        &self,
        source: &Capabilities,
        readers: WorkerRange,
        total: u64,
        decrypts: bool,
    ) -> BatchLimits {
        let limits = self.to.limits(source, readers, total, decrypts);
        BatchLimits { len: limits.len.min(self.max_batch_len), ..limits }
    }

    fn needs(&self, source: &Capabilities, readers: usize, decrypts: bool) -> LoadNeeds {
        let gather_bytes = gather::min_memory(decrypts);
        LoadNeeds { gather_bytes, ..self.to.needs(source, readers, decrypts) }
    }

    fn limit_memory(&mut self, shares: &LoadShares) {
        self.to.limit_memory(shares);
        self.max_batch_len = gather::max_batch_len(shares);
    }

    fn expect_bytes(&mut self, total: u64) {
        self.to.expect_bytes(total);
    }

    fn unit(&self) -> u64 {
        u64::MAX
    }

    fn plan(&mut self, _batch: &Batch) -> Result<()> {
        Ok(())
    }

    fn devices(&self) -> usize {
        self.to.devices()
    }

    fn device_of(&self, tensor: usize) -> usize {
        self.to.device_of(tensor)
    }

    fn numa_node(&self, device: usize) -> Option<usize> {
        self.to.numa_node(device)
    }

    fn enqueue(&self, batch: &Batch) -> Result<QueueTicket<'d>> {
        self.to.enqueue(batch)
    }

    fn acquire<'t>(
        &'t self,
        ticket: QueueTicket<'d>,
        batch: Batch,
        (): (),
        idle: &dyn Fn() -> Result<bool>,
        cancel: &dyn Cancel,
    ) -> Result<DeviceGatherBatch<'d>> {
        let bug = || Error::Bug("a span of no slice".to_owned());
        let (mut parts, mut gathered, mut at) = (Vec::new(), Vec::new(), 0);
        for segment in &batch.segments {
            if let SegmentKind::Data { tensor, start } = segment.kind {
                let DeviceCoalescedRead { start: first, ranges } =
                    *self.reads.get(tensor).ok_or_else(bug)?;
                let range = first + start..first + start + segment.len;
                let start = ranges.before(range.start);
                let len = ranges.before(range.end) - start;
                if len > 0 {
                    let kind = SegmentKind::Data { tensor, start };
                    try_push(&mut gathered, Segment { kind, len }, PLAN)?;
                    try_push(&mut parts, SliceInBatch { at, range, ranges }, PLAN)?;
                }
            }
            at += segment.len;
        }
        let len = usize::try_from(at).map_err(|_| bug())?;
        let wanted = Batch { file: batch.file, offset: 0, segments: gathered };
        let staged = self.to.acquire(ticket, wanted, (), idle, cancel)?;
        Ok(DeviceGatherBatch { parts, staged, scratch: self.scratch.acquire(batch.offset, len)? })
    }

    fn commit(
        &self,
        lease: DeviceGatherBatch<'d>,
        keep: bool,
        cancel: &dyn Cancel,
    ) -> Result<CommittedBatch<StagedBytes<'d>>> {
        self.scratch.release(lease.scratch);
        self.to.commit(lease.staged, keep, cancel)
    }
}

/// Memory for one batch, and staging buffers for its wanted bytes.
pub struct DeviceGatherBatch<'d> {
    parts: Vec<SliceInBatch<'d>>,
    staged: StagedBatch<'d>,
    scratch: Scratch,
}

impl BatchMemory for DeviceGatherBatch<'_> {
    fn fill(&mut self, read: &dyn Fn(u64, &mut Buffers<'_>) -> Result<()>) -> Result<()> {
        read(0, &mut Buffers::from_slice(self.scratch.bytes()))?;
        let bug = || Error::Bug("a slice beyond its staging buffers".to_owned());
        let bytes = self.scratch.bytes();
        let mut memory = self.staged.memory()?.into_iter();
        let mut room: &mut [u8] = &mut [];
        for part in &self.parts {
            for found in part.of(bytes) {
                let mut wanted = found?;
                while !wanted.is_empty() {
                    if room.is_empty() {
                        room = memory.next().ok_or_else(bug)?;
                    }
                    let len = wanted.len().min(room.len());
                    let (now, later) = std::mem::take(&mut room).split_at_mut(len);
                    let (from, rest) = wanted.split_at(len);
                    now.copy_from_slice(from);
                    (room, wanted) = (later, rest);
                }
            }
        }
        Ok(())
    }

    /// Returns the wanted bytes; the others are in no chunk.
    fn chunks(&mut self) -> Result<Vec<SegmentBytes<'_>>> {
        self.staged.chunks()
    }
}
