//! Decryption of tensors whose bytes arrive in chunks, by the threads that read them.

use std::sync::atomic::{AtomicBool, Ordering};
use std::sync::{Condvar, Mutex, OnceLock};
use std::time::Duration;

use crate::cancel::Cancel;
use crate::codec::crypt::{DecryptionOptions, EncryptedPieces, Key, PIECE_LEN};
use crate::error::{Error, Result};
use crate::format::catalog::Entry;
use crate::format::tensors::header::TensorHeader;
use crate::numbers::TensorNumber;
use crate::sys::sync::unpoisoned;
use crate::sys::to_usize;

/// Interval of checks for cancellation while a thread waits for a header that another thread reads.
const IDLE: Duration = Duration::from_millis(20);

/// The encrypted tensors of one call.
pub struct Decryptor<'o> {
    options: &'o DecryptionOptions,
    uri: &'o str,
    entries: &'o [&'o Entry],
    /// True if the data of a tensor are never cut.
    uncut: bool,
    long_pieces: &'o AtomicBool,
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
    let fail = |what: String| failed(entry, uri, what);
    let info = header.crypt_info.as_ref();
    let cipher = info.and_then(|info| info.cipher.as_ref());
    let cipher =
        cipher.ok_or_else(|| fail("its header has no encryption parameters".to_owned()))?;
    let pieces = EncryptedPieces::of(cipher, entry.data_len).map_err(fail)?;
    let derivation = info.and_then(|info| info.key_derivation.as_ref());
    Ok(Some((pieces, options.key(derivation, uri, cancel)?)))
}

