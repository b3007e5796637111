//! Decryption of tensors whose bytes arrive in chunks, by the threads that read them.
//!
//! In files of usual writers, pieces of encryption do not cross chunks. A tensor whose pieces are
//! longer, or of odd lengths, is decrypted as a whole when all of its data are there.

use std::sync::{Condvar, Mutex, OnceLock, PoisonError};
use std::time::Duration;

use crate::cancel::Cancel;
use crate::codec::crypt::{DecryptionOptions, EncryptedPieces, Key, PIECE_LEN};
use crate::error::{Error, Result};
use crate::fallible::try_collect;
use crate::format::catalog::Entry;
use crate::format::tensors::header::TensorHeader;

/// Interval of checks for cancellation while a thread waits for a header that another thread reads.
const IDLE: Duration = Duration::from_millis(20);

/// The encrypted tensors of one call.
pub struct Decryptor<'o> {
    options: &'o DecryptionOptions,
    uri: &'o str,
    entries: &'o [&'o Entry],
    /// Set when the header of the tensor is there; None for tensors without data.
    ciphers: Vec<OnceLock<Option<(EncryptedPieces, Key)>>>,
    header_arrived: (Mutex<()>, Condvar),
}

/// Returns the pieces and the key of a tensor's data; None if it has no data.
pub fn cipher(
    header: &TensorHeader<'_>,
    entry: &Entry,
    options: &DecryptionOptions,
    uri: &str,
    cancel: &dyn Cancel,
) -> Result<Option<(EncryptedPieces, Key)>> {
    if entry.data_len == 0 {
        return Ok(None);
    }
    let fail = |what: String| {
        Error::Crypt(format!("Tensor decryption failed: `{}` of `{uri}`: {what}", entry.name))
    };
    let info = header.crypt_info.as_ref();
    let cipher = info.and_then(|info| info.cipher.as_ref());
    let cipher =
        cipher.ok_or_else(|| fail("its header has no encryption parameters".to_owned()))?;
    let pieces = EncryptedPieces::of(cipher, entry.data_len).map_err(fail)?;
    let derivation = info.and_then(|info| info.key_derivation.as_ref());
    Ok(Some((pieces, options.key(derivation, uri, cancel)?)))
}

impl<'o> Decryptor<'o> {
    /// Creates the decryptor of these tensors.
    pub fn new(
        options: &'o DecryptionOptions,
        uri: &'o str,
        entries: &'o [&'o Entry],
    ) -> Result<Self> {
        let ciphers = try_collect(entries.iter().map(|_| OnceLock::new()), "keys of tensors")?;
        let header_arrived = (Mutex::new(()), Condvar::new());
        Ok(Decryptor { options, uri, entries, ciphers, header_arrived })
    }

    fn entry(&self, tensor: usize) -> Result<&'o Entry> {
        let entry = self.entries.get(tensor).copied();
        entry.ok_or_else(|| Error::Bug(format!("no tensor {tensor}")))
    }

    /// Takes the header of a tensor. Returns false if the tensor's data cannot be decrypted in
    /// chunks.
    pub fn add_header(
        &self,
        tensor: usize,
        header: &TensorHeader<'_>,
        cancel: &dyn Cancel,
    ) -> Result<bool> {
        let found = cipher(header, self.entry(tensor)?, self.options, self.uri, cancel)?;
        let in_chunks = found.as_ref().is_none_or(|(pieces, _)| pieces.fit(PIECE_LEN));
        let slot = self.ciphers.get(tensor);
        slot.ok_or_else(|| Error::Bug(format!("no tensor {tensor}")))?.get_or_init(|| found);
        let _guard = self.header_arrived.0.lock().unwrap_or_else(PoisonError::into_inner);
        self.header_arrived.1.notify_all();
        Ok(in_chunks)
    }

    /// Waits for the header of a tensor, and returns the pieces and the key of its data.
    fn wait_for_header(
        &self,
        tensor: usize,
        cancel: &dyn Cancel,
    ) -> Result<Option<&(EncryptedPieces, Key)>> {
        let slot = self.ciphers.get(tensor);
        let slot = slot.ok_or_else(|| Error::Bug(format!("no tensor {tensor}")))?;
        let (lock, header_arrived) = &self.header_arrived;
        while slot.get().is_none() {
            cancel.check()?;
            let guard = lock.lock().unwrap_or_else(PoisonError::into_inner);
            if slot.get().is_none() {
                drop(
                    header_arrived
                        .wait_timeout(guard, IDLE)
                        .unwrap_or_else(PoisonError::into_inner),
                );
            }
        }
        Ok(slot.get().and_then(Option::as_ref))
    }

    /// Decrypts data from `start` on in place, once the tensor's header is there. Returns false if
    /// the tensor cannot be decrypted in chunks: then its data stay as they are.
    pub fn decrypt_chunk(
        &self,
        tensor: usize,
        start: u64,
        bytes: &mut [u8],
        cancel: &dyn Cancel,
    ) -> Result<bool> {
        let Some((pieces, key)) = self.wait_for_header(tensor, cancel)? else { return Ok(true) };
        if !pieces.fit(PIECE_LEN) {
            return Ok(false);
        }
        let (mut at, mut rest) = (start, bytes);
        while !rest.is_empty() {
            let (number, piece_start, piece_end) = pieces.piece(at);
            let len = usize::try_from(piece_end - at).unwrap_or(usize::MAX);
            let cut = rest.split_at_mut_checked(len).filter(|_| at == piece_start);
            let (now, later) = cut.ok_or_else(|| Error::Bug("part of a piece".to_owned()))?;
            self.check(tensor, pieces.decrypt(number, now, key))?;
            (at, rest) = (piece_end, later);
        }
        Ok(true)
    }

    /// Decrypts all data of a tensor, once its header is there.
    pub fn decrypt_whole(
        &self,
        tensor: usize,
        bytes: &mut [u8],
        cancel: &dyn Cancel,
    ) -> Result<()> {
        match self.wait_for_header(tensor, cancel)? {
            Some((pieces, key)) => self.check(tensor, pieces.decrypt_all(bytes, key)),
            None => Ok(()),
        }
    }

    fn check(&self, tensor: usize, opened: bool) -> Result<()> {
        if opened { Ok(()) } else { Err(decryption_failed(self.entry(tensor)?, self.uri)) }
    }
}

