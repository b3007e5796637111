//! The memory of blocks, and what keeps it alive. `unsafe` is allowed in this file: it sees memory
//! as bytes that need no value.
#![allow(unsafe_code)]

use std::mem::MaybeUninit;
use std::ops::Range;
use std::sync::Weak;

use super::mapping::Mapping;
use super::spare_blocks::SpareBlocks;
use crate::error::{Error, Result};
use crate::sys::{FilledRanges, as_uninit};

/// The memory of a block.
pub enum BlockMemory {
    /// Small blocks, and the position of their first byte. With a mapping for each, a process would
    /// soon exceed its limit of mappings. They are aligned to `ALIGNMENT` by hand: older releases of
    /// glibc do not reuse memory that was allocated with more than malloc's own alignment, so that a
    /// process grows with each block.
    Heap(Vec<MaybeUninit<HeapUnit>>, usize),
    /// Others.
    Mapped(Mapping),
}

/// A unit of heap memory, aligned as malloc aligns.
pub type HeapUnit = u128;

impl BlockMemory {
    pub fn bytes_mut(&mut self) -> &mut [MaybeUninit<u8>] {
        match self {
            BlockMemory::Heap(units, start) => {
                let len = size_of_val(units.as_slice());
                // SAFETY: the same bytes, with or without values, borrowed exclusively through
                // `self`.
                let bytes =
                    unsafe { std::slice::from_raw_parts_mut(units.as_mut_ptr().cast(), len) };
                bytes.get_mut(*start..).unwrap_or(&mut [])
            }
            BlockMemory::Mapped(mapping) => as_uninit(mapping.bytes_mut()),
        }
    }
}

/// Keeps the memory of a block alive; its bytes are not accessed through this.
pub struct Owner {
    /// Some until it is dropped.
    pub memory: Option<BlockMemory>,
    /// The bytes that were written; None if all have a value.
    pub filled: Option<FilledRanges>,
    /// The place of the memory when nothing uses it any more.
    pub home: Weak<SpareBlocks>,
}

impl Owner {
    /// True if it is a mapping.
    pub fn is_mapped(&self) -> bool {
        matches!(self.memory, Some(BlockMemory::Mapped(_)))
    }
}

impl Drop for Owner {
    fn drop(&mut self) {
        if let (Some(BlockMemory::Mapped(mapping)), Some(home)) =
            (self.memory.take(), self.home.upgrade())
        {
            home.give(mapping);
        }
    }
}

/// Refuses to hand out bytes of which some were not written.
pub fn check_filled(filled: &FilledRanges, range: &Range<usize>) -> Result<()> {
    let bug = || Error::Bug("a tensor of which some bytes were not read".to_owned());
    filled.contain(range).then_some(()).ok_or_else(bug)
}
