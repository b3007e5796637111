//! Encryption of one tensor, whose pieces may come from any thread.

use std::sync::{Mutex, PoisonError};

use crate::codec::crypt::{self, EncryptionOptions, NONCE_LEN, PIECE_LEN};
use crate::error::{Error, Result};
use crate::fallible::{try_repeat, try_with_capacity};
use crate::format::tensors::crypt_info::{self, MAC_LEN};

/// A tensor's nonce, and the tags of its pieces.
pub struct Encryptor<'p> {
    options: &'p EncryptionOptions,
    nonce: [u8; NONCE_LEN],
    macs: Mutex<Vec<[u8; MAC_LEN]>>,
    encoded_len: usize,
}

impl<'p> Encryptor<'p> {
    /// Creates a nonce, and room for the tags of `data_len` bytes of data.
    pub fn new(data_len: u64, options: &'p EncryptionOptions) -> Result<Self> {
        let count = usize::try_from(data_len.div_ceil(PIECE_LEN));
        let count = count.map_err(|_| Error::Bug("too many tags".to_owned()))?;
        let len = crypt_info::encoded_len(options.derivation.is_some(), count as u64);
        let encoded_len =
            usize::try_from(len).map_err(|_| Error::Bug(format!("{len} bytes of tags")))?;
        let macs = Mutex::new(try_repeat([0; MAC_LEN], count, "tags of encrypted pieces")?);
        Ok(Encryptor { options, nonce: crypt::random()?, macs, encoded_len })
    }

    /// Returns an encrypted copy of data, which begin at a multiple of the length of pieces.
    pub fn encrypt(&self, start: u64, data: &[u8]) -> Result<Vec<u8>> {
        let step = usize::try_from(PIECE_LEN).unwrap_or(usize::MAX);
        let mut encrypted = try_with_capacity(data.len(), "an encrypted copy")?;
        encrypted.extend_from_slice(data);
        for (number, piece) in (start / PIECE_LEN..).zip(encrypted.chunks_mut(step)) {
            let mac = crypt::seal(piece, &self.nonce, number, &self.options.key);
            let mut macs = self.macs.lock().unwrap_or_else(PoisonError::into_inner);
            let slot = usize::try_from(number).ok().and_then(|number| macs.get_mut(number));
            *slot.ok_or_else(|| Error::Bug(format!("no tag {number}")))? = mac;
        }
        Ok(encrypted)
    }

    /// Bytes of the encryption block in the header.
    pub fn encoded_len(&self) -> usize {
        self.encoded_len
    }

    /// Encodes the encryption block of the header, which is complete once all data were encrypted.
    pub fn encode(&self) -> Result<Vec<u8>> {
        let macs = self.macs.lock().unwrap_or_else(PoisonError::into_inner);
        crypt_info::encode(self.options.derivation.as_ref(), PIECE_LEN, &self.nonce, &macs)
    }
}
