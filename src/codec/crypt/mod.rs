//! Keys, and the encryption of tensor data: XSalsa20-Poly1305 in pieces, with keys by Argon2id.

mod key;
mod manifest;
mod params;
mod sodium;

pub use key::Key;
pub use manifest::{HeaderTag, MANIFEST_LEN, Manifest};
pub use params::{
    DecryptionOptions, EncryptionOptions, MAX_MEMLIMIT, MAX_OPSLIMIT, MIN_MEMLIMIT, MIN_OPSLIMIT,
    Secret,
};

pub use sodium::start;

use crate::error::{Error, Result};
pub use crate::format::tensors::crypt_info::PIECE_LEN;
use crate::format::tensors::crypt_info::{Cipher, MAC_LEN};
use crate::sys;

/// Bytes of a nonce.
pub const NONCE_LEN: usize = 24;
/// The pieces in which the data of one tensor are encrypted, with their nonces and tags.
#[derive(Debug, Clone)]
pub struct EncryptedPieces {
    data_len: u64,
    piece_len: u64,
    nonce: [u8; NONCE_LEN],
    macs: Vec<[u8; MAC_LEN]>,
}

impl EncryptedPieces {
    /// Takes the pieces from a header's description of the data; the error says what is wrong with
    /// it.
    pub fn of(cipher: &Cipher, data_len: u64) -> std::result::Result<Self, String> {
        let Cipher { piece_len: stated, nonce, macs } = cipher.clone();
        // A single tag covers all data, whatever length of pieces the header states.
        if let Some(stated) = stated.filter(|&len| macs.len() > 1 && len != PIECE_LEN) {
            return Err(format!(
                "it is encrypted in pieces of {stated} bytes: expected one piece, or pieces of \
                 {PIECE_LEN} bytes, which all writers use"
            ));
        }
        let piece_len = if macs.len() == 1 { data_len } else { PIECE_LEN };
        let expected = data_len.div_ceil(piece_len.max(1));
        if data_len > 0 && macs.len() as u64 != expected {
            return Err(format!(
                "expected {expected} tags for {data_len} bytes in pieces of {piece_len}, found {}",
                macs.len()
            ));
        }
        Ok(EncryptedPieces { data_len, piece_len: piece_len.max(1), nonce, macs })
    }

    /// The number of the piece that contains a byte, and the start and end of that piece.
    pub fn piece(&self, position: u64) -> (u64, u64, u64) {
        let number = position / self.piece_len;
        let start = number * self.piece_len;
        (number, start, start.saturating_add(self.piece_len).min(self.data_len))
    }

    /// Bytes of the longest piece.
    pub fn max_len(&self) -> u64 {
        self.piece_len.min(self.data_len)
    }

    /// Decrypts one whole piece in place; false if its tag does not match.
    #[must_use]
    pub fn decrypt(&self, number: u64, bytes: &mut [u8], key: &Key) -> bool {
        let Some(mac) = self.macs.get(sys::to_usize(number)) else { return false };
        sodium::open(bytes, mac, &nonce_of(&self.nonce, number), key.bytes())
    }
}

/// The nonce of a piece: a 192-bit little-endian counter, which wraps around.
pub fn nonce_of(first: &[u8; NONCE_LEN], number: u64) -> [u8; NONCE_LEN] {
    let mut nonce = *first;
    let mut carry = u128::from(number);
    for byte in &mut nonce {
        carry += u128::from(*byte);
        let [low, ..] = carry.to_le_bytes();
        *byte = low;
        carry >>= 8;
    }
    nonce
}

/// Encrypts a piece in place and returns its tag.
pub fn seal(bytes: &mut [u8], nonce: &[u8; NONCE_LEN], number: u64, key: &Key) -> [u8; MAC_LEN] {
    sodium::seal(bytes, &nonce_of(nonce, number), key.bytes())
}

/// Random bytes from the operating system.
pub fn random<const N: usize>() -> Result<[u8; N]> {
    let mut bytes = [0; N];
    let none =
        |error| Error::Unsupported(format!("cannot get random numbers from the system: {error}"));
    sys::random(&mut bytes).map_err(none)?;
    Ok(bytes)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn nonces_count_with_carry_and_wrap() {
        let mut first = [0u8; NONCE_LEN];
        first[0] = 0xfe;
        first[1] = 0xff;
        let mut expected = [0u8; NONCE_LEN];
        expected[2] = 1;
        assert_eq!(nonce_of(&first, 2), expected);
        let mut last = [0xff; NONCE_LEN];
        last[0] = 0xfe;
        assert_eq!(nonce_of(&last, 2), [0; NONCE_LEN]);
        assert_eq!(nonce_of(&first, 0), first);
        let mut high = [0u8; NONCE_LEN];
        high[7] = 1;
        assert_eq!(nonce_of(&[0; NONCE_LEN], 1 << 56), high);
    }
}
