//! What one thread reads with one call, and in which steps.

use crate::transform::hash::SMALL;

/// When hashes are verified, a step of reading: a part of the second-level cache of a core.
pub const BITE: u64 = 512 << 10;

/// One contiguous range of the file and where its bytes go.
pub struct Job<'a> {
    /// File position of the first byte.
    pub offset: u64,
    /// How many bytes.
    pub len: u64,
    /// Where they go, in order.
    pub pieces: Vec<Destination<'a>>,
}

impl<'a> Job<'a> {
    /// The same in shorter steps, so that the CRC of each finds its bytes in the cache. Only
    /// data of large tensors are cut.
    pub fn bites(self, step: u64) -> Vec<Job<'a>> {
        let mut bites: Vec<Job<'a>> = Vec::new();
        let mut offset = self.offset;
        let mut push = |piece: Destination<'a>, joined: bool| {
            let len = piece.len();
            match bites.last_mut().filter(|bite| joined || bite.len < step) {
                Some(bite) => {
                    bite.pieces.push(piece);
                    bite.len += len;
                }
                None => bites.push(Job { offset, len, pieces: vec![piece] }),
            }
            offset += len;
        };
        let mut behind_header = false;
        for piece in self.pieces {
            let is_header = matches!(piece, Destination::Header { .. });
            match piece {
                Destination::Data { tensor, mut start, bytes } if bytes.len() as u64 > SMALL => {
                    for bytes in bytes.chunks_mut(usize::try_from(step).unwrap_or(usize::MAX)) {
                        let len = bytes.len() as u64;
                        push(Destination::Data { tensor, start, bytes }, false);
                        start += len;
                    }
                }
                // Data stay with their header, because a small tensor is hashed at once.
                other => push(other, behind_header),
            }
            behind_header = is_header;
        }
        bites
    }
}

impl Destination<'_> {
    fn len(&self) -> u64 {
        match self {
            Destination::Header { raw, .. } => raw.len() as u64,
            Destination::Data { bytes, .. } => bytes.len() as u64,
            Destination::Gap(len) => *len as u64,
        }
    }
}

/// Where some bytes of a job go.
pub enum Destination<'a> {
    Header { tensor: usize, raw: Box<[u8]>, in_place: Option<&'a [u8]> },
    Data { tensor: usize, start: u64, bytes: &'a mut [u8] },
    Gap(usize),
}
