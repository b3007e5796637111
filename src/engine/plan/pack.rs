//! The positions of tensors that share one block of memory.

use crate::mem::ALIGNMENT;

/// `(offset, len)` within a block.
pub type MemoryRange = (usize, usize);

/// Packs buffers one after another, each aligned like torch's own allocations. Returns the
/// ranges and the length of the block, or `None` where they do not fit into the address space
/// or a length is absent.
pub fn pack(lens: impl Iterator<Item = Option<u64>>) -> Option<(Vec<MemoryRange>, usize)> {
    let mut end = 0usize;
    let ranges = lens
        .map(|len| {
            let start = end.checked_next_multiple_of(ALIGNMENT)?;
            let len = usize::try_from(len?).ok()?;
            end = start.checked_add(len)?;
            Some((start, len))
        })
        .collect::<Option<Vec<_>>>()?;
    Some((ranges, end))
}
