//! Cuts the extents of tensors in a file into parts of about equal size, each one contiguous
//! range that one reader or writer moves with one call.

/// Where one tensor lies in the file: its header, then its data.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Extent {
    /// Position of the header.
    pub header_offset: u64,
    /// Position of the data.
    pub data_offset: u64,
    /// Bytes of data.
    pub data_len: u64,
}

impl Extent {
    fn end(&self) -> u64 {
        self.data_offset + self.data_len
    }
}

/// What some bytes of a part belong to. `tensor` counts within the extents given.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum SegmentKind {
    /// The whole header of a tensor.
    Header {
        /// Which.
        tensor: usize,
    },
    /// Data of a tensor.
    Data {
        /// Which.
        tensor: usize,
        /// Position within the tensor's data.
        start: u64,
    },
    /// Bytes that nobody wants.
    Gap,
}

/// Adjacent bytes with one destination.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Segment {
    /// Whose they are.
    pub kind: SegmentKind,
    /// How many.
    pub len: u64,
}

/// One contiguous range of the file.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Batch {
    /// File position of its first byte.
    pub offset: u64,
    /// Its bytes, in order, without holes.
    pub segments: Vec<Segment>,
}

impl Batch {
    /// Bytes in the part.
    pub fn len(&self) -> u64 {
        self.segments.iter().map(|piece| piece.len).sum()
    }

    /// Whether it has no bytes, which [`partition`] never returns.
    pub fn is_empty(&self) -> bool {
        self.len() == 0
    }
}

/// A tensor of at least this size may be cut where a part ends, not only where it is longer than one.
const CUT_LEN: u64 = 4 << 20;

/// Covers every byte of the extents exactly once.
///
/// Extents are in rising order and do not overlap. Parts hold about `part_len` bytes and at most
/// `max_pieces` pieces; a header is never cut, and comes in one part with the first of its data.
/// Gaps of at most `merge_gap` bytes are read over, wider ones start a new part. Data are cut at
/// multiples of `unit`, which may make parts longer.
pub fn partition(
    extents: &[Extent],
    part_len: u64,
    merge_gap: u64,
    max_pieces: usize,
    unit: u64,
) -> Vec<Batch> {
    let part_len = part_len.max(1);
    let unit = unit.max(1);
    let mut parts: Vec<Batch> = Vec::new();
    let mut open: Option<Batch> = None;
    for (tensor, extent) in extents.iter().enumerate() {
        let header = Segment {
            kind: SegmentKind::Header { tensor },
            len: extent.data_offset - extent.header_offset,
        };
        let fits = |part: &Batch| {
            let end = part.offset + part.len();
            let gap = extent.header_offset - end;
            // A long tensor fills what is left of a part; a short one is not worth a cut.
            let room = part_len.saturating_sub(extent.data_offset - part.offset);
            let cut = extent.data_len >= CUT_LEN && room >= part_len / 16;
            gap <= merge_gap
                && part.segments.len() + 3 <= max_pieces
                && (extent.end() - part.offset <= part_len || part.len() * 4 < part_len || cut)
        };
        if !open.as_ref().is_some_and(fits) {
            parts.extend(open.take());
        }
        let part = open
            .get_or_insert_with(|| Batch { offset: extent.header_offset, segments: Vec::new() });
        let gap = extent.header_offset - (part.offset + part.len());
        if gap > 0 {
            part.segments.push(Segment { kind: SegmentKind::Gap, len: gap });
        }
        part.segments.push(header);
        let mut start = 0;
        while start < extent.data_len {
            let room = part_len
                .saturating_sub(open.as_ref().map_or(0, Batch::len))
                .max(part_len.div_ceil(16));
            let room = (room / unit).max(1) * unit;
            let rest = extent.data_len - start;
            // The last cut must not leave crumbs, and short tensors stay whole.
            let whole = extent.data_len <= part_len && extent.data_len < CUT_LEN;
            let len = if whole || rest <= room.saturating_add(part_len / 16) { rest } else { room };
            let piece = Segment { kind: SegmentKind::Data { tensor, start }, len };
            match &mut open {
                Some(part) => part.segments.push(piece),
                None => {
                    open = Some(Batch { offset: extent.data_offset + start, segments: vec![piece] })
                }
            }
            start += len;
            if start < extent.data_len {
                parts.extend(open.take());
            }
        }
    }
    parts.extend(open);
    parts
}
