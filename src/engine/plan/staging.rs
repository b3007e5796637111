//! Where in units of staging memory the data of a part go, and which copies bring them from there
//! to a device.

use super::partition::{Batch, SegmentKind};
use crate::error::{Error, Result};

/// Where on a device the data of a tensor go.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Target {
    /// Which block of device memory.
    pub block: usize,
    /// Position in it.
    pub offset: usize,
}

/// Data that stay together in one unit.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Grain {
    /// Which tensor, as the part counts them.
    pub tensor: usize,
    /// Position within its data.
    pub start: u64,
    /// Which unit.
    pub unit: usize,
    /// Position within the unit.
    pub at: usize,
    /// Bytes.
    pub len: usize,
}

/// Adjacent bytes of a unit that go to adjacent bytes of a block.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Move {
    /// Which unit.
    pub unit: usize,
    /// Position within the unit.
    pub at: usize,
    /// Bytes.
    pub len: usize,
    /// Where they go.
    pub target: Target,
}

/// The way of one part.
#[derive(Debug, Default, PartialEq, Eq)]
pub struct Staging {
    /// Its data, in the order of the part.
    pub grains: Vec<Grain>,
    /// The copies.
    pub moves: Vec<Move>,
    /// Units that it takes.
    pub units: usize,
}

/// Tensors in a block are aligned to this, and so are they in units. The bytes between two tensors
/// of a block belong to nobody, so that one copy can bring both.
const ALIGNMENT: usize = crate::mem::ALIGNMENT;

/// Places the data of a part. Data are cut at multiples of `grain` bytes of their tensor only, and
/// a grain lies in one unit; `grain` is at most `unit_len`.
pub fn stage(
    part: &Batch,
    unit_len: usize,
    grain: usize,
    target: impl Fn(usize) -> Result<Target>,
) -> Result<Staging> {
    let mut staging = Staging::default();
    // Position after the last grain, and in which block it goes where.
    let mut end = 0;
    let mut last: Option<Target> = None;
    for piece in &part.segments {
        let SegmentKind::Data { tensor, start } = piece.kind else { continue };
        let target = target(tensor)?;
        let size = |n: u64| usize::try_from(n).map_err(|_| Error::Bug(format!("{n} bytes")));
        let (mut done, len) = (0, size(piece.len)?);
        let position = size(start)?;
        while done < len {
            let from = position + done;
            let now = (grain - from % grain).min(len - done);
            let to = Target { block: target.block, offset: target.offset + from };
            let gap = last
                .filter(|last| last.block == to.block)
                .and_then(|last| to.offset.checked_sub(last.offset))
                .filter(|&gap| gap < ALIGNMENT && end + gap + now <= unit_len);
            let at = match gap {
                Some(gap) => end + gap,
                None => end.next_multiple_of(ALIGNMENT),
            };
            let (at, joined) = if staging.units == 0 || at + now > unit_len {
                staging.units += 1;
                (0, false)
            } else {
                (at, gap.is_some())
            };
            let unit = staging.units - 1;
            staging.grains.push(Grain { tensor, start: from as u64, unit, at, len: now });
            match staging.moves.last_mut().filter(|_| joined) {
                Some(last) => last.len = at + now - last.at,
                None => staging.moves.push(Move { unit, at, len: now, target: to }),
            }
            end = at + now;
            last = Some(Target { block: to.block, offset: to.offset + now });
            done += now;
        }
    }
    Ok(staging)
}

/// Bytes of a block of device memory that tensors share. Large enough that taking it costs nothing
/// beside filling it, small enough that what is left of the last does not matter.
const BLOCK_LEN: u64 = 256 << 20;

/// Blocks of device memory for tensors of these lengths, which come in the order of their file:
/// the length of each block, and where each tensor goes. With `apart`, every tensor has its own.
pub fn blocks(lens: &[u64], apart: bool) -> (Vec<u64>, Vec<(usize, u64)>) {
    let mut blocks: Vec<u64> = Vec::new();
    let mut places = Vec::with_capacity(lens.len());
    for &len in lens {
        let start = blocks.last().map(|end| end.next_multiple_of(ALIGNMENT as u64));
        let fits = |start: &u64| !apart && start.saturating_add(len) <= BLOCK_LEN;
        match (start.filter(fits), blocks.last_mut()) {
            (Some(start), Some(end)) => {
                *end = start + len;
                places.push((blocks.len() - 1, start));
            }
            _ => {
                blocks.push(len);
                places.push((blocks.len() - 1, 0));
            }
        }
    }
    (blocks, places)
}
