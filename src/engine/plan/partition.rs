//! Cuts the extents of tensors in files into batches of about equal size. Each batch is a
//! contiguous range of a file, which one reader or writer handles with one call.

use crate::numbers::{ExtentNumber, TensorNumber};

/// Contiguous data of a tensor in a file, after the tensor's header if it has one.
#[derive(Debug, Clone, Copy, Default, PartialEq, Eq)]
pub struct Extent {
    /// Index of the file.
    pub file: usize,
    /// Position of the header.
    pub header_offset: u64,
    /// Position of the data.
    pub data_offset: u64,
    /// Bytes of data.
    pub data_len: u64,
}

impl Extent {
    /// Returns the position after the data.
    pub fn end(&self) -> u64 {
        self.data_offset + self.data_len
    }
}

/// The part of a file that a segment belongs to.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum SegmentKind {
    /// The whole header of an extent.
    Header {
        /// The extent.
        extent: ExtentNumber,
    },
    /// Data of an extent.
    Data {
        /// The extent.
        extent: ExtentNumber,
        /// Position within the extent's data.
        start: u64,
    },
    /// Unwanted bytes between extents.
    Gap,
}

impl SegmentKind {
    /// Returns the kind of the bytes from `done` on.
    pub fn later(self, done: u64) -> Self {
        match self {
            SegmentKind::Data { extent, start } => {
                SegmentKind::Data { extent, start: start + done }
            }
            other => other,
        }
    }
}

/// Adjacent bytes with one destination.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Segment {
    /// The header, data or gap that they belong to.
    pub kind: SegmentKind,
    /// Number of bytes.
    pub len: u64,
    /// The memory that they go to, once a plan has placed them.
    pub place: Option<Place>,
}

impl Segment {
    /// Returns the extent that it belongs to; None for a gap.
    pub fn extent(&self) -> Option<ExtentNumber> {
        match self.kind {
            SegmentKind::Header { extent } | SegmentKind::Data { extent, .. } => Some(extent),
            SegmentKind::Gap => None,
        }
    }
}

/// A position in the memory of a tensor that is loaded.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Place {
    /// The tensor.
    pub tensor: TensorNumber,
    /// Position in the tensor's memory.
    pub offset: u64,
}

/// One contiguous range of a file, which is read or written with one request.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Batch {
    /// Index of the file.
    pub file: usize,
    /// File position of its first byte.
    pub offset: u64,
    /// Its bytes, in order, without holes.
    pub segments: Vec<Segment>,
}

impl Batch {
    /// Returns the bytes in the batch.
    pub fn len(&self) -> u64 {
        self.segments.iter().map(|piece| piece.len).sum()
    }

    /// True if it has no bytes; [`partition`] never returns such a batch.
    pub fn is_empty(&self) -> bool {
        self.len() == 0
    }

    /// Cuts the batch into steps of about `step` bytes, so that hashing finds the bytes of each
    /// step in the CPU cache. Only data of more than `max_uncut` bytes are cut; shorter data stay
    /// with their header.
    pub fn steps(self, step: u64, max_uncut: u64) -> Vec<Batch> {
        let mut steps: Vec<Batch> = Vec::new();
        let (mut offset, mut len) = (self.offset, 0);
        let mut add = |segment: Segment, joined: bool| {
            match steps.last_mut().filter(|_| joined || len < step) {
                Some(last) => {
                    last.segments.push(segment);
                    len += segment.len;
                }
                None => {
                    steps.push(Batch { file: self.file, offset, segments: vec![segment] });
                    len = segment.len;
                }
            }
            offset += segment.len;
        };
        let mut after_header = false;
        for segment in self.segments {
            match segment.kind {
                SegmentKind::Data { extent, start } if segment.len > max_uncut => {
                    let mut done = 0;
                    while done < segment.len {
                        let len = step.max(1).min(segment.len - done);
                        let kind = SegmentKind::Data { extent, start: start + done };
                        add(Segment { kind, len, place: None }, false);
                        done += len;
                    }
                }
                _ => add(segment, after_header),
            }
            after_header = matches!(segment.kind, SegmentKind::Header { .. });
        }
        steps
    }
}

