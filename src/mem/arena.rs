//! Blocks of host memory, each for many tensors. `unsafe` is allowed in this file: it shares mapped
//! memory among buffers.
//!
//! The first touch of new memory is an expensive part of a load: each page costs a page fault. A
//! copy into untouched 4 KiB pages ran at a third of the speed of one into huge pages. So a load
//! allocates few, large blocks and asks for huge pages, and its readers touch the pages as they
//! read.
//!
//! A block lives as long as the last tensor in it. A large tensor that is freed earlier returns its
//! own pages to the system at once.
#![allow(unsafe_code)]

use std::collections::BTreeMap;
use std::ptr::NonNull;
use std::sync::Arc;

use memmap2::{Advice, MmapMut, MmapOptions};

use super::DISK_BLOCK;
use super::mapped::MappedFileGuard;
use crate::error::{Error, Result};
use crate::fallible::try_repeat;
use crate::sys::to_usize;

/// Size and alignment of a huge page on x86-64 and, by default, on AArch64.
pub const HUGE_PAGE: usize = 2 << 20;
/// Tensors are aligned like those of torch's own allocator.
pub const ALIGNMENT: usize = 64;
/// Smaller pieces are not worth a system call when they are freed.
const RELEASE_FROM: usize = 1 << 20;
/// Smaller blocks come from the heap. They contain no huge page, and the heap reuses pages that
/// were touched before. In a fresh mapping, each page costs a fault, which for such a block takes
/// longer than reading it.
const MAPPED_FROM: usize = HUGE_PAGE;

/// A block of memory under construction: exclusively owned until [`Arena::freeze`].
pub struct Arena {
    memory: ArenaMemory,
    start: usize,
    len: usize,
}

enum ArenaMemory {
    /// Small blocks. With a mapping for each, a process would soon exceed its limit of mappings.
    /// They are aligned to `ALIGNMENT` by hand: older releases of glibc do not reuse memory that was
    /// allocated with more than malloc's own alignment, so that a process grows with each block.
    Heap(Vec<HeapUnit>),
    /// An anonymous mapping, or a private one of a file: writes to it do not reach the file.
    Mapped(MmapMut, #[allow(dead_code)] Option<MappedFileGuard>),
}

/// A unit of heap memory, aligned as malloc aligns.
type HeapUnit = u128;

impl ArenaMemory {
    fn bytes_mut(&mut self) -> &mut [u8] {
        match self {
            ArenaMemory::Heap(blocks) => {
                let len = size_of_val(blocks.as_slice());
                // SAFETY: integers have no padding; they are all initialised, and borrowed exclusively
                // through `self`.
                unsafe { std::slice::from_raw_parts_mut(blocks.as_mut_ptr().cast::<u8>(), len) }
            }
            ArenaMemory::Mapped(map, _) => map,
        }
    }
}

impl Arena {
    /// Allocates `len` zeroed bytes, aligned to a huge page if they fill one.
    pub fn new(len: usize) -> Result<Self> {
        if len >= MAPPED_FROM {
            return Self::mapped(len);
        }
        let padding = ALIGNMENT - align_of::<HeapUnit>();
        let units = (len + padding).div_ceil(size_of::<HeapUnit>());
        let blocks = try_repeat::<HeapUnit>(0, units, "tensors")?;
        let address = blocks.as_ptr().addr();
        let start = address.next_multiple_of(ALIGNMENT) - address;
        Ok(Arena { memory: ArenaMemory::Heap(blocks), start, len })
    }

    /// Allocates `len` zeroed bytes in a mapping of their own, however few. Only such a block can
    /// be left out of forked processes.
    pub fn mapped(len: usize) -> Result<Self> {
        let out_of_memory =
            |error| Error::OutOfMemory { bytes: len as u64, what: "tensors".to_owned(), error };
        let huge = len >= HUGE_PAGE;
        let mapped = if huge { len.saturating_add(HUGE_PAGE) } else { len };
        let map = MmapOptions::new().len(mapped).map_anon().map_err(out_of_memory)?;
        let address = map.as_ptr().addr();
        let start = if huge { address.next_multiple_of(HUGE_PAGE) - address } else { 0 };
        // Only whole huge pages: a partly used one would waste memory. Kernels without huge pages
        // refuse, which costs speed only. Miri has no such call.
        if huge && !cfg!(miri) {
            let _ = map.advise_range(Advice::HugePage, start, len - len % HUGE_PAGE);
        }
        Ok(Arena { memory: ArenaMemory::Mapped(map, None), start, len })
    }

