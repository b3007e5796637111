//! Decryption of tensors whose bytes many threads bring in any order.
//!
//! A piece that has arrived as a whole is decrypted where it is, by the thread that brought it.
//! Files of unusual writers have pieces across the ends of reads: those are put together in memory
//! of their own, decrypted, and copied back.

use std::collections::HashMap;
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};

use crate::cancel::Cancel;
use crate::codec::crypt::{DecryptionOptions, Key, Pieces};
use crate::error::{Error, Result};
use crate::format::header::Header;
use crate::format::index::Entry;

/// Bytes of a tensor, and where in its data they begin.
pub type Plain<'a> = (u64, &'a [u8]);
type Sealed<'a> = (u64, &'a mut [u8]);

/// The encrypted tensors of one call.
pub struct Opener<'o, 'a> {
    options: &'o DecryptionOptions,
    uri: &'o str,
    entries: &'o [&'o Entry],
    lanes: Vec<Mutex<Lane<'a>>>,
}

/// One tensor.
#[derive(Default)]
struct Lane<'a> {
    /// How it is encrypted, once its header is known.
    how: Option<Arc<(Pieces, Key)>>,
    /// What arrived before the header.
    waiting: Vec<Sealed<'a>>,
    /// Parts of pieces, by number.
    fragments: HashMap<u64, Vec<Sealed<'a>>>,
}

/// How the data of a tensor are encrypted; None if it has none.
pub fn how(
    header: &Header,
    entry: &Entry,
    options: &DecryptionOptions,
    uri: &str,
    cancel: &dyn Cancel,
) -> Result<Option<(Pieces, Key)>> {
    if entry.data_len == 0 {
        return Ok(None);
    }
    let fail = |what: String| {
        Error::Crypt(format!("Tensor decryption failed: `{}` of `{uri}`: {what}", entry.name))
    };
    let info = header.crypt_info.as_ref();
    let cipher = info.and_then(|info| info.cipher.as_ref());
    let cipher = cipher.ok_or_else(|| fail("its header does not say how".to_owned()))?;
    let pieces = Pieces::of(cipher, entry.data_len).map_err(fail)?;
    let derivation = info.and_then(|info| info.key_derivation.as_ref());
    Ok(Some((pieces, options.key(derivation, uri, cancel)?)))
}

