//! The index trailer: data at the end of the index block, after its last entry, where other readers
//! see unused space. From its end backwards: a manifest, the identity of a saved object, metadata.

use super::identity::{self, FileIdentity, IDENTITY_LEN};
use super::metadata;
use crate::error::{Error, Malformed, Result};

/// The contents of an index trailer, except its manifest.
#[derive(Debug, PartialEq, Eq)]
pub struct IndexTrailer {
    /// The identity by which the pickle of a saved object recognises the file with its storages.
    pub identity: Option<FileIdentity>,
    /// Names and values.
    pub metadata: std::result::Result<Vec<(String, String)>, Malformed>,
}

/// Bytes that [`write()`] writes.
pub fn len(metadata: &[u8], has_identity: bool) -> usize {
    metadata.len() + if has_identity { IDENTITY_LEN } else { 0 }
}

/// Writes encoded metadata and an identity to the end of `space`, which follows the entries.
pub fn write(space: &mut [u8], metadata: &[u8], identity: Option<FileIdentity>) -> Result<()> {
    let (needed, found) = (len(metadata, identity.is_some()), space.len());
    let short = || Error::Bug(format!("{needed} bytes to be put into {found} after the index"));
    let at = found.checked_sub(needed).ok_or_else(short)?;
    let (to_metadata, to_identity) = space.split_at_mut(at).1.split_at_mut(metadata.len());
    to_metadata.copy_from_slice(metadata);
    to_identity.copy_from_slice(&identity.map_or(Vec::new(), identity::encode));
    Ok(())
}

/// Finds the contents of the space after the entries, which lies at file position `at`.
pub fn find(space: &[u8], at: u64) -> IndexTrailer {
    let identity = identity::find(space);
    let without_identity = space.len().saturating_sub(identity.map_or(0, |_| IDENTITY_LEN));
    let metadata = metadata::find(space.split_at(without_identity).0, at);
    IndexTrailer { identity, metadata }
}

#[cfg(test)]
mod tests {
    use proptest::prelude::*;

    use super::*;

    #[test]
    fn metadata_and_identity_are_found_independently() {
        let metadata = vec![("b".to_owned(), "1".to_owned()), ("a".to_owned(), String::new())];
        for identity in [None, Some([7; 16])] {
            for metadata in [vec![], metadata.clone()] {
                let bytes = metadata::encode(&metadata, "f").unwrap();
                let needed = len(&bytes, identity.is_some());
                for free in [0, 1, 100] {
                    let mut space = vec![0; needed + free];
                    write(&mut space, &bytes, identity).unwrap();
                    assert!(space[..free].iter().all(|&byte| byte == 0));
                    let found = find(&space, 0);
                    assert_eq!(found, IndexTrailer { identity, metadata: Ok(metadata.clone()) });
                }
                if needed > 0 {
                    write(&mut vec![0; needed - 1], &bytes, identity).unwrap_err();
                }
            }
        }
    }

    proptest! {
        #[test]
        fn any_trailer_bytes_are_parsed_or_refused(
            mut space in proptest::collection::vec(any::<u8>(), 0..200),
            put_there in proptest::collection::vec((0usize..200, 0usize..2), 0..4),
        ) {
            for (at, which) in put_there {
                let magic = [b"TZMETA01", b"TZPAIR01"][which];
                // Near the end, where they are looked for.
                let from = space.len().saturating_sub(16 + 8 * (at % 6));
                for (slot, byte) in space.iter_mut().skip(from).zip(magic) {
                    *slot = *byte;
                }
            }
            if let Err(Malformed { offset, .. }) = find(&space, 500).metadata {
                prop_assert!((500..=500 + space.len() as u64).contains(&offset));
            }
        }
    }
}