    /// Maps the first `len` bytes of a file privately. The file must not shrink: touching bytes
    /// that it no longer has ends the process (SIGBUS). No memory is reserved for pages that may be
    /// written to, so that a file may be larger than memory.
    pub fn map_file(file: &std::fs::File, len: u64, uri: &str) -> Result<Self> {
        let len = to_usize(len);
        // SAFETY: the mapping is private: our writes reach neither the file nor another mapping of
        // it. The file's bytes may change under it; that is the documented condition of asking for
        // a mapping, and the bytes are only ever treated as plain numbers.
        let map = unsafe { MmapOptions::new().len(len).no_reserve_swap().map_copy(file) }
            .map_err(|e| Error::io("mapping", uri, e))?;
        let in_use = MappedFileGuard::mark(file).map_err(|e| Error::io("examining", uri, e))?;
        Ok(Arena { memory: ArenaMemory::Mapped(map, Some(in_use)), start: 0, len })
    }

    /// Excludes the block from forked processes. Its addresses are unmapped there, so they must
    /// neither use nor free it. Blocks without a mapping of their own are inherited.
    pub fn leave_out_of_forks(&self) {
        if let ArenaMemory::Mapped(map, _) = &self.memory {
            // If the kernel refuses, a child inherits the pages copy-on-write, which costs memory
            // only.
            let _ = map.advise(Advice::DontFork);
        }
    }

    /// Returns its length in bytes.
    pub fn len(&self) -> usize {
        self.len
    }

    /// True if it has no bytes.
    pub fn is_empty(&self) -> bool {
        self.len == 0
    }

    /// Returns all of the bytes, to be written to.
    pub fn bytes_mut(&mut self) -> &mut [u8] {
        let range = self.start..self.start + self.len;
        self.memory.bytes_mut().get_mut(range).unwrap_or(&mut [])
    }

