//! Plans the staging of a batch: the positions of its bytes in staging buffers, and the copies from
//! there to a device.

use super::memory_layout::BlockLocation;
use super::partition::{Batch, Segment, SegmentKind};
use crate::error::{Error, Result};
use crate::sys::to_usize;

/// Bytes that stay together in one staging buffer.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct StagedSegment {
    /// The header, data or gap that they belong to.
    pub kind: SegmentKind,
    /// Index of the buffer; None for bytes that are not copied to the device.
    pub buffer: Option<usize>,
    /// Position within the buffer.
    pub at: usize,
    /// Number of bytes.
    pub len: usize,
}

/// Adjacent bytes of a buffer that go to adjacent bytes of a block.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct DeviceCopy {
    /// Index of the buffer.
    pub buffer: usize,
    /// Position within the buffer.
    pub at: usize,
    /// Number of bytes.
    pub len: usize,
    /// Index of the block.
    pub block: usize,
    /// Position within the block.
    pub offset: usize,
}

/// The staging plan of one batch.
#[derive(Debug, Default, PartialEq, Eq)]
pub struct StagingPlan {
    /// Its bytes, in order.
    pub staged: Vec<StagedSegment>,
    /// The copies to the device.
    pub copies: Vec<DeviceCopy>,
    /// Number of buffers that it needs.
    pub buffers: usize,
}

/// Alignment of tensors in blocks and in buffers. The padding between two tensors of a block is
/// unused, so that one copy can bring both.
const ALIGNMENT: usize = crate::mem::ALIGNMENT;
/// Data of at least this length have the same offset within a disk block in the buffer as in the
/// file. Direct reads can then go straight there.
const BLOCKS_FROM: usize = 64 << 10;
const BLOCK: usize = crate::mem::DISK_BLOCK;

/// Plans the staging of a batch. Data are cut only at multiples of `unit` bytes of their tensor;
/// `unit` is at most `buffer_len`. `locate` returns the destination of a segment at a position of
/// the file, if it has one.
pub fn plan_staging(
    batch: &Batch,
    buffer_len: usize,
    unit: usize,
    locate: impl Fn(&Segment, u64) -> Result<Option<BlockLocation>>,
) -> Result<StagingPlan> {
    let mut builder = StagingBuilder { staging: StagingPlan::default(), buffer_len, end: 0 };
    let mut position = batch.offset;
    for segment in &batch.segments {
        let len = to_usize(segment.len);
        match locate(segment, position)? {
            None => {
                let staged = StagedSegment { kind: segment.kind, buffer: None, at: 0, len };
                builder.staging.staged.push(staged);
            }
            Some(BlockLocation { block, offset }) => {
                let offset = to_usize(offset);
                let (start, unit) = match segment.kind {
                    SegmentKind::Data { start, .. } => (to_usize(start), unit),
                    // A header is never cut.
                    _ => (0, buffer_len),
                };
                let blocks = matches!(segment.kind, SegmentKind::Data { .. }) && len >= BLOCKS_FROM;
                let mut done = 0;
                while done < len {
                    let now = (unit - (start + done) % unit).min(len - done);
                    let in_block = to_usize((position + done as u64) % BLOCK as u64);
                    let like = (blocks && in_block + now <= buffer_len).then_some(in_block);
                    let kind = segment.kind.later(done as u64);
                    builder.add(kind, now, block, offset + done, like)?;
                    done += now;
                }
            }
        }
        position += segment.len;
    }
    Ok(builder.staging)
}

struct StagingBuilder {
    staging: StagingPlan,
    buffer_len: usize,
    /// Position after the last bytes in the last buffer.
    end: usize,
}

impl StagingBuilder {
    /// Adds bytes that go to `offset` of `block`. `like`: the offset within a disk block that they
    /// must have in the buffer, if that matters.
    fn add(
        &mut self,
        kind: SegmentKind,
        len: usize,
        block: usize,
        offset: usize,
        like: Option<usize>,
    ) -> Result<()> {
        if len > self.buffer_len {
            return Err(Error::Bug(format!("{len} bytes for a buffer of {}", self.buffer_len)));
        }
        // Returns the first position from `end` on that is aligned, or has the offset `like` within
        // a disk block.
        let next = |end: usize| match like {
            Some(like) => end + (like + BLOCK - end % BLOCK) % BLOCK,
            None => end.next_multiple_of(ALIGNMENT),
        };
        let StagingPlan { staged, copies, buffers } = &mut self.staging;
        let end = self.end;
        let gap = copies
            .last()
            .filter(|last| last.block == block)
            .and_then(|last| offset.checked_sub(last.offset + last.len))
            .filter(|&gap| gap < ALIGNMENT && end + gap + len <= self.buffer_len);
        let at = match gap {
            Some(gap) => end + gap,
            None => next(end),
        };
        let fits = *buffers > 0 && at + len <= self.buffer_len;
        if !fits {
            *buffers += 1;
        }
        let (at, joined) = if fits { (at, gap.is_some()) } else { (next(0), false) };
        let buffer = *buffers - 1;
        staged.push(StagedSegment { kind, buffer: Some(buffer), at, len });
        match copies.last_mut().filter(|_| joined) {
            Some(last) => last.len = at + len - last.at,
            None => copies.push(DeviceCopy { buffer, at, len, block, offset }),
        }
        self.end = at + len;
        Ok(())
    }
}
