//! Encryption of one tensor, whose pieces may come from any thread.

use std::sync::Mutex;

use crate::codec::crypt::{self, EncryptionOptions, NONCE_LEN, PIECE_LEN};
use crate::error::{Error, Result};
use crate::fallible::try_with_capacity;
use crate::format::tensors::crypt_info::{self, MAC_LEN};
use crate::sys::sync::unpoisoned;
use crate::sys::to_usize;

/// A tensor's nonce, and the tags of its pieces.
pub struct Encryptor<'p> {
    options: &'p EncryptionOptions,
    nonce: [u8; NONCE_LEN],
    macs: Mutex<Vec<[u8; MAC_LEN]>>,
    /// Bytes of the encryption block in the header.
    pub encoded_len: usize,
}

impl<'p> Encryptor<'p> {
    /// Creates a nonce, and room for the tags of `data_len` bytes of data.
    pub fn new(data_len: u64, options: &'p EncryptionOptions) -> Result<Self> {
        let count = data_len.div_ceil(PIECE_LEN);
        let encoded_len = to_usize(crypt_info::encoded_len(options.derivation.is_some(), count));
        let macs = Mutex::new(vec![[0; MAC_LEN]; to_usize(count)]);
        Ok(Encryptor { options, nonce: crypt::random()?, macs, encoded_len })
    }

    /// Returns an encrypted copy of data, which begin at a multiple of the length of pieces.
    pub fn encrypt(&self, start: u64, data: &[u8]) -> Result<Vec<u8>> {
        let mut encrypted = try_with_capacity(data.len(), "an encrypted copy")?;
        encrypted.extend_from_slice(data);
        for (number, piece) in (start / PIECE_LEN..).zip(encrypted.chunks_mut(to_usize(PIECE_LEN)))
        {
            let mac = crypt::seal(piece, &self.nonce, number, &self.options.key);
            let mut macs = unpoisoned(self.macs.lock());
            *macs
                .get_mut(to_usize(number))
                .ok_or_else(|| Error::Bug(format!("no tag {number}")))? = mac;
        }
        Ok(encrypted)
    }

    /// Encodes the encryption block of the header, which is complete once all data were encrypted.
    pub fn encode(&self) -> Vec<u8> {
        let macs = unpoisoned(self.macs.lock());
        crypt_info::encode(self.options.derivation.as_ref(), PIECE_LEN, &self.nonce, &macs)
    }
}