impl<'o> Decryptor<'o> {
    /// Creates the decryptor of these tensors. `uncut`: their data are never cut. If they are, the
    /// header of a tensor that must not be cut sets `long_pieces`, and is an error.
    pub fn new(
        options: &'o DecryptionOptions,
        (uri, entries): (&'o str, &'o [&'o Entry]),
        (uncut, long_pieces): (bool, &'o AtomicBool),
    ) -> Self {
        let ciphers = entries.iter().map(|_| OnceLock::new()).collect();
        let header_arrived = (Mutex::new(()), Condvar::new());
        Decryptor { options, uri, entries, uncut, long_pieces, ciphers, header_arrived }
    }

    /// Takes the header of a tensor.
    pub fn add_header(
        &self,
        tensor: TensorNumber,
        header: &TensorHeader<'_>,
        cancel: &dyn Cancel,
    ) -> Result<()> {
        let entry = tensor.of(self.entries)?;
        let found = cipher(header, entry, self.options, self.uri, cancel)?;
        let longest = found.as_ref().map_or(0, |(pieces, _)| pieces.max_len());
        if longest > PIECE_LEN && !self.uncut {
            self.long_pieces.store(true, Ordering::Relaxed);
            let what = format!(
                "it is encrypted in one piece of {longest} bytes, and this source can be read only \
                 once: save it to a file first"
            );
            return Err(failed(entry, self.uri, what));
        }
        tensor.of(&self.ciphers)?.get_or_init(|| found);
        let _guard = unpoisoned(self.header_arrived.0.lock());
        self.header_arrived.1.notify_all();
        Ok(())
    }

    /// Decrypts data from `start` on in place, once the tensor's header is there. They are whole
    /// pieces.
    pub fn decrypt(
        &self,
        tensor: TensorNumber,
        start: u64,
        bytes: &mut [u8],
        cancel: &dyn Cancel,
    ) -> Result<()> {
        let slot = tensor.of(&self.ciphers)?;
        let (lock, header_arrived) = &self.header_arrived;
        while slot.get().is_none() {
            cancel.check()?;
            let guard = unpoisoned(lock.lock());
            if slot.get().is_none() {
                drop(unpoisoned(header_arrived.wait_timeout(guard, IDLE)));
            }
        }
        let Some(Some((pieces, key))) = slot.get() else { return Ok(()) };
        let (mut at, mut rest) = (start, bytes);
        while !rest.is_empty() {
            let (number, piece_start, piece_end) = pieces.piece(at);
            let now = rest.split_off_mut(..to_usize(piece_end - at)).filter(|_| at == piece_start);
            let now = now.ok_or_else(|| Error::Bug("part of a piece".to_owned()))?;
            if !pieces.decrypt(number, now, key) {
                return Err(decryption_failed(tensor.of(self.entries)?, self.uri));
            }
            at = piece_end;
        }
        Ok(())
    }
}

/// The error for a tag that does not match.
pub fn decryption_failed(entry: &Entry, uri: &str) -> Error {
    failed(entry, uri, "wrong key, or the data were changed".to_owned())
}

fn failed(entry: &Entry, uri: &str, what: String) -> Error {
    Error::Crypt(format!("Tensor decryption failed: `{}` of `{uri}`: {what}", entry.name))
}

#[cfg(test)]
#[allow(clippy::cast_possible_truncation)]
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

    /// A file's tensor in pieces of a length, or in one piece.
    fn decrypted(
        data: &[u8],
        (piece_len, single): (u64, bool),
        (backwards, damage): (bool, Option<usize>),
        (cut, wraps): (usize, bool),
    ) -> Result<Vec<u8>> {
        let key = Key::new(&[5; 32]).unwrap();
        // The second piece's nonce wraps around, or carries into the third byte.
        let mut nonce = [if wraps { 0xff } else { 0 }; 24];
        nonce[..2].fill(0xff);
        let mut sealed = data.to_vec();
        let step = if single { data.len() } else { piece_len as usize };
        let macs: Vec<_> = (0..)
            .zip(sealed.chunks_mut(step))
            .map(|(number, piece)| seal(piece, &nonce, number, &key))
            .collect();
        let block = crypt_info::encode(None, piece_len, &nonce, &macs);
        let entry = bytes_entry(data.len() as u64, block.len() as u64);
        let draft = HeaderDraft::new(&entry, 0, Hashes::All, block.len()).unwrap();
        let raw = draft.finish(0, &[0; 32], &block);
        let header = TensorHeader::parse(&raw, &entry, true).unwrap();
        if let Some(at) = damage {
            sealed[at % data.len()] ^= 1;
        }
        let options = DecryptionOptions::new(Secret::Key(key));
        let (entries, long_pieces) = ([&entry], AtomicBool::new(false));
        let uncut = cut > PIECE_LEN as usize;
        let decryptor = Decryptor::new(&options, ("f", &entries), (uncut, &long_pieces));
        decryptor.add_header(TensorNumber(0), &header, &Never)?;
        let mut chunks: Vec<_> = (0..).step_by(cut).zip(sealed.chunks_mut(cut)).collect();
        if backwards {
            chunks.reverse();
        }
        for (start, chunk) in chunks {
            decryptor.decrypt(TensorNumber(0), start, chunk, &Never)?;
        }
        Ok(sealed)
    }

    proptest! {
        #![proptest_config(ProptestConfig::with_cases(24))]
        /// Pieces of 2 MiB, in chunks in any order; and one piece of any stated length.
        #[test]
        fn data_are_decrypted_in_chunks(
            len in 1usize..9_000_000,
            stated in 0u64..8_000_000,
            single in any::<bool>(),
            backwards in any::<bool>(),
            damage in proptest::option::of(any::<usize>()),
            wraps in any::<bool>(),
        ) {
            let data = crate::tests::pattern(len, len);
            let piece_len = if single { stated } else { PIECE_LEN };
            let cut = if single { data.len() } else { PIECE_LEN as usize };
            let outcome = decrypted(&data, (piece_len, single), (backwards, damage), (cut, wraps));
            match damage {
                Some(_) => prop_assert!(matches!(outcome, Err(Error::Crypt(_)))),
                None => prop_assert!(outcome.unwrap() == data),
            }
        }
    }

    #[test]
    fn other_lengths_of_pieces_and_cut_pieces_are_refused() {
        let data = vec![7; 5 << 20];
        let refused = |piece_len, single| {
            let outcome = decrypted(&data, (piece_len, single), (false, None), (2 << 20, true));
            outcome.unwrap_err().to_string()
        };
        for piece_len in [1024, 1 << 20, (2 << 20) + 64, 4 << 20] {
            let error = refused(piece_len, false);
            assert!(error.contains(&format!("pieces of {piece_len} bytes: expected")), "{error}");
        }
        assert!(refused(1024, true).contains("in one piece of 5242880 bytes, and this source"));
    }
}
