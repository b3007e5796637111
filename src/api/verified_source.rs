//! Sources whose bytes were compared with a published checksum. They are read once more for the
//! tensors, and only the compared bytes are handed out.

use std::io::IoSlice;
use std::sync::atomic::{AtomicU64, Ordering};
use std::sync::{Arc, OnceLock};

use crate::cancel::{Cancel, RetryableOnce};
use crate::codec::sha256::Sha256;
use crate::error::{Error, Result};
use crate::fallible::try_zeroed;
use crate::io::{Capabilities, Facts, ReadAt, read_exact_at};
use crate::mem::{Buffers, FilledPart};
use crate::sys::to_usize;

/// Bytes of a chunk, which has a hash of its own.
pub const CHUNK: u64 = 64 << 10;
/// Bytes of the hash of a chunk: the first half of its SHA-256.
const HASH_LEN: usize = 16;

/// The hashes of the chunks of a file, in order.
#[derive(Default)]
pub struct ChunkHashes(Vec<[u8; HASH_LEN]>);

impl ChunkHashes {
    /// The hashes of bytes that begin with a chunk.
    pub fn of(bytes: &[u8]) -> Result<Self> {
        let mut hashes = ChunkHashes::default();
        for chunk in bytes.chunks(to_usize(CHUNK)) {
            hashes.0.push(hash(&[IoSlice::new(chunk)]));
        }
        Ok(hashes)
    }

    /// Adds those of the bytes that follow.
    pub fn append(&mut self, mut next: Self) -> Result<()> {
        self.0.reserve(next.0.len());
        self.0.append(&mut next.0);
        Ok(())
    }
}

fn hash(bytes: &[IoSlice<'_>]) -> [u8; HASH_LEN] {
    let mut sha = Sha256::default();
    bytes.iter().for_each(|part| sha.update(part));
    let mut half = [0; HASH_LEN];
    half.copy_from_slice(sha.finish().split_at(HASH_LEN).0);
    half
}

/// A file that was compared with a checksum.
pub struct ComparedFile {
    pub len: u64,
    /// The checksum, for messages.
    pub checksum: String,
    pub chunks: ChunkHashes,
}

/// The files that were compared, each at the number of its source.
pub type ComparedFiles = Vec<Option<Arc<ComparedFile>>>;

/// The state of the comparison, which handles of the same file share.
#[derive(Default)]
pub struct HubVerification {
    pub once: RetryableOnce,
    pub compared: OnceLock<ComparedFiles>,
}

/// Hands out the compared bytes of a source, and fails where it has others now. It cannot be
/// mapped, because the bytes of a mapping may change later.
pub struct VerifiedSource {
    facts: Facts,
    source: Arc<dyn ReadAt>,
    compared: Arc<ComparedFile>,
}

impl VerifiedSource {
    pub fn new(source: Arc<dyn ReadAt>, compared: Arc<ComparedFile>) -> Self {
        let mut facts = Facts { is_local: false, ..source.facts().clone() };
        // It needs no comparison any more.
        if let Some(server) = &mut facts.server {
            server.checksum = None;
        }
        VerifiedSource { facts, source, compared }
    }

    /// Returns the position of the first chunk that differs, of those that begin at `start`.
    fn difference(&self, start: u64, filled: &FilledPart<'_>) -> Option<u64> {
        let count = filled.count() as u64;
        let mut at = 0;
        while at < count {
            let end = count.min(at + CHUNK);
            let position = start + at;
            let number = to_usize(position / CHUNK);
            let (from, to) = (to_usize(at), to_usize(end));
            if self.compared.chunks.0.get(number) != Some(&hash(&filled.bytes(from..to))) {
                return Some(position);
            }
            at = end;
        }
        None
    }
}

impl ReadAt for VerifiedSource {
    fn facts(&self) -> &Facts {
        &self.facts
    }

    fn capabilities(&self) -> Capabilities {
        self.source.capabilities()
    }

    fn read_at(
        &self,
        offset: u64,
        buffers: &mut Buffers<'_>,
        cancel: &dyn Cancel,
    ) -> Result<usize> {
        const SAME: u64 = u64::MAX;
        let len = self.compared.len;
        let end = offset.saturating_add(buffers.remaining() as u64).min(len);
        if end <= offset {
            return Ok(0);
        }
        let (start, stop) = (offset - offset % CHUNK, end.next_multiple_of(CHUNK).min(len));
        let zeroed = |bytes: u64| try_zeroed(to_usize(bytes), || "a chunk".to_owned());
        let (mut before, mut after) = (zeroed(offset - start)?, zeroed(stop - end)?);
        let difference = AtomicU64::new(SAME);
        let compare = |filled: &FilledPart<'_>, last: bool| {
            // A read that has failed reports its own error.
            if last && filled.count() as u64 == stop - start {
                let found = self.difference(start, filled).unwrap_or(SAME);
                difference.store(found, Ordering::Relaxed);
            }
        };
        let wanted = to_usize(end - offset);
        let read = buffers.tee(wanted, (&mut before, &mut after), compare, |part| {
            let what = || "bytes that were compared with a checksum".to_owned();
            read_exact_at(&*self.source, start, part, &what, cancel)
        })?;
        match difference.into_inner() {
            SAME => Ok(read),
            at => Err(Error::FileHashMismatch {
                uri: self.facts.uri.clone(),
                expected: self.compared.checksum.as_str().into(),
                found: format!(
                    "changed since they were compared with it: those from {at} to {} differ",
                    len.min(at + CHUNK)
                )
                .into(),
                kept: Box::default(),
            }),
        }
    }
}

#[cfg(test)]
#[allow(clippy::cast_possible_truncation)]
mod tests {
    use super::*;
    use crate::cancel::Never;
    use crate::io::MemorySource;

    #[test]
    fn only_the_compared_bytes_are_handed_out() {
        let bytes: Vec<u8> = (0..200_000u32).map(|number| (number % 251) as u8).collect();
        let compared = Arc::new(ComparedFile {
            len: bytes.len() as u64,
            checksum: "abc".to_owned(),
            chunks: ChunkHashes::of(&bytes).unwrap(),
        });
        let verified = |bytes: Vec<u8>| {
            let source = Arc::new(MemorySource::new(bytes, "f".to_owned()));
            VerifiedSource::new(source, Arc::clone(&compared))
        };
        let mut other = bytes.clone();
        if let Some(byte) = other.get_mut(70_000) {
            *byte ^= 1;
        }
        let (same, other) = (verified(bytes.clone()), verified(other));
        for (offset, len) in [(0, 1), (65_536, 65_536), (60_000, 140_000), (199_999, 9), (5, 100)] {
            let mut into = vec![0; len];
            let read = same.read_at(offset, &mut Buffers::from_slice(&mut into), &Never).unwrap();
            let start = usize::try_from(offset).unwrap();
            assert_eq!(into.get(..read), bytes.get(start..bytes.len().min(start + len)));
            let read = other.read_at(offset, &mut Buffers::from_slice(&mut into), &Never);
            if offset < 131_072 && offset + len as u64 > 65_536 {
                let error = read.unwrap_err().to_string();
                let what = "the hub publishes abc, the bytes have changed since they were compared \
                            with it: those from 65536 to 131072 differ";
                assert!(error.contains(what), "{error}");
            } else {
                assert!(read.unwrap() > 0);
            }
        }
        assert_eq!(
            same.read_at(200_000, &mut Buffers::from_slice(&mut [0; 3]), &Never).unwrap(),
            0
        );
    }
}