/// Tensors of at least this length may be cut to fill a batch. Shorter ones are cut only if they
/// are longer than a batch.
const CUT_LEN: u64 = 4 << 20;

/// Limits on the batches of a plan.
#[derive(Debug, Clone, Copy)]
pub struct BatchLimits {
    /// Approximate bytes of a batch.
    pub len: u64,
    /// True if batches become shorter towards the end, so that any number of readers end at nearly
    /// the same time.
    pub tapers: bool,
    /// Gaps of at most this length are read with the data around them; longer gaps start a new
    /// batch.
    pub merge_gap: u64,
    /// Maximum number of segments in a batch.
    pub segments: usize,
    /// Data are cut at multiples of this, which may make batches longer.
    pub unit: u64,
    /// Block length of the file, in bytes. With a `unit` of 1, data are cut at block ends, which
    /// may make batches shorter. Otherwise, direct reads of two adjacent batches would both read
    /// the block that they share.
    pub block: u64,
    /// Tensors with at least this many bytes of data share no batch with others.
    pub separate_len: u64,
    /// Maximum bytes of headers and gaps in a batch of more than one tensor.
    pub overhead: u64,
}

/// Cuts extents into batches that cover every byte exactly once. A header is never cut, and shares
/// a batch with the beginning of its data.
///
/// Extents are in rising order of files and positions, and do not overlap.
pub fn partition(extents: &[Extent], limits: &BatchLimits) -> Vec<Batch> {
    partition_by_class(extents, limits, |_| 0)
}

/// Cuts extents as [`partition`] does. Extents of different classes share no batch.
pub fn partition_by_class(
    extents: &[Extent],
    limits: &BatchLimits,
    class_of: impl Fn(ExtentNumber) -> usize,
) -> Vec<Batch> {
    let mut partitioner = Partitioner::new(extents, limits);
    for (number, extent) in (0..).map(ExtentNumber).zip(extents) {
        if extent.end() <= extent.header_offset {
            continue;
        }
        let is_separate = extent.data_len >= limits.separate_len;
        let class = class_of(number);
        let fits = |open: &OpenBatch| {
            !is_separate && open.class == class && open.fits(extent, &partitioner.limits)
        };
        if !partitioner.open_batch.as_ref().is_some_and(fits) {
            partitioner.close();
        }
        let at = |offset| OpenBatch::at(extent.file, offset, class);
        let open = partitioner.open_batch.get_or_insert_with(|| at(extent.header_offset));
        open.push(SegmentKind::Gap, extent.header_offset.saturating_sub(open.end));
        let header_len = extent.data_offset.saturating_sub(extent.header_offset);
        open.push(SegmentKind::Header { extent: number }, header_len);
        let mut start = 0;
        while start < extent.data_len {
            let position = extent.data_offset + start;
            let open = partitioner.open_batch.get_or_insert_with(|| at(position));
            let (all, rest) = (extent.data_len, extent.data_len - start);
            let len = partitioner.limits.cut_len(partitioner.max_len, open.len(), all, rest);
            let len = partitioner.limits.round_to_block(position, len, rest);
            open.push(SegmentKind::Data { extent: number, start }, len);
            start += len;
            if start < extent.data_len {
                partitioner.close();
            }
        }
        if is_separate {
            partitioner.close();
        }
    }
    partitioner.close();
    partitioner.batches
}

/// A tapered batch has at least this fraction (1/8) of the usual length: a shorter request costs
/// more than its bytes.
const SHORTEST: u64 = 8;
/// A tapered batch has at most this fraction (1/32) of the bytes that are left. With about 32
/// readers, all end at nearly the same time, even if one begins a long batch last.
const SHARES: u64 = 32;

struct Partitioner {
    batches: Vec<Batch>,
    open_batch: Option<OpenBatch>,
    /// The limits of the next batch.
    limits: BatchLimits,
    /// Maximum bytes of a batch, and the bytes that are left for later batches.
    max_len: u64,
    remaining: u64,
}