impl<'o, 'a> Opener<'o, 'a> {
    /// For these tensors.
    pub fn new(options: &'o DecryptionOptions, uri: &'o str, entries: &'o [&'o Entry]) -> Self {
        let lanes = entries.iter().map(|_| Mutex::default()).collect();
        Opener { options, uri, entries, lanes }
    }

    fn lane(&self, tensor: usize) -> Result<MutexGuard<'_, Lane<'a>>> {
        let lane = self.lanes.get(tensor);
        let lane = lane.ok_or_else(|| Error::Bug(format!("no tensor {tensor}")))?;
        Ok(lane.lock().unwrap_or_else(PoisonError::into_inner))
    }

    fn entry(&self, tensor: usize) -> Result<&'o Entry> {
        let entry = self.entries.get(tensor).copied();
        entry.ok_or_else(|| Error::Bug(format!("no tensor {tensor}")))
    }

    /// Brings a header. Gives what could be decrypted with it.
    pub fn header(
        &self,
        tensor: usize,
        header: &Header,
        cancel: &dyn Cancel,
    ) -> Result<Vec<Plain<'a>>> {
        let Some(how) = how(header, self.entry(tensor)?, self.options, self.uri, cancel)? else {
            return Ok(Vec::new());
        };
        let how = Arc::new(how);
        let waiting = {
            let mut lane = self.lane(tensor)?;
            lane.how = Some(Arc::clone(&how));
            std::mem::take(&mut lane.waiting)
        };
        let mut plain = Vec::new();
        for (start, bytes) in waiting {
            self.open(tensor, &how, start, bytes, &mut plain)?;
        }
        Ok(plain)
    }

    /// Brings data from `start` on. Gives what could be decrypted with it.
    pub fn data(&self, tensor: usize, start: u64, bytes: &'a mut [u8]) -> Result<Vec<Plain<'a>>> {
        let how = {
            let mut lane = self.lane(tensor)?;
            let Some(how) = lane.how.clone() else {
                lane.waiting.push((start, bytes));
                return Ok(Vec::new());
            };
            how
        };
        let mut plain = Vec::new();
        self.open(tensor, &how, start, bytes, &mut plain)?;
        Ok(plain)
    }

    /// Decrypts all data of a tensor, whose header came before.
    pub fn whole(&self, tensor: usize, bytes: &'a mut [u8]) -> Result<&'a [u8]> {
        let how = self.lane(tensor)?.how.clone();
        let how = how.ok_or_else(|| Error::Bug(format!("no header of tensor {tensor}")))?;
        self.check(tensor, how.0.open_all(bytes, &how.1))?;
        Ok(bytes)
    }

    fn open(
        &self,
        tensor: usize,
        how: &(Pieces, Key),
        start: u64,
        bytes: &'a mut [u8],
        plain: &mut Vec<Plain<'a>>,
    ) -> Result<()> {
        let (pieces, key) = how;
        let (mut at, mut rest) = (start, bytes);
        while !rest.is_empty() {
            let (number, piece_start, piece_end) = pieces.piece(at);
            let len = usize::try_from(piece_end - at).unwrap_or(usize::MAX).min(rest.len());
            let cut = rest.split_at_mut_checked(len);
            let (now, later) = cut.ok_or_else(|| Error::Bug("a piece beyond data".to_owned()))?;
            rest = later;
            let whole = at == piece_start && at + len as u64 == piece_end;
            if whole {
                self.check(tensor, pieces.open(number, now, key))?;
                plain.push((at, now));
            } else {
                self.fragment(tensor, how, at, now, plain)?;
            }
            at += len as u64;
        }
        Ok(())
    }

    /// Keeps part of a piece, and decrypts the piece when all of it is there.
    fn fragment(
        &self,
        tensor: usize,
        (pieces, key): &(Pieces, Key),
        at: u64,
        bytes: &'a mut [u8],
        plain: &mut Vec<Plain<'a>>,
    ) -> Result<()> {
        let (number, start, end) = pieces.piece(at);
        let mut parts = {
            let mut lane = self.lane(tensor)?;
            let parts = lane.fragments.entry(number).or_default();
            parts.push((at, bytes));
            let len: u64 = parts.iter().map(|(_, bytes)| bytes.len() as u64).sum();
            if len < end - start {
                return Ok(());
            }
            lane.fragments.remove(&number).ok_or_else(|| Error::Bug("no fragments".to_owned()))?
        };
        parts.sort_unstable_by_key(|(at, _)| *at);
        let (mut whole, entry) = (Vec::new(), self.entry(tensor)?);
        let len = usize::try_from(end - start).unwrap_or(usize::MAX);
        whole.try_reserve_exact(len).map_err(|_| Error::OutOfMemory {
            bytes: end - start,
            what: format!("a piece of tensor `{}`", entry.name),
            error: std::io::Error::from(std::io::ErrorKind::OutOfMemory),
        })?;
        for (_, bytes) in &parts {
            whole.extend_from_slice(bytes);
        }
        self.check(tensor, pieces.open(number, &mut whole, key))?;
        let mut rest = whole.as_slice();
        for (at, bytes) in parts {
            let (now, later) = rest.split_at_checked(bytes.len()).unwrap_or((rest, &[]));
            bytes.copy_from_slice(now);
            rest = later;
            plain.push((at, bytes));
        }
        Ok(())
    }

    fn check(&self, tensor: usize, opened: bool) -> Result<()> {
        if opened { Ok(()) } else { Err(refused(self.entry(tensor)?, self.uri)) }
    }
}

/// What a tag that does not fit means.
pub fn refused(entry: &Entry, uri: &str) -> Error {
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
    use crate::format::crypt_info;
    use crate::format::dtype::DType;
    use crate::format::header::{Draft, Hashes};
    use crate::format::name::Name;
    use proptest::prelude::*;

    proptest! {
        #![proptest_config(ProptestConfig::with_cases(64))]
        /// Pieces of any length, brought in parts of any length and in any order.
        #[test]
        fn pieces_across_parts_are_put_together(
            len in 1usize..40_000,
            units in 16u64..200,
            step in 1usize..9000,
            order in any::<u64>(),
            damage in proptest::option::of(any::<usize>()),
        ) {
            let piece_len = units * 64;
            let data: Vec<u8> = (0..len).map(|i| (i * 31 + len) as u8).collect();
            let key = Key::new(&[5; 32]).unwrap();
            let nonce = [0xff; 24];
            let mut sealed = data.clone();
            let macs: Vec<_> = (0..)
                .zip(sealed.chunks_mut(piece_len as usize))
                .map(|(number, piece)| seal(piece, &nonce, number, &key))
                .collect();
            let block = crypt_info::encode(None, piece_len, &nonce, &macs);
            let mut entry = Entry {
                name: Name::from_key("a").unwrap(),
                kind: TensorKind::StateDict,
                dtype: DType::from_name("uint8").unwrap(),
                shape: [len as u64].into(),
                long: false,
                header_offset: 0,
                data_offset: 4096 + block.len() as u64,
                data_len: len as u64,
            };
            entry.header_offset = 100;
            let raw = Draft::new(&entry, 0, Hashes::All, block.len()).unwrap().finish(0, &[0; 32], &block);
            let header = Header::parse(raw.into(), &entry, true).unwrap();
            if let Some(at) = damage {
                sealed[at % len] ^= 1;
            }

            let options = DecryptionOptions::new(Secret::Key(key));
            let entries = [&entry];
            let opener = Opener::new(&options, "f", &entries);
            let mut parts: Vec<(u64, Option<&mut [u8]>)> = vec![(order, None)];
            let mut state = order;
            let mut starts = Vec::new();
            for (number, part) in sealed.chunks_mut(step).enumerate() {
                state = state.wrapping_mul(6_364_136_223_846_793_005).wrapping_add(1);
                starts.push((number * step) as u64);
                parts.push((state, Some(part)));
            }
            let mut numbered: Vec<(u64, u64, Option<&mut [u8]>)> = parts
                .into_iter()
                .enumerate()
                .map(|(at, (rank, part))| (rank, at.checked_sub(1).map_or(0, |at| starts[at]), part))
                .collect();
            numbered.sort_by_key(|(rank, ..)| *rank);
            let mut found = vec![None; len];
            let mut outcome = Ok(());
            for (_, start, part) in numbered {
                let plain = match part {
                    None => opener.header(0, &header, &Never),
                    Some(part) => opener.data(0, start, part),
                };
                match plain {
                    Ok(plain) => for (start, bytes) in plain {
                        for (slot, byte) in found[start as usize..].iter_mut().zip(bytes) {
                            prop_assert!(slot.replace(*byte).is_none(), "twice");
                        }
                    },
                    Err(error) => outcome = Err(error),
                }
            }
            if damage.is_some() {
                prop_assert!(matches!(outcome, Err(Error::Crypt(_))));
            } else {
                outcome.unwrap();
                let found: Vec<u8> = found.into_iter().map(Option::unwrap).collect();
                prop_assert_eq!(found, data);
            }
        }
    }
}
