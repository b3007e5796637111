//! Buffers that are being filled, piece by piece. `unsafe` is allowed in this file: it shares blocks
//! among pieces.
#![allow(unsafe_code)]

use std::collections::BTreeMap;
use std::mem::MaybeUninit;
use std::ptr::NonNull;
use std::sync::Arc;

use super::DISK_BLOCK;
use super::arena::{ALIGNMENT, Arena};
use super::block::{Owner, check_filled};
use super::host_buffer::HostBuffer;
use super::mapping::{HUGE_PAGE, Mapping};
use super::spare_blocks::SpareBlocks;
use crate::error::{Error, Result};
use crate::sys::FilledRanges;

/// A buffer whose pieces are being filled by several threads.
pub struct UnfilledBuffer {
    start: NonNull<u8>,
    len: usize,
    owner: Arc<Owner>,
    /// The start and end of each piece that was taken.
    taken: BTreeMap<usize, usize>,
}

// SAFETY: its bytes are accessed only through its pieces, each of which has bytes of its own, and
// through the buffer that it becomes when all of these are gone.
unsafe impl Send for UnfilledBuffer {}

impl UnfilledBuffer {
    /// Allocates `len` bytes for data at `position` of a file, of spare memory if there is some. They
    /// get the same offset within a disk block as in the file, if that is aligned for tensors.
    /// Direct reads can then go straight there.
    pub fn new(len: usize, position: usize, spare: &Arc<SpareBlocks>) -> Result<Self> {
        let skip = position % DISK_BLOCK;
        let skip = if len >= HUGE_PAGE && skip.is_multiple_of(ALIGNMENT) { skip } else { 0 };
        let all = len.saturating_add(skip);
        let arena = match spare.take(all) {
            Some(mapping) => Arena::reusing(mapping, all),
            // Of this size, the memory of dropped tensors is used again.
            None if all >= HUGE_PAGE => Arena::of(Mapping::new(all)?),
            None => Arena::new(all)?,
        };
        let (owner, base) = arena.shared(&[(skip, len)], Arc::downgrade(spare))?;
        // SAFETY: within the block, as checked by `shared`.
        let start = unsafe { base.add(skip) };
        Ok(UnfilledBuffer { start, len, owner, taken: BTreeMap::new() })
    }

    /// Takes the piece of `len` bytes at `at`. Pieces do not overlap.
    pub fn piece(&mut self, at: usize, len: usize) -> Result<BufferPiece> {
        let end = at.checked_add(len).filter(|&end| end <= self.len);
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
        let start = unsafe { self.start.add(at) };
        Ok(BufferPiece { start, len, owner: Arc::clone(&self.owner) })
    }

    /// Returns the buffer; an error unless all of its bytes were written and all pieces dropped.
    pub fn finish(mut self) -> Result<HostBuffer> {
        if Arc::get_mut(&mut self.owner).is_none() {
            return Err(Error::Bug("a buffer of which pieces are in use".to_owned()));
        }
        if let Some(filled) = &self.owner.filled {
            let start = self.start.as_ptr().addr();
            check_filled(filled, &(start..start + self.len))?;
        }
        // SAFETY: no piece is left, and the bytes have values, as checked above.
        Ok(unsafe { HostBuffer::new(self.start, self.len, self.owner) })
    }
}

/// A part of a buffer that is being filled; nothing else reads or writes its bytes.
pub struct BufferPiece {
    start: NonNull<u8>,
    len: usize,
    owner: Arc<Owner>,
}

// SAFETY: the range is exclusive to this value until it is dropped (`UnfilledBuffer::piece` gives
// out each byte once, and `UnfilledBuffer::finish` fails before the drop); `owner` keeps the
// memory.
unsafe impl Send for BufferPiece {}
// SAFETY: shared access only reads.
unsafe impl Sync for BufferPiece {}

impl BufferPiece {
    /// Lends the bytes, to be written to, and what is to know of the written ones; None if it need
    /// not know.
    pub fn lend(&mut self) -> (&mut [MaybeUninit<u8>], Option<&FilledRanges>) {
        // SAFETY: exclusive range of live memory, see the `Send` proof.
        let bytes = unsafe { std::slice::from_raw_parts_mut(self.start.as_ptr().cast(), self.len) };
        (bytes, self.owner.filled.as_ref())
    }

    /// Returns the bytes once they were written; none before that.
    pub fn bytes_mut(&mut self) -> &mut [u8] {
        let len = self.written_len();
        // SAFETY: exclusive range of live memory, see the `Send` proof, and the bytes have values.
        unsafe { std::slice::from_raw_parts_mut(self.start.as_ptr(), len) }
    }

    fn written_len(&self) -> usize {
        let start = self.start.as_ptr().addr();
        let range = start..start + self.len;
        let is_filled = self.owner.filled.as_ref().is_none_or(|filled| filled.contain(&range));
        if is_filled { self.len } else { 0 }
    }
}

