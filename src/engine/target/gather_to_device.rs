//! Gathers slices in staging buffers on their way to a device, for slices whose contiguous ranges
//! are short.

use super::device::{Buffered, Kept, ToDevice};
use super::gather::{self, Part};
use super::scratch::{Scratch, ScratchPool};
use super::{Chunk, Committed, Lease, Target};
use crate::cancel::Cancel;
use crate::engine::plan::{Batch, Limits, PLAN, Runs, Segment, SegmentKind};
use crate::engine::workers::WorkerRange;
use crate::error::{Error, Result};
use crate::fallible::push;
use crate::io::Capabilities;
use crate::mem::Buffers;
use crate::mem::pinned::QueueTicket;
use crate::memory_limit::{LoadNeeds, LoadShares};

/// A range of a tensor that is read for a slice of it. The engine treats it as a tensor of its own.
#[derive(Clone, Copy)]
pub struct DeviceSpan<'a> {
    /// Position of its first byte in the tensor.
    pub start: u64,
    /// The contiguous ranges of the slice.
    pub runs: &'a Runs,
}

/// Device memory as a target for slices, whose contiguous ranges are copied without the bytes
/// between them.
pub struct GatherToDevice<'d> {
    to: ToDevice<'d>,
    spans: &'d [DeviceSpan<'d>],
    scratch: ScratchPool,
    /// Maximum bytes of a batch.
    most: u64,
}

impl<'d> GatherToDevice<'d> {
    /// Creates the target for spans, in the order of the engine's tensor numbers. The locations of
    /// `to` are those of their slices.
    pub fn new(to: ToDevice<'d>, spans: &'d [DeviceSpan<'d>]) -> Self {
        GatherToDevice { to, spans, scratch: ScratchPool::default(), most: gather::MOST }
    }
}

impl<'d> Target for GatherToDevice<'d> {
    type Job = ();
    type Turn<'t>
        = QueueTicket<'d>
    where
        Self: 't;
    type Lease<'t>
        = Gathered<'d>
    where
        Self: 't;
    type Bytes = Kept<'d>;

    /// The limits of `to` suit here too: the wanted bytes of a batch are no more than the batch,
    /// and so fit into its staging buffers.
    fn limits(
        &self,
        source: &Capabilities,
        readers: WorkerRange,
        total: u64,
        decrypts: bool,
    ) -> Limits {
        let limits = self.to.limits(source, readers, total, decrypts);
        Limits { len: limits.len.min(self.most), ..limits }
    }

    fn needs(&self, source: &Capabilities, readers: usize, decrypts: bool) -> LoadNeeds {
        let gathers = gather::least(decrypts);
        LoadNeeds { gathers, ..self.to.needs(source, readers, decrypts) }
    }

    fn bound(&mut self, shares: &LoadShares) {
        self.to.bound(shares);
        self.most = gather::most(shares);
    }

    fn expect(&mut self, total: u64) {
        self.to.expect(total);
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

    fn node(&self, device: usize) -> Option<usize> {
        self.to.node(device)
    }

    fn enter(&self, batch: &Batch) -> Result<QueueTicket<'d>> {
        self.to.enter(batch)
    }

    fn acquire<'t>(
        &'t self,
        turn: QueueTicket<'d>,
        batch: Batch,
        (): (),
        idle: &dyn Fn() -> Result<bool>,
        cancel: &dyn Cancel,
    ) -> Result<Gathered<'d>> {
        let bug = || Error::Bug("a span of no slice".to_owned());
        let (mut parts, mut gathered, mut at) = (Vec::new(), Vec::new(), 0);
        for segment in &batch.segments {
            if let SegmentKind::Data { tensor, start } = segment.kind {
                let DeviceSpan { start: first, runs } = *self.spans.get(tensor).ok_or_else(bug)?;
                let range = first + start..first + start + segment.len;
                let start = runs.before(range.start);
                let len = runs.before(range.end) - start;
                if len > 0 {
                    let kind = SegmentKind::Data { tensor, start };
                    push(&mut gathered, Segment { kind, len }, PLAN)?;
                    push(&mut parts, Part { at, range, runs }, PLAN)?;
                }
            }
            at += segment.len;
        }
        let len = usize::try_from(at).map_err(|_| bug())?;
        let wanted = Batch { file: batch.file, offset: 0, segments: gathered };
        let buffered = self.to.acquire(turn, wanted, (), idle, cancel)?;
        Ok(Gathered { parts, buffered, scratch: self.scratch.take(batch.offset, len)? })
    }

    fn commit(
        &self,
        lease: Gathered<'d>,
        keep: bool,
        cancel: &dyn Cancel,
    ) -> Result<Committed<Kept<'d>>> {
        self.scratch.give_back(lease.scratch);
        self.to.commit(lease.buffered, keep, cancel)
    }
}

/// Memory for one batch, and staging buffers for its wanted bytes.
pub struct Gathered<'d> {
    parts: Vec<Part<'d>>,
    buffered: Buffered<'d>,
    scratch: Scratch,
}

impl Lease for Gathered<'_> {
    fn fill(&mut self, read: &dyn Fn(u64, &mut Buffers<'_>) -> Result<()>) -> Result<()> {
        read(0, &mut Buffers::from_slice(self.scratch.bytes()))?;
        let bug = || Error::Bug("a slice beyond its staging buffers".to_owned());
        let bytes = self.scratch.bytes();
        let mut memory = self.buffered.memory()?.into_iter();
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
    fn chunks(&mut self) -> Result<Vec<Chunk<'_>>> {
        self.buffered.chunks()
    }
}
