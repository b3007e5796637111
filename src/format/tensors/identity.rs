//! The identity that links the two halves of an object saved by `torch.save`: its pickle, and the
//! `.tensors` file with its storages. The pickle states the identity of its file, so that no other
//! file is mistaken for it.
//!
//! In the file, the identity is at the end of the index block, and only a manifest follows it: see
//! [`trailer`](super::trailer).

/// The first bytes of the record.
const MAGIC: [u8; 8] = *b"TZPAIR01";
/// Bytes of magic and identity.
pub const IDENTITY_LEN: usize = MAGIC.len() + 16;

/// Identifies a file of storages: equal for the same storages, saved in the same way.
pub type FileIdentity = [u8; 16];

/// Encodes an identity, in [`IDENTITY_LEN`] bytes.
pub fn encode(id: FileIdentity) -> Vec<u8> {
    [MAGIC.as_slice(), &id].concat()
}

/// The identity in the last bytes of `space`, if there is one.
pub fn find(space: &[u8]) -> Option<FileIdentity> {
    let end = space.last_chunk::<IDENTITY_LEN>().filter(|end| end.starts_with(&MAGIC))?;
    end.last_chunk().copied()
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn written_identity_is_found() {
        let mut space = vec![0; 3];
        assert_eq!(find(&space), None);
        space.extend(encode(*b"0123456789abcdef"));
        assert_eq!(find(&space), Some(*b"0123456789abcdef"));
        assert_eq!(space.len(), IDENTITY_LEN + 3);
        assert!(space.starts_with(&[0, 0, 0, b'T']));
    }
}
