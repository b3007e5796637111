//! Host memory as a destination: bytes are read straight into the memory of the tensors.

use std::collections::HashMap;
use std::mem::MaybeUninit;
use std::sync::Arc;

use super::{
    BatchMemory, CommittedBatch, Destination, Facts, Fit, Idle, ReadFacts, SegmentBytes,
    batch_limits,
};
use crate::cancel::Cancel;
use crate::engine::plan::{Batch, BatchLimits, Extent, Segment, SegmentKind};
use crate::error::{Error, Result};
use crate::fallible::try_zeroed;
use crate::mem::{
    BufferPiece, BufferToFill, Buffers, FilledRanges, HostBuffer, SliceRemainder, SpareBlocks,
    UnfilledBuffer, fill_all,
};
use crate::memory_limit::LoadNeeds;
use crate::numbers::TensorNumber;
use crate::sys::sync::{Mutex, unpoisoned};
use crate::sys::to_usize;

/// Minimum bytes of a batch; fewer are not worth one.
const MIN_BATCH: u64 = 1 << 20;

/// Host memory for the tensors of a load.
pub struct HostDestination<'a> {
    memory: TensorMemory<'a>,
    /// The images, in the order of their files and positions.
    images: Vec<FileImage<'a>>,
    /// The bytes of lent memory that were written.
    filled: Vec<&'a FilledRanges>,
}

/// The memory of tensors that are in no image.
pub enum TensorMemory<'a> {
    /// Memory that exists: the part of each tensor's that is not planned yet; empty for tensors in
    /// an image.
    Lent(Vec<SliceRemainder<'a, MaybeUninit<u8>>>),
    /// Memory of each tensor's own, which is allocated when the tensor is about to be read.
    Own(&'a TensorBuffers),
}

/// Memory of tensors that are being filled. Each has as many bytes as the tensor, and the alignment
/// of its file position.
pub struct TensorBuffers {
    /// Number of bytes of each tensor, and the file position of its first byte.
    sizes: Vec<(u64, u64)>,
    unfilled: Mutex<HashMap<TensorNumber, UnfilledBuffer>>,
    /// Memory of tensors that were dropped.
    spare: Arc<SpareBlocks>,
}

impl TensorBuffers {
    /// Memory for tensors with these numbers of bytes and file positions. That of dropped ones is
    /// used again, where at most `spare` bytes wait.
    pub fn new(sizes: Vec<(u64, u64)>, spare: u64) -> Self {
        let spare = Arc::new(SpareBlocks::new(to_usize(spare)));
        TensorBuffers { sizes, unfilled: Mutex::default(), spare }
    }

    /// Takes the memory of a complete tensor; an empty buffer for a tensor without bytes.
    pub fn take(&self, tensor: TensorNumber) -> Result<HostBuffer> {
        let memory = unpoisoned(self.unfilled.lock()).remove(&tensor);
        memory.map_or_else(|| Ok(HostBuffer::empty()), UnfilledBuffer::finish)
    }

    fn piece(&self, tensor: TensorNumber, offset: u64, len: u64) -> Result<BufferPiece> {
        let mut unfilled = unpoisoned(self.unfilled.lock());
        let buffer = match unfilled.entry(tensor) {
            std::collections::hash_map::Entry::Occupied(existing) => existing.into_mut(),
            std::collections::hash_map::Entry::Vacant(new) => {
                let &(len, position) = tensor.of(&self.sizes)?;
                new.insert(UnfilledBuffer::new(to_usize(len), to_usize(position), &self.spare)?)
            }
        };
        buffer.piece(to_usize(offset), to_usize(len))
    }
}

/// Memory that is an image of a range of a file.
pub struct FileImage<'a> {
    /// Index of the file.
    pub file: usize,
    /// File position of its first byte that is not planned yet.
    pub position: u64,
    /// The memory from that position on.
    pub memory: RunMemory<'a>,
}

