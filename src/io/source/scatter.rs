//! Bytes that arrive in pieces, put into the buffers that they are for.
// A broken invariant ends the call by a panic that its boundary catches.
#![allow(clippy::indexing_slicing)]

use std::io::IoSliceMut;

/// Buffers that are filled in order.
pub struct Scatter<'b, 'a> {
    buffers: &'b mut [IoSliceMut<'a>],
    at: usize,
    within: usize,
}

impl<'b, 'a> Scatter<'b, 'a> {
    pub fn new(buffers: &'b mut [IoSliceMut<'a>]) -> Self {
        Scatter { buffers, at: 0, within: 0 }
    }

    /// Takes as many of the bytes as there is room for.
    pub fn put(&mut self, mut bytes: &[u8]) -> usize {
        let mut done = 0;
        while let (Some(buffer), false) = (self.buffers.get_mut(self.at), bytes.is_empty()) {
            let room = &mut buffer[self.within..];
            let len = room.len().min(bytes.len());
            let (now, later) = bytes.split_at(len);
            room[..len].copy_from_slice(now);
            (bytes, done) = (later, done + len);
            self.within += len;
            if self.within == buffer.len() {
                (self.at, self.within) = (self.at + 1, 0);
            }
        }
        done
    }
}
