//! Blocks of host memory, each for many tensors. `unsafe` is allowed in this file: it hands out
//! bytes that were written as bytes that have a value.
//!
//! The first touch of new memory is an expensive part of a load: each page costs a page fault. A
//! copy into untouched 4 KiB pages ran at a third of the speed of one into huge pages. So a load
//! allocates few, large blocks and asks for huge pages, and its readers touch the pages as they
//! read.
//!
//! A block lives as long as the last tensor in it. A large tensor that is freed earlier returns its
//! own pages to the system at once.
#![allow(unsafe_code)]

use std::mem::MaybeUninit;
use std::ptr::NonNull;
use std::sync::{Arc, Weak};

use super::block::{BlockMemory, HeapUnit, Owner, check_filled};
use super::host_buffer::HostBuffer;
use super::mapping::{HUGE_PAGE, Mapping};
use super::spare_blocks::SpareBlocks;
use crate::error::{Error, Result};
use crate::fallible::try_with_capacity;
use crate::sys::{FilledRanges, zero_fill};

/// Tensors are aligned like those of torch's own allocator.
pub const ALIGNMENT: usize = 64;
/// Smaller blocks come from the heap, which reuses pages that were touched before. Fresh pages, and
/// even one huge page, take longer to clear than such a block takes to read. A tensor of 2 MiB and
/// its header are such a block.
const OWN_MAPPING_FROM: usize = HUGE_PAGE + (64 << 10);

/// A block of memory that is being filled: exclusively owned until [`Arena::freeze`].
pub struct Arena {
    memory: BlockMemory,
    len: usize,
    /// The bytes that were written; None if all have a value from the start.
    filled: Option<FilledRanges>,
}

impl Arena {
    /// Allocates `len` bytes. Those of a small block have no value before they are written.
    pub fn new(len: usize) -> Result<Self> {
        if len >= OWN_MAPPING_FROM {
            return Ok(Arena { len, ..Self::of(Mapping::new(len)?) });
        }
        let padding = ALIGNMENT - align_of::<HeapUnit>();
        let count = (len + padding).div_ceil(size_of::<HeapUnit>());
        let mut units = try_with_capacity::<MaybeUninit<HeapUnit>>(count, "tensors")?;
        // SAFETY: there is room for them, and they need no value.
        unsafe { units.set_len(count) };
        let address = units.as_ptr().addr();
        let start = address.next_multiple_of(ALIGNMENT) - address;
        Ok(Self::unfilled(BlockMemory::Heap(units, start), len))
    }

    /// Allocates `len` zeroed bytes in a block of their own.
    pub fn zeroed(len: usize) -> Result<HostBuffer> {
        let mut arena = Self::new(len)?;
        if let (bytes, Some(filled)) = arena.lend() {
            filled.add(zero_fill(bytes));
        }
        let mut whole = arena.freeze(&[(0, len)])?;
        whole.pop().ok_or_else(|| Error::Bug("a block without a buffer".to_owned()))
    }

    /// A mapping, whose bytes have the values that they have there.
    pub fn of(mapping: Mapping) -> Self {
        let len = mapping.size();
        Arena { memory: BlockMemory::Mapped(mapping), len, filled: None }
    }

    /// The first `len` bytes of a mapping whose present values are not to be seen.
    pub fn reusing(mapping: Mapping, len: usize) -> Self {
        let len = len.min(mapping.size());
        Self::unfilled(BlockMemory::Mapped(mapping), len)
    }

    fn unfilled(mut memory: BlockMemory, len: usize) -> Self {
        let start = memory.bytes_mut().as_ptr().addr();
        Arena { memory, len, filled: Some(FilledRanges::none(start..start + len)) }
    }

    /// Lends all of the bytes, to be written to, and what is to know of the written ones; None if it
    /// need not know.
    pub fn lend(&mut self) -> (&mut [MaybeUninit<u8>], Option<&FilledRanges>) {
        let bytes = self.memory.bytes_mut().get_mut(..self.len).unwrap_or(&mut []);
        (bytes, self.filled.as_ref())
    }

    /// Splits the block into buffers that share its ownership. Ranges are `(offset, len)` within
    /// the block; an error if they overlap or lie beyond it, or if some of their bytes were not
    /// written.
    pub fn freeze(self, ranges: &[(usize, usize)]) -> Result<Vec<HostBuffer>> {
        let (owner, base) = self.shared(ranges, Weak::new())?;
        if let Some(filled) = &owner.filled {
            for &(offset, len) in ranges {
                let start = base.as_ptr().addr() + offset;
                check_filled(filled, &(start..start + len))?;
            }
        }
        let buffers = ranges.iter().map(|&(offset, len)| {
            // SAFETY: `offset` lies within the block that `base` begins, and no other range has
            // these bytes (`shared`); they have values, as checked above.
            unsafe { HostBuffer::new(base.add(offset), len, Arc::clone(&owner)) }
        });
        Ok(buffers.collect())
    }

    /// Returns what keeps the memory alive, and its first byte. An error if ranges overlap or lie
    /// beyond the block. `home`: where the memory goes when nothing uses it any more.
    pub(super) fn shared(
        mut self,
        ranges: &[(usize, usize)],
        home: Weak<SpareBlocks>,
    ) -> Result<(Arc<Owner>, NonNull<u8>)> {
        let len = self.len;
        let mut order = ranges.to_vec();
        order.sort_unstable();
        let mut end = 0;
        for (offset, size) in order {
            if offset < end || offset.checked_add(size).is_none_or(|e| e > len) {
                return Err(Error::Bug(format!(
                    "buffer at {offset} of {size} bytes in a block of {len}"
                )));
            }
            end = offset + size;
        }
        let base = NonNull::from(self.memory.bytes_mut()).cast::<u8>();
        Ok((Arc::new(Owner { memory: Some(self.memory), filled: self.filled, home }), base))
    }
}
