//! A destination for plans of which some bytes are not wanted: batches of these are read to scratch
//! memory, decrypted and hashed there, and the wanted bytes are copied to the destination behind it.
//!
//! So are slices whose contiguous ranges are short, or that are decrypted or hashed together with
//! other bytes.

use std::cell::RefCell;
use std::ops::Range;
use std::sync::Arc;

use super::scratch::{Scratch, ScratchBytes, ScratchPool};
use super::{BatchMemory, CommittedBatch, Destination, Facts, Fit, Idle, ReadFacts, SegmentBytes};
use crate::cancel::Cancel;
use crate::codec::crypt::PIECE_LEN;
use crate::engine::plan::{Batch, BatchLimits, Extent, Place, ReadPlan, Segment, SegmentKind};
use crate::error::{Error, Result};
use crate::mem::{Buffers, SliceRemainder};
use crate::numbers::{ExtentNumber, TensorNumber};
use crate::sys::to_usize;

/// Maximum bytes of a batch; each reader has one batch in memory.
const MAX_BATCH_LEN: u64 = 16 << 20;
/// The smallest value of that maximum, in bytes.
const MIN_BATCH_LEN: u64 = 1 << 20;
/// A batch may be this many times as long as planned.
const MAX_OVERSHOOT: u64 = 2;
/// Bytes of one tensor that may wait in scratch memory for their hash before readers prefer other
/// tensors.
const MAX_UNHASHED: u64 = 64 << 20;

/// Returns the minimum memory that a reader needs for its batch.
pub fn min_memory(decrypts: bool) -> u64 {
    MAX_OVERSHOOT * if decrypts { PIECE_LEN } else { MIN_BATCH_LEN }
}

/// A destination, with scratch memory before it.
pub struct Gather<'p, D> {
    plan: &'p ReadPlan<'p>,
    to: D,
    scratch: Arc<ScratchPool>,
    /// Maximum bytes that are copied at once.
    copy_len: u64,
}

impl<'p, D> Gather<'p, D> {
    /// Puts scratch memory before a destination.
    pub fn new(plan: &'p ReadPlan<'p>, to: D) -> Self {
        Gather { plan, to, scratch: Arc::default(), copy_len: u64::MAX }
    }

    /// Returns the destination.
    pub fn into_inner(self) -> D {
        self.to
    }

    /// True if a batch is read to scratch memory.
    pub fn is_gathered(&self, batch: &Batch) -> bool {
        let first = batch.segments.iter().find_map(Segment::extent);
        first.is_some_and(|extent| self.plan.use_of(extent).is_ok_and(|of| of.gathered))
    }

    /// Returns the wanted ranges of a batch.
    fn wanted(&self, batch: &Batch) -> Result<Vec<WantedRange>> {
        let (mut wanted, mut at) = (Vec::new(), 0);
        for segment in &batch.segments {
            if let SegmentKind::Data { extent, start } = segment.kind {
                let of = self.plan.use_of(extent)?;
                let from = of.start + start;
                for tensor in of.each_tensor() {
                    let start = self.plan.place(tensor, from).offset;
                    let len = self.plan.place(tensor, from + segment.len).offset - start;
                    if len > 0 {
                        let range = from..from + segment.len;
                        wanted.push(WantedRange { extent, tensor, start, len, at, range });
                    }
                }
            }
            at += segment.len;
        }
        Ok(wanted)
    }
}

/// Bytes of one tensor that are wanted from a batch.
pub struct WantedRange {
    extent: ExtentNumber,
    tensor: TensorNumber,
    /// Their position in the tensor's memory.
    start: u64,
    len: u64,
    /// Position in the batch of the byte at `range.start` of the tensor's data.
    at: u64,
    /// The range of the tensor's data that is in the batch.
    range: Range<u64>,
}

impl WantedRange {
    /// Returns the bytes, in rising order.
    fn bytes<'b>(
        &self,
        plan: &ReadPlan<'b>,
        batch: &'b [u8],
    ) -> impl Iterator<Item = Result<&'b [u8]>> {
        let whole = || (self.range.start, self.range.end - self.range.start);
        let ranges = plan.ranges_of(self.tensor);
        let parts = ranges.into_iter().flat_map(|ranges| ranges.within(&self.range));
        parts.chain(ranges.is_none().then(whole)).map(|(position, len)| {
            let from = to_usize(self.at + position - self.range.start);
            let bytes = batch.get(from..).and_then(|bytes| bytes.get(..to_usize(len)));
            bytes.ok_or_else(|| Error::Bug("a contiguous range beyond its batch".to_owned()))
        })
    }
}

