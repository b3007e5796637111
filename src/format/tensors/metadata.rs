//! User metadata of a file: names and values beside its tensors.
//!
//! They lie in the index block after its entries, where other readers see unused space:
//!
//! ```text
//! for each   u32 length of the name, name, u32 length of the value, value    (UTF-8)
//! "TZMETA01"
//! u32        bytes of all pairs
//! u32        CRC-32 of all pairs
//! ```

use std::collections::BTreeSet;

use crate::error::{Error, Malformed, Result, Shortened};
use crate::format::bytes::Cursor;
use crate::sys::to_usize;

/// Distinguishes metadata from unused space.
const MAGIC: [u8; 8] = *b"TZMETA01";
/// Bytes of magic, length and checksum.
const END_LEN: usize = MAGIC.len() + 2 * size_of::<u32>();
/// Maximum bytes of metadata, length fields included: the limit of a safetensors header.
pub const MAX_LEN: usize = 100_000_000;
/// Maximum number of names. Each allocates memory of its own.
const MAX_PAIRS: usize = 1_000_000;

/// Encodes names and values for `uri`, in their order; empty if there are none.
pub fn encode(pairs: &[(String, String)], uri: &str) -> Result<Vec<u8>> {
    let refused = |what: String| Error::InvalidArgument(format!("`{uri}`: {what}"));
    if pairs.is_empty() {
        return Ok(Vec::new());
    }
    let mut out = Vec::new();
    let mut names = BTreeSet::new();
    if pairs.len() > MAX_PAIRS {
        let found = pairs.len();
        let what = format!("expected metadata of at most {MAX_PAIRS} names, found {found}");
        return Err(refused(what));
    }
    for (name, value) in pairs {
        if !names.insert(name) {
            return Err(refused(format!("metadata have `{}` twice", Shortened(name))));
        }
        for text in [name, value] {
            // Too long a text makes the sum too long, which is refused below.
            let len = u32::try_from(text.len()).unwrap_or(u32::MAX);
            out.extend_from_slice(&len.to_le_bytes());
            out.extend_from_slice(text.as_bytes());
        }
    }
    let len = u32::try_from(out.len()).ok().filter(|_| out.len() <= MAX_LEN);
    let len = len.ok_or_else(|| {
        refused(format!("expected metadata of at most {MAX_LEN} bytes, found {}", out.len()))
    })?;
    let crc = crc32fast::hash(&out);
    out.extend_from_slice(&MAGIC);
    out.extend_from_slice(&len.to_le_bytes());
    out.extend_from_slice(&crc.to_le_bytes());
    Ok(out)
}

/// Parses the names and values at the end of `space`, which lies at file position `at`; none if the
/// magic is not there.
pub fn find(space: &[u8], at: u64) -> Result<Vec<(String, String)>, Malformed> {
    let Some((before, end)) = space.split_last_chunk::<END_LEN>() else { return Ok(Vec::new()) };
    if !end.starts_with(&MAGIC) {
        return Ok(Vec::new());
    }
    let position = |before: usize| at.saturating_add(before as u64);
    let mut cursor = Cursor::new(end, position(before.len()), "end of the metadata");
    cursor.take(MAGIC.len(), "magic")?;
    let (len_at, most) = (cursor.offset(), MAX_LEN.min(before.len()));
    let len = to_usize(cursor.u32("length")?.into());
    if len > most {
        let what = format!("expected metadata of at most {most} bytes, found {len}");
        return Err(Malformed::new(len_at, what));
    }
    let crc = cursor.u32("checksum")?;
    let (free, pairs) = before.split_at(before.len() - len);
    let found = crc32fast::hash(pairs);
    if found != crc {
        let what = format!("the metadata are damaged: expected CRC-32 {crc:#x}, found {found:#x}");
        return Err(Malformed::new(position(free.len()), what));
    }
    parse(Cursor::new(pairs, position(free.len()), "metadata"))
}

fn parse(mut cursor: Cursor<'_>) -> Result<Vec<(String, String)>, Malformed> {
    let (mut pairs, mut names) = (Vec::new(), BTreeSet::new());
    while !cursor.remaining().is_empty() {
        let at = cursor.offset();
        let (name, value) = (text(&mut cursor, "name")?, text(&mut cursor, "value")?);
        if !names.insert(name) {
            let what = format!("`{}` comes twice in the metadata", Shortened(name));
            return Err(Malformed::new(at, what));
        }
        if pairs.len() == MAX_PAIRS {
            let what = format!("expected metadata of at most {MAX_PAIRS} names, found more");
            return Err(Malformed::new(at, what));
        }
        pairs.push((name.to_owned(), value.to_owned()));
    }
    Ok(pairs)
}

fn text<'b>(cursor: &mut Cursor<'b>, what: &str) -> Result<&'b str, Malformed> {
    let len = cursor.u32(what)?;
    let at = cursor.offset();
    let bytes = cursor.take(to_usize(len.into()), what)?;
    std::str::from_utf8(bytes)
        .map_err(|e| Malformed::new(at, format!("a {what} in the metadata is not UTF-8: {e}")))
}

