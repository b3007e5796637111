//! Plans of direct reads, which go straight to the caller's memory or through a buffer. `unsafe` is
//! allowed in this file: it handles raw pointers to the caller's memory.
#![allow(unsafe_code)]
// A broken invariant ends the call by a panic that its boundary catches.
#![allow(clippy::indexing_slicing)]

use crate::mem::{Buffers, DISK_BLOCK};

/// Minimum bytes of a read that goes straight to memory. Fewer bytes go through the buffer together
/// with their neighbours.
const STRAIGHT_FROM: usize = 64 << 10;

/// Memory of the caller.
#[derive(Clone, Copy)]
pub struct CallerMemory(pub *mut u8);

/// One read.
pub struct PlannedRead {
    /// The position of its first block in the file.
    pub position: u64,
    /// Bytes that it reads: whole blocks.
    pub len: usize,
    /// The wanted bytes: `wanted` of them, after the first `skip`.
    pub skip: usize,
    pub wanted: usize,
    /// Its destination if it does not go through the buffer. Then all of its bytes are wanted.
    pub straight: Option<CallerMemory>,
}

impl PlannedRead {
    /// Cuts the first `wanted` bytes of buffers, which lie at `offset` of a file, into reads of at
    /// most `longest` bytes.
    pub fn all(
        offset: u64,
        ranges: &[libc::iovec],
        wanted: usize,
        longest: usize,
    ) -> Vec<PlannedRead> {
        let phase = offset.to_le_bytes();
        // The position of the offset within its block of the file.
        let phase = usize::from(u16::from_le_bytes([phase[0], phase[1]])) % DISK_BLOCK;
        let mut plan = ReadPlan { offset, phase, longest, reads: Vec::new() };
        // Positions relative to the offset: the start of the bytes that go through the buffer next, and
        // the start of the range.
        let (mut from, mut at) = (0, 0);
        for range in ranges {
            let len = range.iov_len.min(wanted - at);
            let head = (DISK_BLOCK - (phase + at) % DISK_BLOCK) % DISK_BLOCK;
            let straight = len.saturating_sub(head) / DISK_BLOCK * DISK_BLOCK;
            let alike = (range.iov_base.addr() + head).is_multiple_of(DISK_BLOCK);
            if alike && straight >= STRAIGHT_FROM {
                plan.through_buffer(from, at + head);
                plan.straight(at + head, straight, range.iov_base.cast::<u8>().wrapping_add(head));
                from = at + head + straight;
            }
            at += len;
        }
        plan.through_buffer(from, at);
        plan.reads
    }

    /// Records that `read` bytes were read; `block` is the buffer. Returns how many of them were
    /// wanted.
    pub fn take(&self, block: &[u8], read: usize, into: &mut Buffers<'_>) -> usize {
        match self.straight {
            Some(_) => {
                let read = read.min(self.wanted);
                // SAFETY: these are the next bytes of the buffers (`all`), and they were written.
                unsafe { into.advance(read) };
                read
            }
            None => {
                let end = read.min(self.skip + self.wanted);
                into.fill_from(&block[self.skip.min(end)..end])
            }
        }
    }
}

/// A plan under construction. Its positions are relative to the offset.
struct ReadPlan {
    offset: u64,
    /// The position of the offset within its block.
    phase: usize,
    longest: usize,
    reads: Vec<PlannedRead>,
}

impl ReadPlan {
    fn straight(&mut self, at: usize, len: usize, to: *mut u8) {
        for start in (0..len).step_by(self.longest) {
            let wanted = self.longest.min(len - start);
            let straight = Some(CallerMemory(to.wrapping_add(start)));
            let position = self.offset + (at + start) as u64;
            self.reads.push(PlannedRead { position, len: wanted, skip: 0, wanted, straight });
        }
    }

    fn through_buffer(&mut self, mut from: usize, end: usize) {
        while from < end {
            let skip = (self.phase + from) % DISK_BLOCK;
            let wanted = (self.longest - skip).min(end - from);
            let position = self.offset + from as u64 - skip as u64;
            let len = (skip + wanted).next_multiple_of(DISK_BLOCK);
            self.reads.push(PlannedRead { position, len, skip, wanted, straight: None });
            from += wanted;
        }
    }
}
