//! A compact copy of a header that was read and agreed with the index. It suffices to verify its
//! tensor, at once or later, and is short however long the header is.

use super::hash::{Digests, StreamHash, Verify};
use crate::error::{Error, Result};
use crate::format::catalog::Entry;
use crate::format::tensors::header::{Algorithm, TensorHeader};

/// Maximum covered bytes, without zeros of padding, that are retained as they are.
const MOST_BYTES: usize = 512;
/// Bytes of a header after its padding: the length of the data.
const END_LEN: usize = 8;
const ZEROS: [u8; 4096] = [0; 4096];

/// A compact copy of a header that agreed with the index.
pub struct CompactHeader {
    /// Number of the owning module in `named_modules()` order.
    pub module_index: u16,
    hashes: Box<[HashValue]>,
    covered: CoveredBytes,
}

#[derive(Clone, Copy, PartialEq, Eq)]
struct HashValue {
    algorithm: Algorithm,
    /// The value, followed by zeros if the algorithm's values are shorter.
    value: [u8; 32],
}

/// The part of a header that hashes cover.
enum CoveredBytes {
    /// Its bytes, without the `zeros` zeros of padding before the last [`END_LEN`] bytes.
    Bytes { bytes: Box<[u8]>, zeros: usize },
    /// The state of the hashes after all covered bytes.
    Hashed(Box<StreamHash>),
}

impl CompactHeader {
    /// The header of a tensor whose format has no headers.
    pub fn none() -> Self {
        CompactHeader {
            module_index: 0,
            hashes: Box::default(),
            covered: CoveredBytes::Bytes { bytes: Box::default(), zeros: 0 },
        }
    }

    /// Copies a header. Also returns the bytes of it that hashes cover if `wanted` is true, else
    /// none.
    pub fn of(header: &TensorHeader<'_>, wanted: bool) -> (Self, Vec<u8>) {
        let module_index = header.module_index;
        let hashes = distinct(header);
        let covered = header.covered();
        let (start, end) = covered.split_last_chunk::<END_LEN>().unwrap_or((&[], &[0; END_LEN]));
        let zeros = zeros_at_end(start);
        let bytes = start.get(..start.len() - zeros).unwrap_or(start);
        let compact = if bytes.len() <= MOST_BYTES {
            CoveredBytes::Bytes { bytes: [bytes, end].concat().into(), zeros }
        } else {
            CoveredBytes::Hashed(Box::new(StreamHash::new(&covered, true)))
        };
        let covered = if wanted { covered } else { Vec::new() };
        (CompactHeader { module_index, hashes, covered: compact }, covered)
    }