/// Memory of adjacent bytes.
pub enum RunMemory<'a> {
    /// Memory to read into.
    Empty(&'a mut [MaybeUninit<u8>]),
    /// Memory that was read into, or a mapping of the file, which needs no read.
    Full(&'a mut [u8]),
    /// Memory of a tensor's own, which the lease has.
    Own(usize),
    /// Memory of the lease, for headers and unwanted bytes.
    Overhead(usize),
}

impl RunMemory<'_> {
    fn len(&self) -> usize {
        match self {
            RunMemory::Empty(bytes) => bytes.len(),
            RunMemory::Full(bytes) => bytes.len(),
            RunMemory::Own(len) | RunMemory::Overhead(len) => *len,
        }
    }

    /// Cuts off and returns the first `len` bytes; None if there are fewer.
    fn cut(&mut self, len: usize) -> Option<Self> {
        match self {
            RunMemory::Empty(bytes) => bytes.split_off_mut(..len).map(RunMemory::Empty),
            RunMemory::Full(bytes) => bytes.split_off_mut(..len).map(RunMemory::Full),
            RunMemory::Own(_) | RunMemory::Overhead(_) => None,
        }
    }
}

impl<'a> FileImage<'a> {
    fn holds(&self, position: u64, len: u64) -> bool {
        let skip = position.checked_sub(self.position);
        skip.and_then(|skip| skip.checked_add(len))
            .is_some_and(|end| end <= self.memory.len() as u64)
    }

    fn cut(&mut self, position: u64, len: u64) -> Option<RunMemory<'a>> {
        self.memory.cut(to_usize(position.checked_sub(self.position)?))?;
        let span = self.memory.cut(to_usize(len))?;
        self.position = position + len;
        Some(span)
    }
}

impl<'a> HostDestination<'a> {
    /// Creates the destination; images are in the order of their files and positions.
    pub fn new(memory: TensorMemory<'a>, images: Vec<FileImage<'a>>) -> Self {
        HostDestination { memory, images, filled: Vec::new() }
    }

    /// Adds the bytes that are written to these, each for a block of memory.
    pub fn noting(self, mut filled: Vec<&'a FilledRanges>) -> Self {
        filled.sort_unstable_by_key(|filled| filled.start());
        HostDestination { filled, ..self }
    }

    /// Returns limits for batches of the length that suits the source. With a fixed number of
    /// readers, the bytes are divided into rounds, in each of which every reader has the same amount
    /// to read.
    pub fn limits(read: &ReadFacts<'_>, overhead: u64) -> BatchLimits {
        let (readers, request_len) = (read.readers, read.source.request_len);
        let stays = readers.initial == readers.max;
        let number = readers.max as u64;
        let rounds = read.total.div_ceil(number.saturating_mul(request_len)).max(1);
        let even = read.total.div_ceil(number.saturating_mul(rounds));
        // A batch ends where a tensor does, if that is near, and may so be shorter. A slightly
        // larger length, of whole units, keeps the number of batches.
        let even = even.saturating_add(even / 32).max(MIN_BATCH);
        let even = even.checked_next_multiple_of(read.unit).unwrap_or(even);
        let len = if stays { even } else { request_len };
        BatchLimits { tapers: !stays, ..batch_limits(len, read, overhead) }
    }

    /// Returns the number of the image that contains some bytes of a file, if one does.
    fn image_at(&self, file: usize, position: u64, len: u64) -> Option<usize> {
        let after =
            self.images.partition_point(|image| (image.file, image.position) <= (file, position));
        let at = after.checked_sub(1)?;
        self.images.get(at).filter(|image| image.file == file && image.holds(position, len))?;
        Some(at)
    }

    /// Notes that bytes of lent memory were written.
    fn note(&self, bytes: &[u8]) {
        let at = bytes.as_ptr().addr();
        let after = self.filled.partition_point(|filled| filled.start() <= at);
        let block = after.checked_sub(1).and_then(|last| self.filled.get(last));
        block.into_iter().for_each(|filled| filled.add(bytes));
    }
}

/// Adjacent segments with adjacent memory.
pub struct SegmentRun<'a> {
    segments: usize,
    memory: RunMemory<'a>,
}

impl<'a> Destination for HostDestination<'a> {
    type BatchPlan = Vec<SegmentRun<'a>>;
    type Ticket = ();
    type Lease = HostBatch<'a>;
    type Bytes = HostBytes<'a>;

    fn facts(&self) -> Facts {
        Facts { unit: u64::MAX, in_steps: true, nodes: vec![None], spared_cores: 0, device: None }
    }

