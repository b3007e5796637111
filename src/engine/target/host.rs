//! Host memory as a target: bytes are read straight into the memory of the tensors.

use std::mem::MaybeUninit;

use super::{BatchMemory, CommittedBatch, SegmentBytes, Target, batch_limits};
use crate::cancel::Cancel;
use crate::engine::plan::PLAN;
use crate::engine::plan::{Batch, BatchLimits, Segment, SegmentKind};
use crate::engine::workers::WorkerRange;
use crate::error::{Error, Result};
use crate::fallible::{try_collect, try_with_capacity, try_zeroed};
use crate::io::Capabilities;
use crate::mem::{BufferToFill, Buffers, fill_all};

/// Minimum bytes of a batch; fewer are not worth one.
const MIN_BATCH: u64 = 1 << 20;

/// Memory for the tensors of a load.
pub struct HostTarget<'a> {
    /// For each tensor, the part of its memory that is not planned yet, unless it is in an image.
    tensors: Vec<&'a mut [MaybeUninit<u8>]>,
    /// The images, in the order of their files and positions.
    images: Vec<FileImage<'a>>,
}

/// Memory that is an image of a range of a file.
pub struct FileImage<'a> {
    /// Index of the file.
    pub file: usize,
    /// File position of its first byte that is not planned yet.
    pub position: u64,
    /// The memory from that position on.
    pub memory: ImageMemory<'a>,
}

/// Memory of an image.
pub enum ImageMemory<'a> {
    /// Memory to read into.
    Empty(&'a mut [MaybeUninit<u8>]),
    /// A mapping of the file, which needs no read.
    Mapped(&'a mut [u8]),
}

impl<'a> ImageMemory<'a> {
    fn len(&self) -> usize {
        match self {
            ImageMemory::Empty(bytes) => bytes.len(),
            ImageMemory::Mapped(bytes) => bytes.len(),
        }
    }

    /// Cuts off and returns the first `len` bytes; None if there are fewer.
    fn cut(&mut self, len: usize) -> Option<Self> {
        match self {
            ImageMemory::Empty(bytes) => {
                let (now, later) = std::mem::take(bytes).split_at_mut_checked(len)?;
                *bytes = later;
                Some(ImageMemory::Empty(now))
            }
            ImageMemory::Mapped(bytes) => {
                let (now, later) = std::mem::take(bytes).split_at_mut_checked(len)?;
                *bytes = later;
                Some(ImageMemory::Mapped(now))
            }
        }
    }
}

impl<'a> FileImage<'a> {
    fn holds(&self, position: u64, len: u64) -> bool {
        let skip = position.checked_sub(self.position);
        skip.and_then(|skip| skip.checked_add(len))
            .is_some_and(|end| end <= self.memory.len() as u64)
    }

    fn cut(&mut self, position: u64, len: u64) -> Option<ImageMemory<'a>> {
        let skip = usize::try_from(position.checked_sub(self.position)?).ok()?;
        self.memory.cut(skip)?;
        let span = self.memory.cut(usize::try_from(len).ok()?)?;
        self.position = position + len;
        Some(span)
    }
}

impl<'a> HostTarget<'a> {
    /// Creates the target. Slices of `tensors` are empty for those in an image; images are in the
    /// order of their files and positions.
    pub fn new(tensors: Vec<&'a mut [MaybeUninit<u8>]>, images: Vec<FileImage<'a>>) -> Self {
        HostTarget { tensors, images }
    }

    /// Returns the image that contains some bytes of a file, if one does.
    fn image_with(&mut self, file: usize, position: u64, len: u64) -> Option<&mut FileImage<'a>> {
        let after =
            self.images.partition_point(|image| (image.file, image.position) <= (file, position));
        let image = self.images.get_mut(after.checked_sub(1)?)?;
        (image.file == file && image.holds(position, len)).then_some(image)
    }
}

/// Adjacent segments with adjacent memory.
pub struct SegmentRun<'a> {
    segments: usize,
    memory: RunMemory<'a>,
}

enum RunMemory<'a> {
    Empty(&'a mut [MaybeUninit<u8>]),
    Full(&'a mut [u8]),
    /// Memory of the lease, for headers and unwanted bytes.
    Overhead(usize),
}

impl RunMemory<'_> {
    fn len(&self) -> usize {
        match self {
            RunMemory::Empty(bytes) => bytes.len(),
            RunMemory::Full(bytes) => bytes.len(),
            RunMemory::Overhead(len) => *len,
        }
    }
}

