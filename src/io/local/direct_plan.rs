//! Plans of direct reads, which go straight to the caller's memory or through a buffer. `unsafe` is
//! allowed in this file: it handles raw pointers to the caller's memory.
#![allow(unsafe_code)]

use crate::mem::{Buffers, DISK_BLOCK};
use crate::sys::to_usize;

/// Minimum bytes of a read that goes straight to memory. Fewer bytes go through the buffer together
/// with their neighbours.
const MIN_DIRECT_LEN: usize = 64 << 10;

/// One read.
pub struct PlannedRead {
    /// The position of its first block in the file.
    pub position: u64,
    /// Bytes that it reads: whole blocks.
    pub len: usize,
    /// The wanted bytes: `wanted` of them, after the first `skip`.
    pub skip: usize,
    pub wanted: usize,
    /// The caller's memory that it goes to, if not through the buffer. Then all of its bytes are
    /// wanted.
    pub destination: Option<*mut u8>,
}

impl PlannedRead {
    /// Cuts the first `wanted` bytes of buffers, which lie at `offset` of a file, into reads of at
    /// most `max_len` bytes.
    pub fn plan(offset: u64, ranges: &[libc::iovec], wanted: usize, max_len: usize) -> Vec<Self> {
        // The position of the offset within its block of the file.
        let phase = to_usize(offset % DISK_BLOCK as u64);
        let mut reads = Vec::new();
        // Adds the bytes from `start` to `end`, relative to the offset. Those that go straight to
        // memory are whole blocks.
        let mut add = |start: usize, end: usize, to: Option<*mut u8>| {
            let mut from = start;
            while from < end {
                let skip = (phase + from) % DISK_BLOCK;
                let wanted = (max_len - skip).min(end - from);
                let position = offset + from as u64 - skip as u64;
                let len = (skip + wanted).next_multiple_of(DISK_BLOCK);
                let destination = to.map(|to| to.wrapping_add(from - start));
                reads.push(PlannedRead { position, len, skip, wanted, destination });
                from += wanted;
            }
        };
        // Positions relative to the offset: the start of the bytes that go through the buffer next,
        // and the start of the range.
        let (mut from, mut at) = (0, 0);
        for range in ranges {
            let len = range.iov_len.min(wanted - at);
            let unaligned = (DISK_BLOCK - (phase + at) % DISK_BLOCK) % DISK_BLOCK;
            let direct_len = len.saturating_sub(unaligned) / DISK_BLOCK * DISK_BLOCK;
            let is_aligned = (range.iov_base.addr() + unaligned).is_multiple_of(DISK_BLOCK);
            if is_aligned && direct_len >= MIN_DIRECT_LEN {
                add(from, at + unaligned, None);
                from = at + unaligned + direct_len;
                let to = range.iov_base.cast::<u8>().wrapping_add(unaligned);
                add(at + unaligned, from, Some(to));
            }
            at += len;
        }
        add(from, at, None);
        reads
    }

    /// Records that `read` bytes were read; `block` is the buffer. Returns how many of them were
    /// wanted.
    pub fn record(&self, block: &[u8], read: usize, into: &mut Buffers<'_>) -> usize {
        match self.destination {
            Some(_) => {
                let read = read.min(self.wanted);
                // SAFETY: these are the next bytes of the buffers (`all`), and they were written.
                unsafe { into.advance(read) };
                read
            }
            None => {
                let end = read.min(self.skip + self.wanted);
                into.fill_from(block.get(self.skip.min(end)..end).unwrap_or(&[]))
            }
        }
    }
}