/// The plan of a batch.
pub enum GatherPlan<P> {
    /// It goes straight to the destination.
    Straight(P),
    /// Its wanted bytes are copied: the ranges, and the batches in which they reach the destination.
    Copied(Vec<WantedRange>, Vec<(Batch, P)>),
}

impl<D: Destination> Gather<'_, D> {
    /// Plans the copies of wanted ranges.
    fn plan_copies(&mut self, wanted: &[WantedRange]) -> Result<Vec<(Batch, D::BatchPlan)>> {
        let mut copies = Vec::new();
        let mut open = (Vec::new(), 0);
        for &WantedRange { extent, tensor, start, len, .. } in wanted {
            let mut done = 0;
            while done < len {
                let now = (len - done).min(self.copy_len - open.1);
                let offset = start + done;
                open.0.push(Segment {
                    kind: SegmentKind::Data { extent, start: offset },
                    len: now,
                    place: Some(Place { tensor, offset }),
                });
                open.1 += now;
                done += now;
                if open.1 == self.copy_len {
                    copies.push(std::mem::take(&mut open));
                }
            }
        }
        copies.extend(Some(open).filter(|(segments, _)| !segments.is_empty()));
        let copies = copies.into_iter().map(|(segments, _)| {
            // They are in no file.
            let batch = Batch { file: usize::MAX, offset: 0, segments };
            let planned = self.to.plan(&batch)?;
            Ok((batch, planned))
        });
        copies.collect()
    }
}

impl<D: Destination> Destination for Gather<'_, D> {
    type BatchPlan = GatherPlan<D::BatchPlan>;
    type Ticket = Option<D::Ticket>;
    type Lease = GatherBatch<D::Lease, D::BatchPlan>;
    type Bytes = GatheredBytes<D::Bytes>;

    fn facts(&self) -> Facts {
        self.to.facts()
    }

    fn present(&self, extents: &[Extent]) -> u64 {
        self.to.present(extents)
    }

    fn fit(&mut self, read: &ReadFacts<'_>) -> Result<Fit> {
        let fit = self.to.fit(read)?;
        if !self.plan.gathers() {
            return Ok(fit);
        }
        self.copy_len = fit.limits.len.max(1);
        let len = fit.limits.len.min(fit.gather_bytes / MAX_OVERSHOOT).min(MAX_BATCH_LEN);
        let any_order = read.source.max_readers > 1 && !read.source.has_long_requests();
        let max_unhashed = fit.max_unhashed.or(any_order.then_some(MAX_UNHASHED));
        Ok(Fit { limits: BatchLimits { len, ..fit.limits }, max_unhashed, ..fit })
    }

    fn plan(&mut self, batch: &Batch) -> Result<Self::BatchPlan> {
        if !self.is_gathered(batch) {
            return Ok(GatherPlan::Straight(self.to.plan(batch)?));
        }
        let wanted = self.wanted(batch)?;
        let copies = self.plan_copies(&wanted)?;
        Ok(GatherPlan::Copied(wanted, copies))
    }

    fn full_devices(&self) -> Vec<bool> {
        self.to.full_devices()
    }

    fn enqueue(&self, batch: &Batch) -> Result<Self::Ticket> {
        // Scratch memory does not run out: its copies take a position once the batch was read.
        if self.is_gathered(batch) { Ok(None) } else { self.to.enqueue(batch).map(Some) }
    }

    fn acquire(
        &self,
        ticket: Self::Ticket,
        batch: Batch,
        planned: Self::BatchPlan,
        idle: Idle<'_>,
        cancel: &dyn Cancel,
    ) -> Result<Self::Lease> {
        match (planned, ticket) {
            (GatherPlan::Straight(planned), Some(ticket)) => {
                self.to.acquire(ticket, batch, planned, idle, cancel).map(GatherBatch::Straight)
            }
            (GatherPlan::Copied(wanted, copies), _) => {
                let scratch = self.scratch.acquire(batch.offset, to_usize(batch.len()))?;
                Ok(GatherBatch::Copied { segments: batch.segments, scratch, wanted, copies })
            }
            (GatherPlan::Straight(_), None) => Err(Error::Bug("a batch without ticket".to_owned())),
        }
    }

    fn commit(
        &self,
        lease: Self::Lease,
        keep: bool,
        idle: Idle<'_>,
        cancel: &dyn Cancel,
    ) -> Result<CommittedBatch<Self::Bytes>> {
        let (segments, scratch, wanted, copies) = match lease {
            GatherBatch::Straight(lease) => {
                let CommittedBatch { bytes, copy_events } =
                    self.to.commit(lease, keep, idle, cancel)?;
                let bytes = bytes.into_iter().map(GatheredBytes::Straight).collect();
                return Ok(CommittedBatch { bytes, copy_events });
            }
            GatherBatch::Copied { segments, scratch, wanted, copies } => {
                (segments, scratch, wanted, copies)
            }
        };
        let mut ranges = wanted.iter().flat_map(|range| range.bytes(self.plan, scratch.bytes()));
        let mut rest: &[u8] = &[];
        let mut copy_events = Vec::new();
        for (batch, planned) in copies {
            let ticket = self.to.enqueue(&batch)?;
            let mut lease = self.to.acquire(ticket, batch, planned, idle, cancel)?;
            let copied = RefCell::new((&mut rest, &mut ranges));
            lease.fill(&|_, buffers| {
                let (rest, ranges) = &mut *copied.borrow_mut();
                while buffers.remaining() > 0 {
                    let done = buffers.fill_from(rest);
                    **rest = rest.get(done..).unwrap_or(&[]);
                    if rest.is_empty() && buffers.remaining() > 0 {
                        let none = || Error::Bug("fewer bytes than are wanted".to_owned());
                        **rest = ranges.next().ok_or_else(none)??;
                    }
                }
                Ok(())
            })?;
            let done = self.to.commit(lease, false, idle, cancel)?;
            copy_events.extend(done.copy_events);
        }
        drop(ranges);
        let scratch = Arc::new(scratch);
        let mut end = 0;
        let bytes = segments.iter().filter(|_| keep).map(|segment| {
            let range = end..end + to_usize(segment.len);
            end = range.end;
            GatheredBytes::Copied(ScratchBytes { scratch: Arc::clone(&scratch), range })
        });
        Ok(CommittedBatch { bytes: bytes.collect(), copy_events })
    }
}

