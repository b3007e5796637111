//! Parts of what is read, brought together in host memory: of slices whose runs are short, or that
//! have to be decrypted with their neighbours.

use std::mem::MaybeUninit;
use std::ops::Range;
use std::sync::{Mutex, PoisonError};

use super::{Chunk, Committed, Lease, Target, batches_of};
use crate::cancel::Cancel;
use crate::codec::crypt::PIECE_LEN;
use crate::engine::plan::{Batch, Limits, Runs, Segment, SegmentKind};
use crate::engine::workers::WorkerRange;
use crate::error::{Error, Result};
use crate::fallible::zeroed;
use crate::io::Capabilities;
use crate::mem::Buffers;
use crate::memory_limit::{LoadNeeds, LoadShares};

/// The most bytes of a batch: each reader has one in memory.
const MOST: u64 = 16 << 20;
/// What its most is at least.
const LEAST: u64 = 1 << 20;

/// So many times its usual length a batch may have.
const LONGER: u64 = 2;

/// The least that a reader has in memory to gather from.
pub fn least(decrypts: bool) -> u64 {
    LONGER * if decrypts { PIECE_LEN } else { LEAST }
}

/// A range of a tensor that is read, for the runs in it. The engine knows it as a tensor.
pub struct Span<'a> {
    /// The tensor's position of its first byte.
    pub start: u64,
    /// The runs of the tensor.
    pub runs: &'a Runs,
    /// Memory for those in the range that were not planned yet.
    pub to: &'a mut [MaybeUninit<u8>],
}

/// Memory for slices.
pub struct Gather<'a> {
    spans: Vec<Span<'a>>,
    /// Memory of batches that were read.
    free: Mutex<Vec<Box<[u8]>>>,
    /// The most bytes of a batch.
    most: u64,
}

impl<'a> Gather<'a> {
    /// For spans, as the engine numbers them.
    pub fn new(spans: Vec<Span<'a>>) -> Self {
        Gather { spans, free: Mutex::default(), most: MOST }
    }
}

/// Bytes of a batch that are wanted.
pub struct Wanted<'a> {
    /// Position in the batch of the byte at `range.start` of the tensor.
    at: u64,
    range: Range<u64>,
    runs: &'a Runs,
    to: &'a mut [MaybeUninit<u8>],
}

impl<'a> Target for Gather<'a> {
    type Job = Vec<Wanted<'a>>;
    type Turn<'t>
        = ()
    where
        Self: 't;
    type Lease<'t>
        = Scratch<'a>
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
        self.most = (shares.gathers / LONGER).min(MOST);
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
                wanted.push(Wanted { at, range, runs, to: now });
            }
            at += segment.len;
        }
        Ok(wanted)
    }

    fn enter(&self) {}

    fn acquire<'t>(
        &'t self,
        _turn: (),
        batch: Batch,
        wanted: Vec<Wanted<'a>>,
        _idle: &dyn Fn() -> Result<bool>,
        _cancel: &dyn Cancel,
    ) -> Result<Scratch<'a>> {
        let bug = |_| Error::Bug("a batch beyond memory".to_owned());
        let len = usize::try_from(batch.len()).map_err(bug)?;
        let known = {
            let mut free = self.free.lock().unwrap_or_else(PoisonError::into_inner);
            let found = free.iter().position(|bytes| bytes.len() >= len);
            let known = found.map(|at| free.swap_remove(at));
            if known.is_none() {
                // A longer one takes its place: there are no more than readers.
                drop(free.pop());
            }
            known
        };
        let bytes = match known {
            Some(bytes) => bytes,
            None => zeroed(len, || "parts of tensors".to_owned())?,
        };
        Ok(Scratch { segments: batch.segments, wanted, bytes, len })
    }

    fn commit(
        &self,
        lease: Scratch<'a>,
        _keep: bool,
        _cancel: &dyn Cancel,
    ) -> Result<Committed<&'static [u8]>> {
        let bug = || Error::Bug("a run beyond its batch".to_owned());
        for Wanted { at, range, runs, to } in lease.wanted {
            let mut rest = to;
            for (position, len) in runs.within(&range) {
                let from = usize::try_from(at + position - range.start).map_err(|_| bug())?;
                let len = usize::try_from(len).map_err(|_| bug())?;
                let bytes = lease.bytes.get(from..).and_then(|bytes| bytes.get(..len));
                let cut = std::mem::take(&mut rest).split_at_mut_checked(len);
                let (now, later) = cut.ok_or_else(bug)?;
                for (slot, byte) in now.iter_mut().zip(bytes.ok_or_else(bug)?) {
                    slot.write(*byte);
                }
                rest = later;
            }
        }
        self.free.lock().unwrap_or_else(PoisonError::into_inner).push(lease.bytes);
        Ok(Committed::in_host(Vec::new()))
    }
}

/// Memory for one batch.
pub struct Scratch<'a> {
    segments: Vec<Segment>,
    wanted: Vec<Wanted<'a>>,
    bytes: Box<[u8]>,
    len: usize,
}

impl Lease for Scratch<'_> {
    fn fill(&mut self, read: &dyn Fn(u64, &mut Buffers<'_>) -> Result<()>) -> Result<()> {
        read(0, &mut Buffers::of(self.bytes.get_mut(..self.len).unwrap_or(&mut [])))
    }

    fn chunks(&mut self) -> Result<Vec<Chunk<'_>>> {
        let mut rest = &mut *self.bytes;
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

#[cfg(test)]
#[allow(clippy::unwrap_used)]
mod tests {
    use super::*;
    use crate::cancel::Never;

    #[test]
    fn longer_memory_takes_the_place_of_shorter() {
        let gather = Gather::new(Vec::new());
        for len in 1..20 {
            let segments = vec![Segment { kind: SegmentKind::Gap, len }];
            let batch = Batch { file: 0, offset: 0, segments };
            let lease = gather.acquire((), batch, Vec::new(), &|| Ok(false), &Never).unwrap();
            gather.commit(lease, false, &Never).unwrap();
            let lens: Vec<usize> =
                gather.free.lock().unwrap().iter().map(|one| one.len()).collect();
            assert_eq!(lens, [usize::try_from(len).unwrap()]);
        }
    }
}