impl<'a> Target for HostTarget<'a> {
    type BatchPlan = Vec<SegmentRun<'a>>;
    type QueueTicket<'t>
        = ()
    where
        Self: 't;
    type Lease<'t>
        = HostBatch<'a>
    where
        Self: 't;
    type Bytes = &'a [u8];

    /// Batches have the length that suits the source. With a fixed number of readers, the bytes are
    /// divided into rounds, in each of which every reader has the same amount to read.
    fn limits(
        &self,
        source: &Capabilities,
        readers: WorkerRange,
        total: u64,
        decrypts: bool,
    ) -> BatchLimits {
        let stays = readers.initial == readers.max;
        let number = readers.max as u64;
        let rounds = total.div_ceil(number.saturating_mul(source.request_len)).max(1);
        let even = total.div_ceil(number.saturating_mul(rounds));
        // A batch ends where a tensor does, if that is near, and may so be shorter. A slightly
        // larger length keeps the number of batches.
        let even = even.saturating_add(even / 32).max(MIN_BATCH);
        let len = if stays { even } else { source.request_len };
        BatchLimits { tapers: !stays, ..batch_limits(len, source, decrypts) }
    }

    fn unit(&self) -> u64 {
        u64::MAX
    }

    fn reads_in_steps(&self) -> bool {
        true
    }

    fn plan(&mut self, batch: &Batch) -> Result<Vec<SegmentRun<'a>>> {
        let bug = || Error::Bug("a batch without destinations".to_owned());
        let mut runs = try_with_capacity(batch.segments.len(), PLAN)?;
        let mut position = batch.offset;
        let mut segments = batch.segments.iter().peekable();
        while let Some(segment) = segments.next() {
            let (mut count, mut len) = (1, segment.len);
            let memory = match (self.image_with(batch.file, position, len), segment.kind) {
                (Some(image), _) => {
                    while let Some(next) =
                        segments.next_if(|next| image.holds(position, len.saturating_add(next.len)))
                    {
                        (count, len) = (count + 1, len + next.len);
                    }
                    match image.cut(position, len).ok_or_else(bug)? {
                        ImageMemory::Empty(bytes) => RunMemory::Empty(bytes),
                        ImageMemory::Mapped(bytes) => RunMemory::Full(bytes),
                    }
                }
                (None, SegmentKind::Data { tensor, .. }) => {
                    let rest = self.tensors.get_mut(tensor).ok_or_else(bug)?;
                    let len = usize::try_from(len).map_err(|_| bug())?;
                    let cut = std::mem::take(rest).split_at_mut_checked(len).ok_or_else(bug)?;
                    *rest = cut.1;
                    RunMemory::Empty(cut.0)
                }
                (None, _) => RunMemory::Overhead(usize::try_from(len).map_err(|_| bug())?),
            };
            runs.push(SegmentRun { segments: count, memory });
            position += len;
        }
        Ok(runs)
    }

    fn enqueue(&self, _batch: &Batch) -> Result<()> {
        Ok(())
    }

    fn acquire<'t>(
        &'t self,
        _turn: (),
        batch: Batch,
        runs: Vec<SegmentRun<'a>>,
        _idle: &dyn Fn() -> Result<bool>,
        _cancel: &dyn Cancel,
    ) -> Result<HostBatch<'a>> {
        let overhead = runs.iter().map(|run| match run.memory {
            RunMemory::Overhead(len) => len,
            _ => 0,
        });
        let overhead = try_zeroed(overhead.sum(), || "headers of tensors".to_owned())?;
        Ok(HostBatch { segments: batch.segments, runs, overhead })
    }

    fn commit(
        &self,
        lease: HostBatch<'a>,
        keep: bool,
        _cancel: &dyn Cancel,
    ) -> Result<CommittedBatch<&'a [u8]>> {
        if !keep {
            return Ok(CommittedBatch::in_host(Vec::new()));
        }
        let mut bytes: Vec<&'a [u8]> = try_with_capacity(lease.segments.len(), PLAN)?;
        let mut segments = lease.segments.iter();
        for run in lease.runs {
            let mut rest: &'a [u8] = match run.memory {
                RunMemory::Full(bytes) => bytes,
                RunMemory::Empty(_) | RunMemory::Overhead(_) => &[],
            };
            for segment in segments.by_ref().take(run.segments) {
                let len = usize::try_from(segment.len).unwrap_or(usize::MAX).min(rest.len());
                let (now, later) = rest.split_at(len);
                bytes.push(now);
                rest = later;
            }
        }
        Ok(CommittedBatch::in_host(bytes))
    }
}