/// The error for a tag that does not match.
pub fn decryption_failed(entry: &Entry, uri: &str) -> Error {
    Error::Crypt(format!(
        "Tensor decryption failed: `{}` of `{uri}`: wrong key, or the data were changed",
        entry.name
    ))
}

#[cfg(test)]
#[allow(clippy::unwrap_used, clippy::indexing_slicing, clippy::cast_possible_truncation)]
mod tests {
    use super::*;
    use crate::cancel::Never;
    use crate::codec::crypt::{Secret, seal};
    use crate::format::TensorKind;
    use crate::format::dtype::DType;
    use crate::format::name::Name;
    use crate::format::tensors::crypt_info;
    use crate::format::tensors::header::{Hashes, HeaderDraft};
    use proptest::prelude::*;

    fn bytes_entry(len: u64, block_len: u64) -> Entry {
        Entry {
            name: Name::from_key("a").unwrap(),
            kind: TensorKind::StateDict,
            dtype: DType::from_name("uint8").unwrap(),
            shape: [len].into(),
            long: false,
            file: 0,
            header_offset: 100,
            data_offset: 4096 + block_len,
            data_len: len,
            whole: None,
            strided: false,
        }
    }

    proptest! {
        #![proptest_config(ProptestConfig::with_cases(64))]
        /// Pieces of any length: in chunks in any order where they fit, else all at once.
        #[test]
        fn data_are_decrypted_in_chunks_or_at_once(
            len in 1usize..9_000_000,
            power in 0u32..12,
            odd in any::<bool>(),
            backwards in any::<bool>(),
            damage in proptest::option::of(any::<usize>()),
        ) {
            let piece_len = (1024 << power) + if odd { 64 } else { 0 };
            let data: Vec<u8> = (0..len).map(|i| (i * 31 + len) as u8).collect();
            let key = Key::new(&[5; 32]).unwrap();
            let nonce = [0xff; 24];
            let mut sealed = data.clone();
            let macs: Vec<_> = (0..)
                .zip(sealed.chunks_mut(piece_len as usize))
                .map(|(number, piece)| seal(piece, &nonce, number, &key))
                .collect();
            let block = crypt_info::encode(None, piece_len, &nonce, &macs).unwrap();
            let entry = bytes_entry(len as u64, block.len() as u64);
            let draft = HeaderDraft::new(&entry, 0, Hashes::All, block.len()).unwrap();
            let raw = draft.finish(0, &[0; 32], &block);
            let header = TensorHeader::parse(&raw, &entry, true).unwrap();
            if let Some(at) = damage {
                sealed[at % len] ^= 1;
            }
            let options = DecryptionOptions::new(Secret::Key(key));
            let entries = [&entry];
            let decryptor = Decryptor::new(&options, "f", &entries).unwrap();
            let in_chunks = decryptor.add_header(0, &header, &Never).unwrap();
            let fits = (2 << 20) % piece_len == 0 || len <= 2 << 20;
            prop_assert_eq!(in_chunks, fits);
            let mut outcome = Ok(());
            let mut chunks: Vec<_> = (0..).step_by(2 << 20).zip(sealed.chunks_mut(2 << 20)).collect();
            if backwards {
                chunks.reverse();
            }
            for (start, chunk) in chunks {
                match decryptor.decrypt_chunk(0, start, chunk, &Never) {
                    Ok(done) => prop_assert_eq!(done, in_chunks),
                    Err(error) => outcome = Err(error),
                }
            }
            if !in_chunks {
                outcome = decryptor.decrypt_whole(0, &mut sealed, &Never);
            }
            match damage {
                Some(_) => prop_assert!(matches!(outcome, Err(Error::Crypt(_)))),
                None => prop_assert!(outcome.is_ok() && sealed == data),
            }
        }
    }
}