impl AsRef<[u8]> for BufferPiece {
    fn as_ref(&self) -> &[u8] {
        // SAFETY: as above.
        unsafe { std::slice::from_raw_parts(self.start.as_ptr(), self.written_len()) }
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::sys::zero_fill;

    fn write(piece: &mut BufferPiece, byte: u8) {
        let (bytes, filled) = piece.lend();
        bytes.fill(MaybeUninit::new(byte));
        // SAFETY: written just now.
        let bytes = unsafe { &*(std::ptr::from_ref(bytes) as *const [u8]) };
        filled.into_iter().for_each(|filled| filled.add(bytes));
    }

    #[test]
    fn short_blocks_come_from_the_heap() {
        for len in [1, 4096, HUGE_PAGE - 1, HUGE_PAGE] {
            let buffer = Arena::zeroed(len).unwrap();
            assert!(buffer.as_ptr().addr().is_multiple_of(ALIGNMENT));
            assert!(buffer.bytes().len() == len && buffer.bytes().iter().all(|byte| *byte == 0));
        }
        assert!(Arena::new(usize::MAX / 2).is_err());
    }

    #[test]
    fn buffers_are_disjoint_and_outlive_each_other() {
        let mut arena = Arena::new(5 << 20).unwrap();
        let (bytes, filled) = arena.lend();
        assert!(filled.is_none());
        bytes[..3].copy_from_slice(&[1, 2, 3].map(MaybeUninit::new));
        bytes[4 << 20].write(7);
        let mut buffers = arena.freeze(&[(0, 2 << 20), (2 << 20, 64), (4 << 20, 1 << 20)]).unwrap();
        assert_eq!(&buffers[0].bytes()[..4], [1, 2, 3, 0]);
        drop(buffers.remove(0));
        assert_eq!(buffers[1].bytes()[0], 7);
        assert_eq!(buffers[1].bytes().len(), 1 << 20);
    }

    #[test]
    fn pieces_are_disjoint_and_buffer_cannot_finish_before_they_are_written_and_drop() {
        let spare = Arc::new(SpareBlocks::new(0));
        let mut unfilled = UnfilledBuffer::new(100, 5000, &spare).unwrap();
        let (mut first, last) = (unfilled.piece(0, 30).unwrap(), unfilled.piece(50, 50).unwrap());
        assert!(unfilled.piece(99, 1).is_err() && unfilled.piece(100, 1).is_err());
        assert!(unfilled.piece(29, 5).is_err() && unfilled.piece(45, 6).is_err());
        drop(unfilled.piece(30, 20).unwrap());
        assert_eq!(first.as_ref(), [0; 0], "bytes without values are not shown");
        write(&mut first, 1);
        assert_eq!(first.bytes_mut(), [1; 30]);
        drop(first);
        let in_use = unfilled.finish().err().unwrap();
        assert!(in_use.to_string().contains("in use"), "{in_use}");
        drop(last);
        let mut unfilled = UnfilledBuffer::new(3, 0, &spare).unwrap();
        write(&mut unfilled.piece(1, 2).unwrap(), 7);
        let partly = unfilled.finish().err().unwrap();
        assert!(partly.to_string().contains("not read"), "{partly}");
        let mut unfilled = UnfilledBuffer::new(3, 0, &spare).unwrap();
        write(&mut unfilled.piece(1, 2).unwrap(), 7);
        write(&mut unfilled.piece(0, 1).unwrap(), 6);
        assert_eq!(unfilled.finish().unwrap().bytes(), [6, 7, 7]);
    }

    #[test]
    fn memory_of_dropped_tensors_serves_the_next_ones_without_their_values() {
        let spare = Arc::new(SpareBlocks::new(8 << 20));
        let mut unfilled = UnfilledBuffer::new(3 << 20, 64, &spare).unwrap();
        write(&mut unfilled.piece(0, 3 << 20).unwrap(), 5);
        let buffer = unfilled.finish().unwrap();
        let address = buffer.as_ptr();
        drop(buffer);
        let mut next = UnfilledBuffer::new((3 << 20) - 64, 64, &spare).unwrap();
        let whole = next.piece(0, (3 << 20) - 64).unwrap();
        assert_eq!((whole.start.as_ptr(), whole.as_ref()), (address, &[][..]));
        drop(whole);
        assert!(next.finish().is_err(), "the bytes of the tensor before would be seen");
    }

    #[test]
    fn overlapping_or_outlying_or_unwritten_ranges_are_refused() {
        for ranges in [&[(0, 5)][..], &[(3, 2)], &[(0, 2), (1, 1)], &[(usize::MAX, 2)], &[(0, 1)]] {
            assert!(Arena::new(4).unwrap().freeze(ranges).is_err());
        }
        let mut arena = Arena::new(4).unwrap();
        let (bytes, filled) = arena.lend();
        filled.unwrap().add(zero_fill(bytes.get_mut(1..3).unwrap()));
        assert!(arena.freeze(&[(1, 1), (2, 1), (4, 0)]).is_ok());
    }
}