impl Partitioner {
    fn new(extents: &[Extent], limits: &BatchLimits) -> Self {
        let lens = extents.iter().map(|extent| extent.end().saturating_sub(extent.header_offset));
        let (remaining, max_len) = (lens.fold(0, u64::saturating_add), limits.len.max(1));
        let limits = BatchLimits { len: max_len, unit: limits.unit.max(1), ..*limits };
        let mut partitioner =
            Partitioner { batches: Vec::new(), open_batch: None, limits, max_len, remaining };
        partitioner.taper();
        partitioner
    }

    fn taper(&mut self) {
        if self.limits.tapers {
            let shortest = (self.max_len / SHORTEST).max(1);
            self.limits.len = (self.remaining / SHARES).clamp(shortest, self.max_len);
        }
    }

    fn close(&mut self) {
        if let Some(OpenBatch { batch, end, .. }) = self.open_batch.take() {
            self.remaining = self.remaining.saturating_sub(end - batch.offset);
            self.batches.push(batch);
            self.taper();
        }
    }
}

impl BatchLimits {
    /// Returns the bytes of data to add to a batch of `used` bytes. The tensor has `all` bytes, of
    /// which `rest` are left. `max_len`: the value of `len` before it tapered.
    fn cut_len(&self, max_len: u64, used: u64, all: u64, rest: u64) -> u64 {
        let room = self.len.saturating_sub(used).max(self.len.div_ceil(16));
        let room = (room / self.unit).max(1).saturating_mul(self.unit);
        // The last cut must not leave a tiny rest, and short tensors stay whole.
        let stays_whole = all <= max_len && all < CUT_LEN;
        if stays_whole || rest <= room.saturating_add(self.len / 16) { rest } else { room }
    }

    /// Shortens `len` bytes at `position` so that they end at a block boundary. The last bytes of a
    /// tensor, and those within one block, stay as they are.
    fn round_to_block(&self, position: u64, len: u64, rest: u64) -> u64 {
        let over = position.saturating_add(len) % self.block.max(1);
        if self.unit == 1 && len < rest && over < len { len - over } else { len }
    }
}

/// A batch that more extents may be added to.
struct OpenBatch {
    batch: Batch,
    /// The class of its extents.
    class: usize,
    end: u64,
    /// Bytes of headers and gaps in it.
    overhead: u64,
}

impl OpenBatch {
    fn at(file: usize, offset: u64, class: usize) -> Self {
        // A tensor alone has a header and data.
        let batch = Batch { file, offset, segments: Vec::with_capacity(2) };
        OpenBatch { batch, class, end: offset, overhead: 0 }
    }

    fn len(&self) -> u64 {
        self.end - self.batch.offset
    }

    fn push(&mut self, kind: SegmentKind, len: u64) {
        if len > 0 {
            self.batch.segments.push(Segment { kind, len, place: None });
            self.end += len;
            if !matches!(kind, SegmentKind::Data { .. }) {
                self.overhead = self.overhead.saturating_add(len);
            }
        }
    }

    /// True if the next extent is added to this batch.
    fn fits(&self, extent: &Extent, limits: &BatchLimits) -> bool {
        let Some(gap) = extent.header_offset.checked_sub(self.end) else { return false };
        let offset = self.batch.offset;
        // A long tensor is cut to fill the batch; cutting a short one is not worthwhile.
        let room = limits.len.saturating_sub(extent.data_offset.saturating_sub(offset));
        let cut = extent.data_len >= CUT_LEN && room >= limits.len / 16;
        let overhead = extent.data_offset.saturating_sub(self.end);
        extent.file == self.batch.file
            && gap <= limits.merge_gap
            && self.overhead.saturating_add(overhead) <= limits.overhead
            && self.batch.segments.len() + 3 <= limits.segments
            && (extent.end().saturating_sub(offset) <= limits.len
                || self.len().saturating_mul(4) < limits.len
                || cut)
    }
}
