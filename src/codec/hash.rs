//! CRC-32 and SHA-256 of tensors, over header and data as the format defines it.

use super::sha256::Sha256;
use crate::cancel::Cancel;
use crate::error::Result;

/// Both hashes of one tensor.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Digests {
    /// CRC-32 of zlib.
    pub crc: u32,
    /// SHA-256.
    pub sha: [u8; 32],
}

/// The hashes of a file that are compared. A tensor without such a hash is an error.
#[derive(Debug, Clone, Copy, Default, PartialEq, Eq)]
pub enum Verify {
    /// None.
    #[default]
    Nothing,
    /// CRC-32 only, which detects accidental damage and costs little.
    Crc32,
    /// All hashes in the file: CRC-32 and SHA-256.
    All,
}

impl Verify {
    /// `All` if `wanted` is true, else `Nothing`.
    pub fn all_if(wanted: bool) -> Self {
        if wanted { Verify::All } else { Verify::Nothing }
    }
}

/// Maximum size of a tensor that is hashed by the thread that moves it. Larger tensors are hashed
/// by any idle thread: see [`super::HashPool`].
pub const SMALL: u64 = 1024 << 10;

/// Bytes that are hashed between two checks for cancellation: some milliseconds.
const STEP: usize = 8 << 20;

/// Hashes tensors, each given as the covered bytes of its header and its data. SHA-256 hashes two
/// at a time; it is left out if `sha` is false.
pub fn digest_all(tensors: &[(&[u8], &[u8])], sha: bool) -> Vec<Digests> {
    if !sha {
        return tensors.iter().map(|(header, data)| digest(header, data, false)).collect();
    }
    let mut shas: Vec<Option<[u8; 32]>> = vec![None; tensors.len()];
    let mut pair: [Option<(usize, Sha256, &[u8])>; 2] = [None, None];
    let mut queue = tensors.iter().enumerate();
    loop {
        for one in &mut pair {
            if let Some((at, sha, _)) = one.take_if(|(_, _, rest)| rest.is_empty())
                && let Some(slot) = shas.get_mut(at)
            {
                *slot = Some(sha.finish());
            }
            if one.is_none() {
                *one = queue.next().map(|(at, (header, data))| {
                    let mut sha = Sha256::default();
                    sha.update(header);
                    (at, sha, *data)
                });
            }
        }
        match &mut pair {
            [Some((_, first, a)), Some((_, second, b))] => {
                [*a, *b] = Sha256::update_pair([first, second], [a, b]);
                // The longer one continues together with the next tensor, if there is one.
            }
            [Some((_, sha, rest)), None] | [None, Some((_, sha, rest))] => {
                sha.update(rest);
                *rest = &[];
            }
            [None, None] => break,
        }
    }
    let crc = |(header, data): &(&[u8], &[u8])| digest(header, data, false).crc;
    let hashed = tensors.iter().zip(shas);
    hashed.map(|(one, sha)| Digests { crc: crc(one), sha: sha.unwrap_or([0; 32]) }).collect()
}

/// Hashes one tensor; SHA-256 is left out if `sha` is false.
pub fn digest(header: &[u8], data: &[u8], sha: bool) -> Digests {
    let mut hash = StreamHash::new(header, sha);
    hash.update(data);
    hash.finish()
}

/// The hashes of a tensor whose bytes arrive front to back.
#[derive(Clone)]
pub struct StreamHash {
    crc: crc32fast::Hasher,
    sha: Option<Sha256>,
}

impl StreamHash {
    /// Begins with the covered bytes of a header; SHA-256 is left out if `sha` is false.
    pub fn new(header: &[u8], sha: bool) -> Self {
        let sha = sha.then(Sha256::default);
        let mut hash = StreamHash { crc: crc32fast::Hasher::new(), sha };
        hash.update(header);
        hash
    }

    /// Hashes the next bytes.
    pub fn update(&mut self, bytes: &[u8]) {
        self.crc.update(bytes);
        if let Some(sha) = &mut self.sha {
            sha.update(bytes);
        }
    }

    /// Hashes any number of bytes, and checks for cancellation in between.
    pub fn update_large(&mut self, bytes: &[u8], cancel: &dyn Cancel) -> Result<()> {
        for step in bytes.chunks(STEP) {
            cancel.check()?;
            self.update(step);
        }
        Ok(())
    }

    /// The hashes of all bytes.
    pub fn finish(self) -> Digests {
        let sha = self.sha.map_or([0; 32], Sha256::finish);
        Digests { crc: self.crc.finalize(), sha }
    }
}

/// The SHA-256 of some bytes.
pub fn sha256(bytes: &[u8]) -> [u8; 32] {
    let mut sha = Sha256::default();
    sha.update(bytes);
    sha.finish()
}

#[cfg(test)]
#[allow(clippy::cast_possible_truncation)]
mod tests {
    use super::*;

    #[test]
    fn digest_all_equals_digests_one_by_one() {
        let data: Vec<Vec<u8>> = [0usize, 1, 500, 64, 10_000, 3, 70_000, 63, 0]
            .iter()
            .map(|&len| (0..len).map(|i| (i * 37 + len) as u8).collect())
            .collect();
        let headers: Vec<Vec<u8>> = (0..data.len()).map(|i| vec![i as u8; 50 + i * 9]).collect();
        for count in 0..=data.len() {
            let tensors: Vec<(&[u8], &[u8])> = headers
                .iter()
                .zip(&data)
                .take(count)
                .map(|(h, d)| (h.as_slice(), d.as_slice()))
                .collect();
            let expected: Vec<Digests> = tensors.iter().map(|(h, d)| digest(h, d, true)).collect();
            assert_eq!(digest_all(&tensors, true), expected);
        }
        assert_eq!(digest(b"ab", b"c", false).crc, crc32fast::hash(b"abc"));
    }
}