    fn present(&self, extents: &[Extent]) -> u64 {
        let present = extents.iter().map(|extent| {
            let len = extent.end().saturating_sub(extent.header_offset);
            let at = self.image_at(extent.file, extent.header_offset, len);
            let image = at.and_then(|at| self.images.get(at));
            image.map_or(0, |image| if let RunMemory::Full(_) = image.memory { len } else { 0 })
        });
        present.sum()
    }

    fn fit(&mut self, read: &ReadFacts<'_>) -> Result<Fit> {
        let shares = read.memory.load(&LoadNeeds {
            readers: read.readers.max,
            reader_bytes: read.source.reader_memory,
            gather_bytes: read.gather_bytes,
            staging: None,
        })?;
        let readers = read.readers.limited_to(shares.readers);
        let limits = Self::limits(&ReadFacts { readers, ..*read }, shares.overhead);
        Ok(Fit { readers, limits, gather_bytes: shares.gather_bytes, max_unhashed: None })
    }

    fn plan(&mut self, batch: &Batch) -> Result<Vec<SegmentRun<'a>>> {
        let bug = || Error::Bug("a batch without destinations".to_owned());
        let mut runs = Vec::with_capacity(batch.segments.len());
        let mut position = batch.offset;
        let mut segments = batch.segments.iter().peekable();
        while let Some(segment) = segments.next() {
            let (mut count, mut len) = (1, segment.len);
            let image = self.image_at(batch.file, position, len);
            let image = image.and_then(|at| self.images.get_mut(at));
            let memory = match (image, segment.kind) {
                (Some(image), _) => {
                    while let Some(next) =
                        segments.next_if(|next| image.holds(position, len.saturating_add(next.len)))
                    {
                        (count, len) = (count + 1, len + next.len);
                    }
                    image.cut(position, len).ok_or_else(bug)?
                }
                (None, SegmentKind::Data { .. }) => match &mut self.memory {
                    TensorMemory::Own(_) => RunMemory::Own(to_usize(len)),
                    TensorMemory::Lent(tensors) => {
                        let place = segment.place.ok_or_else(bug)?;
                        let rest = tensors.get_mut(place.tensor.0).ok_or_else(bug)?;
                        RunMemory::Empty(rest.cut(to_usize(place.offset), to_usize(len))?)
                    }
                },
                (None, _) => RunMemory::Overhead(to_usize(len)),
            };
            runs.push(SegmentRun { segments: count, memory });
            position += len;
        }
        Ok(runs)
    }

    fn enqueue(&self, _batch: &Batch) -> Result<()> {
        Ok(())
    }

    fn acquire(
        &self,
        _ticket: (),
        batch: Batch,
        runs: Vec<SegmentRun<'a>>,
        _idle: Idle<'_>,
        _cancel: &dyn Cancel,
    ) -> Result<HostBatch<'a>> {
        let mut pieces = Vec::new();
        if let TensorMemory::Own(buffers) = &self.memory {
            // Without images, each run has one segment.
            for (segment, run) in batch.segments.iter().zip(&runs) {
                if let (RunMemory::Own(_), Some(place)) = (&run.memory, segment.place) {
                    pieces.push(buffers.piece(place.tensor, place.offset, segment.len)?);
                }
            }
        }
        let overhead = runs.iter().map(|run| match run.memory {
            RunMemory::Overhead(len) => len,
            _ => 0,
        });
        let overhead = try_zeroed(overhead.sum(), "headers of tensors")?;
        Ok(HostBatch { segments: batch.segments, runs, pieces, overhead })
    }

    fn commit(
        &self,
        lease: HostBatch<'a>,
        keep: bool,
        _idle: Idle<'_>,
        _cancel: &dyn Cancel,
    ) -> Result<CommittedBatch<HostBytes<'a>>> {
        let mut bytes = Vec::new();
        let (mut segments, mut pieces) = (lease.segments.iter(), lease.pieces.into_iter());
        for run in lease.runs {
            let mut rest: &'a [u8] = match run.memory {
                RunMemory::Own(_) => {
                    segments.next();
                    bytes.extend(pieces.next().filter(|_| keep).map(HostBytes::Own));
                    continue;
                }
                RunMemory::Full(bytes) => bytes,
                RunMemory::Empty(_) | RunMemory::Overhead(_) => &[],
            };
            self.note(rest);
            if !keep {
                continue;
            }
            for segment in segments.by_ref().take(run.segments) {
                let len = to_usize(segment.len).min(rest.len());
                let (now, later) = rest.split_at(len);
                bytes.push(HostBytes::Lent(now));
                rest = later;
            }
        }
        Ok(CommittedBatch { bytes, copy_events: Vec::new() })
    }
}