#[cfg(test)]
mod tests {
    use proptest::prelude::*;

    use super::*;

    fn pair(name: &str, value: &str) -> (String, String) {
        (name.to_owned(), value.to_owned())
    }

    /// Appends a valid end to the bytes of pairs, which may be anything.
    fn ended(pairs: &[u8]) -> Vec<u8> {
        let mut out = pairs.to_vec();
        out.extend(MAGIC);
        out.extend(u32::try_from(pairs.len()).unwrap().to_le_bytes());
        out.extend(crc32fast::hash(pairs).to_le_bytes());
        out
    }

    fn refused(space: &[u8]) -> (u64, String) {
        let Malformed { offset, what, .. } = find(space, 1000).unwrap_err();
        (offset, what)
    }

    #[test]
    fn metadata_round_trip_in_order() {
        let pairs = [pair("z", "ü\n\0"), pair("", ""), pair("a", &"x".repeat(70_000))];
        let bytes = encode(&pairs, "f").unwrap();
        for free in [0, 1, 50] {
            let space = [vec![0xff; free], bytes.clone()].concat();
            assert_eq!(find(&space, 7).unwrap(), pairs);
        }
        assert_eq!(encode(&[], "f").unwrap(), b"");
        assert_eq!(find(&[0; 300], 0).unwrap(), []);
        assert_eq!(find(b"", 0).unwrap(), []);
    }

    #[test]
    fn duplicate_names_and_oversized_metadata_are_refused() {
        let twice = encode(&[pair("a", "1"), pair("b", "2"), pair("a", "3")], "f").unwrap_err();
        assert!(twice.to_string().contains("`a` twice"), "{twice}");
        let most = MAX_LEN - 8 - 1;
        assert_eq!(encode(&[pair("a", &"x".repeat(most))], "f").unwrap().len(), MAX_LEN + END_LEN);
        let long = encode(&[pair("a", &"x".repeat(most + 1))], "f").unwrap_err();
        assert!(long.to_string().contains("at most 100000000 bytes, found 100000001"), "{long}");
    }

    #[test]
    fn damage_is_reported_with_its_position() {
        let good = encode(&[pair("name", "value")], "f").unwrap();
        for at in 0..good.len() {
            let mut bad = good.clone();
            bad[at] ^= 0x10;
            let in_magic = (17..25).contains(&at);
            assert_eq!(find(&bad, 1000).is_ok(), in_magic, "byte {at}");
        }
        let (at, what) = refused(&[&[0; 5][..], &good[1..]].concat());
        assert_eq!(at, 1004, "{what}");
        assert!(what.contains("damaged: expected CRC-32"), "{what}");
        let (at, what) = refused(&good[1..]);
        assert_eq!(at, 1000 + 16 + 8, "{what}");
        assert!(what.contains("at most 16 bytes, found 17"), "{what}");
        let text = |len: u32, bytes: &[u8]| [&len.to_le_bytes()[..], bytes].concat();
        for (pairs, at, expected) in [
            (vec![1, 0, 0], 1000, "ends inside its name: expected 4 bytes, found 3"),
            (text(5, b"abc"), 1004, "ends inside its name: expected 5 bytes, found 3"),
            (text(1, b"a"), 1005, "ends inside its value: expected 4 bytes, found 0"),
            ([text(1, b"a"), text(u32::MAX, b"")].concat(), 1009, "expected 4294967295 bytes"),
            (
                [text(1, b"\xff"), text(0, b"")].concat(),
                1004,
                "a name in the metadata is not UTF-8",
            ),
            ([text(0, b""), text(2, b"\xed\xa0")].concat(), 1008, "a value in the metadata"),
            ([text(1, b"a"), text(0, b"")].concat().repeat(2), 1009, "`a` comes twice"),
        ] {
            let (found, what) = refused(&ended(&pairs));
            assert_eq!(found, at, "{what}");
            assert!(what.contains(expected), "{what}");
        }
    }

    proptest! {
        #[test]
        fn any_metadata_round_trip(
            pairs in proptest::collection::btree_map(".{0,9}", ".{0,30}", 0..9),
            free in proptest::collection::vec(any::<u8>(), 0..40),
        ) {
            let pairs: Vec<_> = pairs.into_iter().rev().collect();
            let space = [free, encode(&pairs, "f").unwrap()].concat();
            let found = find(&space, 0);
            prop_assert!(pairs.is_empty() || found.unwrap() == pairs);
        }

        #[test]
        fn any_metadata_bytes_are_parsed_or_refused(pairs in proptest::collection::vec(0u8..6, 0..80)) {
            // Whatever is parsed encodes to the same bytes again.
            if let Ok(found) = find(&ended(&pairs), 0) {
                prop_assert!(pairs.is_empty() || encode(&found, "f").unwrap() == ended(&pairs));
            }
        }
    }
}
