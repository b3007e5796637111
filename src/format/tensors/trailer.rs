//! The index trailer: data at the end of the index block, after its last entry, where other readers see
//! unused space. From its end backwards: a manifest, the identity of a saved object, metadata.

use super::identity::{self, FileIdentity, PAIR_LEN};
use super::metadata;
use crate::error::{Error, Malformed, Result};

/// The contents of an index trailer, except its manifest.
#[derive(Debug, PartialEq, Eq)]
pub struct IndexTrailer {
    /// The identity by which the pickle of a saved object recognises this file of its storages.
    pub pair_id: Option<FileIdentity>,
    /// Names and values.
    pub metadata: std::result::Result<Vec<(String, String)>, Malformed>,
}

/// Bytes that [`put`] writes.
pub fn len(metadata: &[u8], paired: bool) -> usize {
    metadata.len() + if paired { PAIR_LEN } else { 0 }
}

/// Writes encoded metadata and an identity to the end of `space`, which follows the entries.
pub fn put(mut space: &mut [u8], metadata: &[u8], pair_id: Option<FileIdentity>) -> Result<()> {
    let found = space.len();
    let short = || {
        let needed = len(metadata, pair_id.is_some());
        Error::Bug(format!("{needed} bytes to be put into {found} behind the index"))
    };
    if let Some(id) = pair_id {
        if !identity::put(space, id) {
            return Err(short());
        }
        space = space.split_last_chunk_mut::<PAIR_LEN>().ok_or_else(short)?.0;
    }
    let at = space.len().checked_sub(metadata.len()).ok_or_else(short)?;
    space.split_at_mut(at).1.copy_from_slice(metadata);
    Ok(())
}

/// Finds the contents of the space after the entries, which lies at file position `at`.
pub fn find(space: &[u8], at: u64) -> IndexTrailer {
    let pair_id = identity::find(space);
    let unpaired = space.len().saturating_sub(pair_id.map_or(0, |_| PAIR_LEN));
    let metadata = metadata::find(space.split_at(unpaired).0, at);
    IndexTrailer { pair_id, metadata }
}

#[cfg(test)]
#[allow(clippy::unwrap_used, clippy::indexing_slicing)]
mod tests {
    use proptest::prelude::*;

    use super::*;

    #[test]
    fn each_is_found_with_and_without_the_other() {
        let metadata = vec![("b".to_owned(), "1".to_owned()), ("a".to_owned(), String::new())];
        for pair_id in [None, Some([7; 16])] {
            for metadata in [vec![], metadata.clone()] {
                let bytes = metadata::encode(&metadata, "f").unwrap();
                let needed = len(&bytes, pair_id.is_some());
                for free in [0, 1, 100] {
                    let mut space = vec![0; needed + free];
                    put(&mut space, &bytes, pair_id).unwrap();
                    assert!(space[..free].iter().all(|&byte| byte == 0));
                    let found = find(&space, 0);
                    assert_eq!(found, IndexTrailer { pair_id, metadata: Ok(metadata.clone()) });
                }
                if needed > 0 {
                    put(&mut vec![0; needed - 1], &bytes, pair_id).unwrap_err();
                }
            }
        }
    }

    proptest! {
        #[test]
        fn any_bytes_are_read_or_refused(
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