/// Bytes that have arrived.
pub enum HostBytes<'a> {
    /// In memory that was lent.
    Lent(&'a [u8]),
    /// In memory of a tensor's own.
    Own(BufferPiece),
}

impl AsRef<[u8]> for HostBytes<'_> {
    fn as_ref(&self) -> &[u8] {
        match self {
            HostBytes::Lent(bytes) => bytes,
            HostBytes::Own(piece) => piece.as_ref(),
        }
    }
}

/// Memory for one batch.
pub struct HostBatch<'a> {
    segments: Vec<Segment>,
    runs: Vec<SegmentRun<'a>>,
    /// The memory of tensors' own, in order.
    pieces: Vec<BufferPiece>,
    overhead: Box<[u8]>,
}

impl BatchMemory for HostBatch<'_> {
    fn fill(&mut self, read: &dyn Fn(u64, &mut Buffers<'_>) -> Result<()>) -> Result<()> {
        let mut overhead = SliceRemainder::new(&mut self.overhead);
        let (mut position, mut pieces) = (0, self.pieces.iter_mut());
        // Mapped runs need no read; the others between two of them are filled with one read.
        let is_full = |run: &SegmentRun<'_>| matches!(run.memory, RunMemory::Full(_));
        for runs in self.runs.chunk_by_mut(|a, b| is_full(a) == is_full(b)) {
            let len: u64 = runs.iter().map(|run| run.memory.len() as u64).sum();
            if !runs.first().is_some_and(is_full) {
                fill(runs, (&mut pieces, &mut overhead), |buffers| read(position, buffers))?;
            }
            position += len;
        }
        Ok(())
    }

    fn chunks(&mut self) -> Result<Vec<SegmentBytes<'_>>> {
        let bug = || Error::Bug("a chunk without memory".to_owned());
        let mut overhead = SliceRemainder::new(&mut self.overhead);
        let mut chunks = Vec::with_capacity(self.segments.len());
        let (mut segments, mut pieces) = (self.segments.iter(), self.pieces.iter_mut());
        for run in &mut self.runs {
            let mut rest: &mut [u8] = match &mut run.memory {
                RunMemory::Full(bytes) => bytes,
                RunMemory::Own(_) => pieces.next().ok_or_else(bug)?.bytes_mut(),
                RunMemory::Empty(_) => return Err(bug()),
                RunMemory::Overhead(len) => overhead.next(*len)?,
            };
            for segment in segments.by_ref().take(run.segments) {
                let bytes = rest.split_off_mut(..to_usize(segment.len)).ok_or_else(bug)?;
                chunks.push(SegmentBytes { kind: segment.kind, bytes });
            }
        }
        Ok(chunks)
    }
}

/// Fills adjacent runs with one read. Headers and unwanted bytes go into memory of `overhead`.
fn fill<'p>(
    runs: &mut [SegmentRun<'_>],
    (pieces, overhead): (
        &mut impl Iterator<Item = &'p mut BufferPiece>,
        &mut SliceRemainder<'p, u8>,
    ),
    read: impl FnOnce(&mut Buffers<'_>) -> Result<()>,
) -> Result<()> {
    let mut memory = Vec::with_capacity(runs.len());
    let mut lent = Vec::new();
    for (at, run) in runs.iter_mut().enumerate() {
        match &mut run.memory {
            RunMemory::Empty(bytes) => {
                memory.push(BufferToFill::Returned(std::mem::take(bytes)));
                lent.push(at);
            }
            RunMemory::Full(_) => return Err(Error::Bug("read twice".to_owned())),
            RunMemory::Own(_) => {
                let piece = pieces.next().ok_or_else(|| Error::Bug("no memory".to_owned()))?;
                let (bytes, filled) = piece.lend();
                memory.push(BufferToFill::Lent(bytes, filled));
            }
            RunMemory::Overhead(len) => memory.push(BufferToFill::Inspected(overhead.next(*len)?)),
        }
    }
    for (at, full) in lent.into_iter().zip(fill_all(memory, read)?) {
        if let Some(run) = runs.get_mut(at) {
            run.memory = RunMemory::Full(full);
        }
    }
    Ok(())
}
