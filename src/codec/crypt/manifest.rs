//! The manifest: an authentication tag over everything that the encryption of the data does not
//! protect: names, types, shapes, order and positions of tensors, their hashes, nonces and tags.
//!
//! The manifest is in the last bytes of the index block. Other readers ignore these bytes as
//! padding. The tag is a BLAKE2b under a key derived from the file's. It covers the prologue, the
//! index up to the manifest, and a keyed BLAKE2b of each tensor's header in the order of the index.
//! Headers hold the tags of all pieces of data, so no part of the file can be exchanged unnoticed.

use super::{Key, sodium};
use crate::error::{Error, Result};
use crate::fallible::try_with_capacity;

/// The first bytes of a manifest.
const MAGIC: [u8; 8] = *b"TZSEAL01";
/// Bytes at the end of the index block: magic and tag.
pub const MANIFEST_LEN: usize = MAGIC.len() + 32;

/// A keyed hash of a header, which cannot be computed without the key. Comparisons take constant
/// time, so their duration reveals nothing.
#[derive(Clone, Copy)]
pub struct HeaderTag(pub [u8; 32]);

impl PartialEq for HeaderTag {
    fn eq(&self, other: &Self) -> bool {
        sodium::same(&self.0, &other.0)
    }
}

/// Computes and verifies manifests with one key.
pub struct Manifest(Key);

impl Manifest {
    /// Derives the manifest's key from the key of a file.
    pub fn new(key: &Key) -> Result<Self> {
        Ok(Manifest(key.subkey("tensorizer manifest 1")?))
    }

    /// Computes the keyed hash of a header.
    pub fn digest(&self, header: &[u8]) -> HeaderTag {
        HeaderTag(sodium::keyed_hash(header, self.0.bytes()))
    }

    /// Writes the manifest of an index block into its last bytes, which are free.
    pub fn seal(&self, prologue: &[u8], index: &mut [u8], headers: &[[u8; 32]]) -> Result<()> {
        let tag = self.tag(prologue, index, headers)?;
        let end = index.last_chunk_mut::<MANIFEST_LEN>();
        let end = end.ok_or_else(|| Error::Bug("no room for a manifest".to_owned()))?;
        end.copy_from_slice(&[MAGIC.as_slice(), &tag].concat());
        Ok(())
    }

    /// True if an index block ends with a manifest, valid or not.
    pub fn is_in(index: &[u8]) -> bool {
        index.last_chunk::<MANIFEST_LEN>().is_some_and(|end| end.starts_with(&MAGIC))
    }

    /// True if the manifest of an index block is valid.
    pub fn verifies(&self, prologue: &[u8], index: &[u8], headers: &[HeaderTag]) -> Result<bool> {
        let Some(found) = index.last_chunk::<32>() else { return Ok(false) };
        let headers: Vec<_> = headers.iter().map(|tag| tag.0).collect();
        Ok(Self::is_in(index) && sodium::same(found, &self.tag(prologue, index, &headers)?))
    }

    fn tag(&self, prologue: &[u8], index: &[u8], headers: &[[u8; 32]]) -> Result<[u8; 32]> {
        let entries = index.len().checked_sub(MANIFEST_LEN).and_then(|end| index.get(..end));
        let entries = entries.ok_or_else(|| Error::Bug("no room for a manifest".to_owned()))?;
        let parts = [prologue, entries, headers.as_flattened()];
        let len = parts.iter().map(|part| part.len()).sum();
        let mut text = try_with_capacity(len, "what a manifest covers")?;
        parts.into_iter().for_each(|part| text.extend_from_slice(part));
        Ok(sodium::keyed_hash(&text, self.0.bytes()))
    }
}