/// Bytes that have arrived.
pub enum GatheredBytes<B> {
    /// In memory of the destination.
    Straight(B),
    /// In scratch memory.
    Copied(ScratchBytes),
}

impl<B: AsRef<[u8]>> AsRef<[u8]> for GatheredBytes<B> {
    fn as_ref(&self) -> &[u8] {
        match self {
            GatheredBytes::Straight(bytes) => bytes.as_ref(),
            GatheredBytes::Copied(bytes) => bytes.as_ref(),
        }
    }
}

/// Memory for one batch.
pub enum GatherBatch<L, P> {
    /// Memory of the destination.
    Straight(L),
    /// Scratch memory, with the ranges that are copied from it and the batches in which they reach
    /// the destination.
    Copied {
        /// The segments of the batch.
        segments: Vec<Segment>,
        /// Its bytes.
        scratch: Scratch,
        /// The ranges.
        wanted: Vec<WantedRange>,
        /// The batches.
        copies: Vec<(Batch, P)>,
    },
}

impl<L: BatchMemory, P> BatchMemory for GatherBatch<L, P> {
    fn fill(&mut self, read: &dyn Fn(u64, &mut Buffers<'_>) -> Result<()>) -> Result<()> {
        match self {
            GatherBatch::Straight(lease) => lease.fill(read),
            GatherBatch::Copied { scratch, .. } => {
                read(0, &mut Buffers::from_slice(scratch.bytes_mut()))
            }
        }
    }

    fn chunks(&mut self) -> Result<Vec<SegmentBytes<'_>>> {
        let (segments, scratch) = match self {
            GatherBatch::Straight(lease) => return lease.chunks(),
            GatherBatch::Copied { segments, scratch, .. } => (segments, scratch),
        };
        let mut rest = SliceRemainder::new(scratch.bytes_mut());
        let chunk = |segment: &Segment| {
            Ok(SegmentBytes { kind: segment.kind, bytes: rest.next(to_usize(segment.len))? })
        };
        segments.iter().map(chunk).collect()
    }
}
