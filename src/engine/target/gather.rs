//! Gathers slices in host memory: whole batches are read, and the wanted bytes are copied out.
//!
//! For slices whose contiguous ranges are short, or that must be decrypted together with adjacent
//! bytes.

use std::mem::MaybeUninit;
use std::ops::Range;

use super::scratch::{Scratch, ScratchPool};
use super::{Chunk, Committed, Lease, Target, batches_of};
use crate::cancel::Cancel;
use crate::codec::crypt::PIECE_LEN;
use crate::engine::plan::{Batch, Limits, Runs, Segment, SegmentKind};
use crate::engine::workers::WorkerRange;
use crate::error::{Error, Result};
use crate::io::Capabilities;
use crate::mem::Buffers;
use crate::memory_limit::{LoadNeeds, LoadShares};

/// Maximum bytes of a batch; each reader has one batch in memory.
pub const MOST: u64 = 16 << 20;
/// The smallest value of that maximum, in bytes.
const LEAST: u64 = 1 << 20;

/// A batch may be this many times as long as planned.
const LONGER: u64 = 2;

/// Returns the minimum memory that a reader needs for its batch.
pub fn least(decrypts: bool) -> u64 {
    LONGER * if decrypts { PIECE_LEN } else { LEAST }
}

/// Returns the maximum bytes of a batch under a memory limit.
pub fn most(shares: &LoadShares) -> u64 {
    (shares.gathers / LONGER).min(MOST)
}

/// A range of a tensor that is read for the runs in it. The engine treats it as a tensor of its
/// own.
pub struct Span<'a> {
    /// Position of its first byte in the tensor.
    pub start: u64,
    /// The wanted contiguous ranges of the tensor.
    pub runs: &'a Runs,
    /// Memory for the wanted bytes that are not planned yet.
    pub to: &'a mut [MaybeUninit<u8>],
}

/// Memory of slices, as a target.
pub struct Gather<'a> {
    spans: Vec<Span<'a>>,
    scratch: ScratchPool,
    /// Maximum bytes of a batch.
    most: u64,
}

impl<'a> Gather<'a> {
    /// Creates the target for spans, in the order of the engine's tensor numbers.
    pub fn new(spans: Vec<Span<'a>>) -> Self {
        Gather { spans, scratch: ScratchPool::default(), most: MOST }
    }
}

/// A range of a tensor in a batch, of which some bytes are wanted.
pub struct Part<'a> {
    /// Position in the batch of the byte at `range.start` of the tensor.
    pub at: u64,
    /// The range.
    pub range: Range<u64>,
    /// The wanted contiguous ranges of the tensor.
    pub runs: &'a Runs,
}

impl Part<'_> {
    /// Returns the wanted bytes of the batch, in rising order.
    pub fn of<'b>(&self, batch: &'b [u8]) -> impl Iterator<Item = Result<&'b [u8]>> {
        self.runs.within(&self.range).map(|(position, len)| {
            let bug = || Error::Bug("a run beyond its batch".to_owned());
            let from = usize::try_from(self.at + position - self.range.start).map_err(|_| bug())?;
            let len = usize::try_from(len).map_err(|_| bug())?;
            batch.get(from..).and_then(|bytes| bytes.get(..len)).ok_or_else(bug)
        })
    }
}

/// Wanted bytes of a batch, and the memory that they are copied to.
pub struct Wanted<'a> {
    part: Part<'a>,
    to: &'a mut [MaybeUninit<u8>],
}

impl<'a> Target for Gather<'a> {
    type Job = Vec<Wanted<'a>>;
    type Turn<'t>
        = ()
    where
        Self: 't;
    type Lease<'t>
        = Gathered<'a>
    where
        Self: 't;
    type Bytes = &'static [u8];

    fn limits(
        &self,
        source: &Capabilities,
        readers: WorkerRange,
        total: u64,
        decrypts: bool,
    ) -> Limits {
        let even = total.div_ceil(readers.most.max(1) as u64).max(LEAST);
        batches_of(even.min(source.request_len).min(self.most), source, decrypts)
    }

    fn needs(&self, source: &Capabilities, readers: usize, decrypts: bool) -> LoadNeeds {
        let gathers = least(decrypts);
        LoadNeeds { readers, reader: source.reader_memory, gathers, staging: None }
    }

    fn bound(&mut self, shares: &LoadShares) {
        self.most = most(shares);
    }

    fn unit(&self) -> u64 {
        u64::MAX
    }

    fn plan(&mut self, batch: &Batch) -> Result<Vec<Wanted<'a>>> {
        let bug = || Error::Bug("a span without memory".to_owned());
        let mut wanted = Vec::new();
        let mut at = 0;
        for segment in &batch.segments {
            if let SegmentKind::Data { tensor, start } = segment.kind {
                let Span { start: first, runs, to } = self.spans.get_mut(tensor).ok_or_else(bug)?;
                let from = *first + start;
                let range = from..from + segment.len;
                let len = runs.before(range.end) - runs.before(range.start);
                let len = usize::try_from(len).map_err(|_| bug())?;
                let (now, later) = std::mem::take(to).split_at_mut_checked(len).ok_or_else(bug)?;
                *to = later;
                wanted.push(Wanted { part: Part { at, range, runs }, to: now });
            }
            at += segment.len;
        }
        Ok(wanted)
    }

    fn enter(&self, _batch: &Batch) -> Result<()> {
        Ok(())
    }

    fn acquire<'t>(
        &'t self,
        _turn: (),
        batch: Batch,
        wanted: Vec<Wanted<'a>>,
        _idle: &dyn Fn() -> Result<bool>,
        _cancel: &dyn Cancel,
    ) -> Result<Gathered<'a>> {
        let bug = |_| Error::Bug("a batch beyond memory".to_owned());
        let len = usize::try_from(batch.len()).map_err(bug)?;
        let scratch = self.scratch.take(batch.offset, len)?;
        Ok(Gathered { segments: batch.segments, wanted, scratch })
    }

    fn commit(
        &self,
        mut lease: Gathered<'a>,
        _keep: bool,
        _cancel: &dyn Cancel,
    ) -> Result<Committed<&'static [u8]>> {
        let bug = || Error::Bug("a run beyond its memory".to_owned());
        let all = lease.scratch.bytes();
        for Wanted { part, to } in lease.wanted {
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
        self.scratch.give_back(lease.scratch);
        Ok(Committed::in_host(Vec::new()))
    }
}

/// Memory for one batch.
pub struct Gathered<'a> {
    segments: Vec<Segment>,
    wanted: Vec<Wanted<'a>>,
    scratch: Scratch,
}

impl Lease for Gathered<'_> {
    fn fill(&mut self, read: &dyn Fn(u64, &mut Buffers<'_>) -> Result<()>) -> Result<()> {
        read(0, &mut Buffers::from_slice(self.scratch.bytes()))
    }

    fn chunks(&mut self) -> Result<Vec<Chunk<'_>>> {
        let mut rest = self.scratch.bytes();
        let mut chunks = Vec::with_capacity(self.segments.len());
        for segment in &self.segments {
            let len = usize::try_from(segment.len).unwrap_or(usize::MAX);
            let cut = std::mem::take(&mut rest).split_at_mut_checked(len);
            let (bytes, later) = cut.ok_or_else(|| Error::Bug("a short batch".to_owned()))?;
            rest = later;
            chunks.push(Chunk { kind: segment.kind, bytes });
        }
        Ok(chunks)
    }
}