/// Memory for one batch.
pub struct HostBatch<'a> {
    segments: Vec<Segment>,
    runs: Vec<SegmentRun<'a>>,
    overhead: Box<[u8]>,
}

impl BatchMemory for HostBatch<'_> {
    fn fill(&mut self, read: &dyn Fn(u64, &mut Buffers<'_>) -> Result<()>) -> Result<()> {
        let mut overhead = &mut *self.overhead;
        let mut position = 0;
        // Mapped runs need no read; the others between two of them are filled with one read.
        let is_full = |run: &SegmentRun<'_>| matches!(run.memory, RunMemory::Full(_));
        for runs in self.runs.chunk_by_mut(|a, b| is_full(a) == is_full(b)) {
            let len: u64 = runs.iter().map(|run| run.memory.len() as u64).sum();
            if !runs.first().is_some_and(is_full) {
                fill(runs, &mut overhead, |buffers| read(position, buffers))?;
            }
            position += len;
        }
        Ok(())
    }

    fn chunks(&mut self) -> Result<Vec<SegmentBytes<'_>>> {
        let bug = || Error::Bug("a chunk without memory".to_owned());
        let mut overhead = &mut *self.overhead;
        let mut chunks = try_with_capacity(self.segments.len(), PLAN)?;
        let mut segments = self.segments.iter();
        for run in &mut self.runs {
            let mut rest: &mut [u8] = match &mut run.memory {
                RunMemory::Full(bytes) => bytes,
                RunMemory::Empty(_) => return Err(bug()),
                RunMemory::Overhead(len) => {
                    let cut = std::mem::take(&mut overhead).split_at_mut_checked(*len);
                    let (now, later) = cut.ok_or_else(bug)?;
                    overhead = later;
                    now
                }
            };
            for segment in segments.by_ref().take(run.segments) {
                let len = usize::try_from(segment.len).map_err(|_| bug())?;
                let cut = std::mem::take(&mut rest).split_at_mut_checked(len);
                let (bytes, later) = cut.ok_or_else(bug)?;
                rest = later;
                chunks.push(SegmentBytes { kind: segment.kind, bytes });
            }
        }
        Ok(chunks)
    }
}

/// Fills adjacent runs with one read. Headers and unwanted bytes go into memory of `overhead`.
fn fill(
    runs: &mut [SegmentRun<'_>],
    overhead: &mut &mut [u8],
    read: impl FnOnce(&mut Buffers<'_>) -> Result<()>,
) -> Result<()> {
    let mut lent = try_with_capacity(runs.len(), PLAN)?;
    for run in &mut *runs {
        match std::mem::replace(&mut run.memory, RunMemory::Overhead(0)) {
            RunMemory::Empty(bytes) => lent.push(BufferToFill::Returned(bytes)),
            RunMemory::Full(_) => return Err(Error::Bug("read twice".to_owned())),
            RunMemory::Overhead(len) => {
                let cut = std::mem::take(overhead).split_at_mut_checked(len);
                let cut = cut.ok_or_else(|| Error::Bug("a header without memory".to_owned()))?;
                *overhead = cut.1;
                run.memory = RunMemory::Overhead(len);
                lent.push(BufferToFill::Inspected(cut.0));
            }
        }
    }
    let is_destination =
        try_collect(lent.iter().map(|lent| matches!(lent, BufferToFill::Returned(_))), PLAN)?;
    let mut full = fill_all(lent, read)?.into_iter();
    for (run, _) in
        runs.iter_mut().zip(is_destination).filter(|(_, is_destination)| *is_destination)
    {
        run.memory = RunMemory::Full(full.next().unwrap_or(&mut []));
    }
    Ok(())
}