    /// The hashes that the header states: algorithm and value, as in messages.
    pub fn hashes(&self) -> impl Iterator<Item = (&'static str, String)> + '_ {
        self.hashes.iter().map(|hash| (hash.algorithm.name(), hash.to_string()))
    }

    /// The state of the hashes after the header's covered bytes.
    pub fn start_hash(&self) -> StreamHash {
        match &self.covered {
            CoveredBytes::Hashed(hash) => (**hash).clone(),
            CoveredBytes::Bytes { bytes, zeros } => {
                let (start, end) = bytes.split_last_chunk::<END_LEN>().unwrap_or((bytes, &[0; 8]));
                let mut hash = StreamHash::new(start, true);
                for done in (0..*zeros).step_by(ZEROS.len()) {
                    hash.update(ZEROS.get(..zeros - done).unwrap_or(&ZEROS));
                }
                hash.update(end);
                hash
            }
        }
    }

    /// Compares computed hashes with those of the header. A header without the wanted hash is an
    /// error.
    pub fn verify(&self, digests: &Digests, entry: &Entry, uri: &str, which: Verify) -> Result<()> {
        let wanted = |hash: &&HashValue| which == Verify::All || hash.algorithm == Algorithm::Crc32;
        if !self.hashes.iter().any(|hash| wanted(&hash)) {
            return Err(Error::NoHash { name: entry.name.to_string(), uri: uri.to_owned() });
        }
        for expected in self.hashes.iter().filter(wanted) {
            let found = match expected.algorithm {
                Algorithm::Crc32 => HashValue::new(expected.algorithm, &digests.crc.to_le_bytes()),
                Algorithm::Sha256 => HashValue::new(expected.algorithm, &digests.sha),
            };
            if *expected != found {
                return Err(Error::HashMismatch {
                    name: entry.name.to_string(),
                    algorithm: expected.algorithm.name(),
                    expected: expected.to_string(),
                    found: found.to_string(),
                });
            }
        }
        Ok(())
    }
}

/// The hashes of a header without duplicates, and at most two values per algorithm: of two
/// different values at least one fails anyway.
fn distinct(header: &TensorHeader<'_>) -> Box<[HashValue]> {
    let mut hashes: Vec<HashValue> = Vec::with_capacity(2);
    for (algorithm, at) in header.hashes() {
        let hash = HashValue::new(algorithm, header.raw.get(at).unwrap_or(&[]));
        let same = hashes.iter().filter(|retained| retained.algorithm == hash.algorithm).count();
        if same < 2 && !hashes.contains(&hash) {
            hashes.push(hash);
        }
    }
    hashes.into()
}

fn zeros_at_end(bytes: &[u8]) -> usize {
    // Whole chunks first, which are compared faster than one byte after another.
    let is_zero = |chunk: &&[u8]| ZEROS.get(..chunk.len()) == Some(*chunk);
    let zeros: usize = bytes.rchunks(ZEROS.len()).take_while(is_zero).map(<[u8]>::len).sum();
    let rest = bytes.split_at(bytes.len() - zeros).0;
    zeros + rest.iter().rev().take_while(|byte| **byte == 0).count()
}

impl HashValue {
    fn new(algorithm: Algorithm, bytes: &[u8]) -> Self {
        let mut value = [0; 32];
        for (slot, byte) in value.iter_mut().zip(bytes) {
            *slot = *byte;
        }
        HashValue { algorithm, value }
    }
}

impl std::fmt::Display for HashValue {
    /// Writes CRC-32 in decimal and SHA-256 in hexadecimal, as in messages of the old package.
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        match (self.algorithm, self.value.first_chunk()) {
            (Algorithm::Crc32, Some(bytes)) => write!(f, "{}", u32::from_le_bytes(*bytes)),
            _ => self.value.iter().try_for_each(|byte| write!(f, "{byte:02x}")),
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::codec::hash::digest;
    use crate::format::TensorKind;
    use crate::format::dtype::DType;
    use crate::format::name::Name;
    use crate::format::tensors::header::{Hashes, HeaderDraft};

    /// Headers of many lengths, padded with zeros or with other bytes.
    #[test]
    fn compact_headers_are_short_and_hash_like_the_original() {
        let data = [7; 100];
        for (name_len, padding, fill) in [
            (1, 0, 0),
            (1, 40, 0),
            (1, 2 << 20, 0),
            (1, 4090, 1),
            (1, 2 << 20, 1),
            (500, 5000, 0),
            (60_000, 0, 0),
            (60_000, 70_000, 0),
        ] {
            let dtype = DType::from_name("uint8").unwrap();
            let name = Name::from_key(&"n".repeat(name_len)).unwrap();
            let len = crate::format::tensors::header::encoded_len(
                &name,
                dtype,
                &[100],
                false,
                Hashes::All,
            );
            let entry = Entry {
                name,
                kind: TensorKind::StateDict,
                dtype,
                shape: [100].into(),
                long: false,
                file: 0,
                header_offset: 1000,
                data_offset: 1000 + (len + padding) as u64,
                data_len: 100,
                whole: None,
                strided: false,
            };
            let mut draft = HeaderDraft::new(&entry, 7, Hashes::All, 0).unwrap();
            let end = draft.bytes.len() - END_LEN;
            draft.bytes.get_mut(end - padding..end).unwrap().fill(fill);
            let expected = digest(&draft.bytes, &data, true);
            let whole = draft.bytes.clone();
            let raw = draft.finish(expected.crc, &expected.sha, &[]);
            let header = TensorHeader::parse(&raw, &entry, false).unwrap();
            let (compact, covered) = CompactHeader::of(&header, true);
            assert_eq!((compact.module_index, covered == whole), (7, true));
            let own = size_of::<CompactHeader>() + compact.hashes.len() * size_of::<HashValue>();
            let more = match &compact.covered {
                CoveredBytes::Bytes { bytes, .. } => bytes.len(),
                CoveredBytes::Hashed(_) => size_of::<StreamHash>(),
            };
            assert!(own + more <= 1024, "{own} {more}");
            let verify = |data: &[u8]| {
                let mut hash = compact.start_hash();
                hash.update(data);
                compact.verify(&hash.finish(), &entry, "f", Verify::All)
            };
            verify(&data).unwrap();
            assert!(verify(&data[1..]).is_err());
            compact.verify(&expected, &entry, "f", Verify::All).unwrap();
        }
    }
}