    /// Splits the block into buffers that share its ownership. Ranges are `(offset, len)` within
    /// the block; overlapping ranges or ranges beyond it are an error.
    pub fn freeze(mut self, ranges: &[(usize, usize)]) -> Result<Vec<HostBuffer>> {
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
        let base = NonNull::from(self.bytes_mut()).cast::<u8>();
        let owner = Arc::new(MemoryOwner(self.memory));
        let buffers = ranges.iter().map(|&(offset, len)| HostBuffer {
            // SAFETY: `offset` lies within the block that `base` begins, as checked above.
            start: unsafe { base.add(offset) },
            len,
            owner: Some(Arc::clone(&owner)),
        });
        Ok(buffers.collect())
    }
}

/// Keeps the memory alive; its bytes are not accessed through this.
struct MemoryOwner(#[allow(dead_code)] ArenaMemory);

/// Bytes that one tensor owns. Dropping it takes no lock and may happen on any thread.
pub struct HostBuffer {
    start: NonNull<u8>,
    len: usize,
    owner: Option<Arc<MemoryOwner>>,
}

// SAFETY: the range is exclusive to this value (checked when it was made), and the mapping that
// holds it is freed with the last of the values that share it, on whatever thread.
unsafe impl Send for HostBuffer {}
// SAFETY: shared access only reads.
unsafe impl Sync for HostBuffer {}

impl HostBuffer {
    /// A buffer without bytes.
    pub fn empty() -> Self {
        HostBuffer { start: NonNull::dangling(), len: 0, owner: None }
    }

    /// Returns the address of the bytes; valid as long as this value lives.
    pub fn as_ptr(&self) -> *mut u8 {
        self.start.as_ptr()
    }

    /// Allocates `len` zeroed bytes in a block of their own.
    pub fn zeroed(len: usize) -> Result<Self> {
        let mut whole = Arena::new(len)?.freeze(&[(0, len)])?;
        whole.pop().ok_or_else(|| Error::Bug("a block without a buffer".to_owned()))
    }

    /// Returns the bytes.
    pub fn bytes(&self) -> &[u8] {
        // SAFETY: exclusive range of live, initialised memory, see the `Send` proof.
        unsafe { std::slice::from_raw_parts(self.start.as_ptr(), self.len) }
    }

    /// Returns the bytes, to be written to.
    pub fn bytes_mut(&mut self) -> &mut [u8] {
        // SAFETY: as above, and borrowed exclusively.
        unsafe { std::slice::from_raw_parts_mut(self.start.as_ptr(), self.len) }
    }

    /// Returns a copy in a block of its own.
    pub fn copied(&self) -> Result<Self> {
        let mut copy = Self::zeroed(self.len)?;
        copy.bytes_mut().copy_from_slice(self.bytes());
        Ok(copy)
    }
}

/// A buffer whose pieces are being filled by several threads.
pub struct UnfilledBuffer {
    buffer: HostBuffer,
    /// The start and end of each piece that was taken.
    taken: BTreeMap<usize, usize>,
}

impl UnfilledBuffer {
    /// Allocates `len` zeroed bytes for data at `position` of a file. They get the same offset
    /// within a disk block as in the file, if that is aligned for tensors. Direct reads can then go
    /// straight there.
    pub fn new(len: usize, position: usize) -> Result<Self> {
        let skip = position % DISK_BLOCK;
        let skip = if len >= MAPPED_FROM && skip.is_multiple_of(ALIGNMENT) { skip } else { 0 };
        let mut whole = Arena::new(len.saturating_add(skip))?.freeze(&[(skip, len)])?;
        let buffer =
            whole.pop().ok_or_else(|| Error::Bug("a block without a buffer".to_owned()))?;
        Ok(UnfilledBuffer { buffer, taken: BTreeMap::new() })
    }

    /// Takes the piece of `len` bytes at `at`. Pieces do not overlap.
    pub fn piece(&mut self, at: usize, len: usize) -> Result<BufferPiece> {
        let end = at.checked_add(len).filter(|&end| end <= self.buffer.len);
        let bug = || Error::Bug(format!("a piece of {len} bytes at {at} of a buffer"));
        let end = end.ok_or_else(bug)?;
        if len > 0 {
            let before = self.taken.range(..end).next_back();
            if before.is_some_and(|(_, before)| *before > at) {
                return Err(bug());
            }
            self.taken.insert(at, end);
        }
        // SAFETY: within the buffer, as checked above.
        let start = unsafe { self.buffer.start.add(at) };
        Ok(BufferPiece { start, len, owner: self.buffer.owner.clone() })
    }

    /// Returns the buffer; an error unless all pieces were dropped.
    pub fn finish(mut self) -> Result<HostBuffer> {
        let in_use = self.buffer.owner.as_mut().is_some_and(|owner| Arc::get_mut(owner).is_none());
        if in_use {
            return Err(Error::Bug("a buffer of which pieces are in use".to_owned()));
        }
        Ok(self.buffer)
    }
}

/// A part of a buffer that is being filled; nothing else reads or writes its bytes.
pub struct BufferPiece {
    start: NonNull<u8>,
    len: usize,
    owner: Option<Arc<MemoryOwner>>,
}

// SAFETY: the range is exclusive to this value until it is dropped (`UnfilledBuffer::piece` gives
// out each byte once, and `UnfilledBuffer::finish` fails before the drop); `owner` keeps the
// memory.
unsafe impl Send for BufferPiece {}
// SAFETY: shared access only reads.
unsafe impl Sync for BufferPiece {}

impl BufferPiece {
    /// Returns the bytes, to be written to.
    pub fn bytes_mut(&mut self) -> &mut [u8] {
        debug_assert!(self.owner.is_some(), "memory that nothing keeps");
        // SAFETY: exclusive range of live, initialised memory, see the `Send` proof.
        unsafe { std::slice::from_raw_parts_mut(self.start.as_ptr(), self.len) }
    }
}

impl AsRef<[u8]> for BufferPiece {
    fn as_ref(&self) -> &[u8] {
        // SAFETY: as above.
        unsafe { std::slice::from_raw_parts(self.start.as_ptr(), self.len) }
    }
}

impl Drop for HostBuffer {
    fn drop(&mut self) {
        let is_mapped =
            self.owner.as_ref().is_some_and(|owner| matches!(owner.0, ArenaMemory::Mapped(..)));
        if self.len < RELEASE_FROM || !is_mapped {
            return;
        }
        let page = crate::sys::page_size();
        let address = self.start.as_ptr().addr();
        let skip = address.next_multiple_of(page) - address;
        let len = self.len.saturating_sub(skip) / page * page;
        if len > 0 {
            // SAFETY: whole pages inside our exclusive range of a private mapping, as checked
            // above, and this value, the only way to them, is going away.
            unsafe { crate::sys::release_pages(self.start.as_ptr().add(skip), len) };
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn short_blocks_come_from_the_heap_unless_mapping_is_requested() {
        let page = crate::sys::page_size();
        for len in [1, page, MAPPED_FROM - 1] {
            let mut heap = Arena::new(len).unwrap();
            assert!(matches!(heap.memory, ArenaMemory::Heap(_)));
            assert!(heap.bytes_mut().as_ptr().addr().is_multiple_of(ALIGNMENT));
            let mut mapped = Arena::mapped(len).unwrap();
            assert!(matches!(mapped.memory, ArenaMemory::Mapped(..)));
            assert!(mapped.bytes_mut().as_ptr().addr().is_multiple_of(page));
        }
        assert!(matches!(Arena::new(MAPPED_FROM).unwrap().memory, ArenaMemory::Mapped(..)));
    }

    #[test]
    fn buffers_are_disjoint_and_outlive_each_other() {
        let mut arena = Arena::new(5 << 20).unwrap();
        arena.bytes_mut()[..3].copy_from_slice(b"abc");
        arena.bytes_mut()[4 << 20] = 7;
        let mut buffers = arena.freeze(&[(0, 2 << 20), (2 << 20, 64), (4 << 20, 1 << 20)]).unwrap();
        assert_eq!(&buffers[0].bytes()[..3], b"abc");
        drop(buffers.remove(0));
        assert_eq!(buffers[1].bytes()[0], 7);
        assert_eq!(buffers[1].bytes().len(), 1 << 20);
    }

    #[test]
    fn pieces_are_disjoint_and_buffer_cannot_finish_before_they_drop() {
        let mut unfilled = UnfilledBuffer::new(100, 5000).unwrap();
        let (mut first, mut last) =
            (unfilled.piece(0, 30).unwrap(), unfilled.piece(50, 50).unwrap());
        assert!(unfilled.piece(99, 1).is_err() && unfilled.piece(100, 1).is_err());
        assert!(unfilled.piece(29, 5).is_err() && unfilled.piece(45, 6).is_err());
        drop(unfilled.piece(30, 20).unwrap());
        first.bytes_mut().fill(1);
        last.bytes_mut().fill(2);
        drop(last);
        assert!(unfilled.finish().is_err());
        let mut unfilled = UnfilledBuffer::new(3, 0).unwrap();
        unfilled.piece(1, 2).unwrap().bytes_mut().fill(7);
        let filled = unfilled.finish().unwrap();
        assert_eq!(
            (filled.bytes(), filled.copied().unwrap().bytes()),
            (&[0, 7, 7][..], &[0, 7, 7][..])
        );
    }

    #[test]
    fn overlapping_or_outlying_ranges_are_refused() {
        for ranges in [&[(0, 5)][..], &[(3, 2)], &[(0, 2), (1, 1)], &[(usize::MAX, 2)]] {
            assert!(Arena::new(4).unwrap().freeze(ranges).is_err());
        }
        assert!(Arena::new(usize::MAX / 2).is_err());
    }
}
