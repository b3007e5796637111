//! CRC-32 and SHA-256 of one tensor, fed in pieces by many threads in any order.
//!
//! CRC-32 values of pieces combine, so each thread computes that of its own piece while the piece
//! is in its cache. SHA-256 must see the pieces in order: whoever brings the piece that is next
//! hashes it, and every piece that waits behind it, while other threads go on with other pieces.

use std::collections::BTreeMap;
use std::sync::{Mutex, MutexGuard, PoisonError};

use sha2::{Digest as _, Sha256};

use crate::error::{Error, Result};
use crate::format::header::{Algorithm, Header};
use crate::format::index::Entry;
use crate::save::Data;

/// Both hashes of one tensor.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Digests {
    /// CRC-32 of zlib.
    pub crc: u32,
    /// SHA-256.
    pub sha: [u8; 32],
}

/// Hashes a header's covered bytes and all of its data at once.
pub fn digest(header: &[u8], data: &[u8]) -> Digests {
    let mut crc = crc32fast::hash(header);
    let mut sha = Sha256::new_with_prefix(header);
    for chunk in data.chunks(CHUNK) {
        crc = combined(crc, chunk);
        sha.update(chunk);
    }
    Digests { crc, sha: sha.finalize().into() }
}

/// Both algorithms pass over this much while it is in the cache.
const CHUNK: usize = 256 << 10;

fn combined(crc: u32, bytes: &[u8]) -> u32 {
    let mut hasher = crc32fast::Hasher::new_with_initial(crc);
    hasher.update(bytes);
    hasher.finalize()
}

/// Collects the pieces of one tensor.
pub struct PiecewiseHash<'a> {
    data_len: u64,
    state: Mutex<State<'a>>,
}

struct State<'a> {
    /// Absent until the header is known, and while a thread is hashing.
    sha: Option<Sha256>,
    crc: crc32fast::Hasher,
    /// Pieces that wait for their turn, by their position in the data.
    waiting: BTreeMap<u64, (&'a [u8], crc32fast::Hasher)>,
    next: u64,
}

impl<'a> PiecewiseHash<'a> {
    /// A hash over a header and `data_len` bytes of data.
    pub fn new(data_len: u64) -> Self {
        let state = State { sha: None, crc: crc32fast::Hasher::new(), waiting: BTreeMap::new(), next: 0 };
        PiecewiseHash { data_len, state: Mutex::new(state) }
    }

    fn lock(&self) -> MutexGuard<'_, State<'a>> {
        self.state.lock().unwrap_or_else(PoisonError::into_inner)
    }

    /// Brings the header's covered bytes. Returns the digests if they are now complete.
    pub fn header(&self, bytes: &[u8]) -> Option<Digests> {
        let mut state = self.lock();
        state.crc.update(bytes);
        state.sha = Some(Sha256::new_with_prefix(bytes));
        self.advance(state)
    }

    /// Brings the data from `start` on. Returns the digests if they are now complete.
    pub fn data(&self, start: u64, bytes: &'a [u8]) -> Option<Digests> {
        let mut crc = crc32fast::Hasher::new();
        crc.update(bytes);
        let mut state = self.lock();
        state.waiting.insert(start, (bytes, crc));
        self.advance(state)
    }

    fn advance<'g>(&'g self, mut state: MutexGuard<'g, State<'a>>) -> Option<Digests> {
        let mut sha = state.sha.take()?;
        loop {
            if state.next == self.data_len {
                let crc = state.crc.clone().finalize();
                return Some(Digests { crc, sha: sha.finalize().into() });
            }
            let next = state.next;
            let Some((bytes, crc)) = state.waiting.remove(&next) else {
                state.sha = Some(sha);
                return None;
            };
            drop(state);
            sha.update(bytes);
            state = self.lock();
            state.crc.combine(&crc);
            state.next += bytes.len() as u64;
        }
    }
}

/// Compares what was computed with what the header says. A header without hashes fails.
pub fn verify(digests: &Digests, header: &Header, entry: &Entry, uri: &str) -> Result<()> {
    if header.hashes.is_empty() {
        return Err(Error::NoHash { name: entry.name.to_string(), uri: uri.to_owned() });
    }
    for hash in &header.hashes {
        let expected = header.hash_value(hash);
        let crc = digests.crc.to_le_bytes();
        let found: &[u8] = match hash.algorithm {
            Algorithm::Crc32 => &crc,
            Algorithm::Sha256 => &digests.sha,
        };
        if expected != found {
            return Err(Error::HashMismatch {
                name: entry.name.to_string(),
                algorithm: hash.algorithm.name(),
                expected: display(hash.algorithm, expected),
                found: display(hash.algorithm, found),
            });
        }
    }
    Ok(())
}

/// Whether a tensor in memory has the header's hashes.
pub fn matches(data: &Data<'_>, header: &Header, entry: &Entry, uri: &str) -> Result<bool> {
    let covered = header.hashed_bytes();
    let digests = match data {
        // The data of a meta tensor are zeros once it was loaded, and nothing was hashed.
        _ if entry.is_meta() => digest(&covered, &[]),
        Data::Meta => return Ok(false),
        Data::Bytes(bytes) => digest(&covered, bytes),
        Data::Deferred(bring) => digest(&covered, (*bring()?).as_ref()),
    };
    match verify(&digests, header, entry, uri) {
        Ok(()) => Ok(true),
        Err(Error::HashMismatch { .. }) => Ok(false),
        Err(other) => Err(other),
    }
}

/// CRC-32 in decimal and SHA-256 in hexadecimal, as the old package's messages have them.
fn display(algorithm: Algorithm, value: &[u8]) -> String {
    match (algorithm, value.first_chunk()) {
        (Algorithm::Crc32, Some(bytes)) => u32::from_le_bytes(*bytes).to_string(),
        _ => value.iter().map(|b| format!("{b:02x}")).collect(),
    }
}

#[cfg(test)]
#[allow(clippy::unwrap_used, clippy::indexing_slicing)]
mod tests {
    use super::*;

    #[test]
    fn pieces_in_any_order_give_the_hash_of_the_whole() {
        let data: Vec<u8> = (0..100_000u32).map(|i| (i * 7) as u8).collect();
        let whole = digest(b"header", &data);
        assert_eq!(whole.crc, crc32fast::hash(&[b"header".as_slice(), &data].concat()));
        let cuts = [0, 1, 700, 65_536, 99_999, 100_000];
        let pieces: Vec<(u64, &[u8])> =
            cuts.windows(2).map(|w| (w[0] as u64, &data[w[0]..w[1]])).collect();
        for first in 0..=pieces.len() {
            let hash = PiecewiseHash::new(data.len() as u64);
            let mut found = None;
            for i in (0..pieces.len()).rev() {
                if i + 1 == first {
                    found = found.or(hash.header(b"header"));
                }
                found = found.or(hash.data(pieces[i].0, pieces[i].1));
            }
            if first == 0 {
                found = found.or(hash.header(b"header"));
            } else if first > pieces.len() {
                unreachable!();
            }
            assert_eq!(found, Some(whole), "header before piece {first}");
        }
        assert_eq!(PiecewiseHash::new(0).header(b"h"), Some(digest(b"h", b"")));
    }
}
