//! The end of an archive, which states where its directory is.

use crate::error::Malformed;
use crate::format::bytes::Cursor;

/// Bytes at the end of a file that contain all that [`find_directory`] needs: the zip64 end record,
/// its locator, the plain end record, and the longest comment.
pub const TAIL_LEN: u64 = (END_LEN + LOCATOR_LEN + END64_LEN) as u64 + 0xffff;

/// Bytes of an entry of the directory without its name and other texts.
const CENTRAL_LEN: u64 = 46;
const END_LEN: usize = 22;
const LOCATOR_LEN: usize = 20;
const END64_LEN: usize = 56;
/// Maximum bytes of a directory that is read: those of a million records.
const MAX_DIRECTORY: u64 = 100_000_000;
const END: [u8; 4] = *b"PK\x05\x06";
const END64: u32 = u32::from_le_bytes(*b"PK\x06\x06");
const LOCATOR: [u8; 4] = *b"PK\x06\x07";

/// The extent of the central directory, in positions from the first byte of the archive.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Directory {
    /// Position of its first byte.
    pub start: u64,
    /// Bytes.
    pub len: u64,
    /// The number of records that it lists.
    pub count: u64,
}

/// Finds the central directory from the last bytes of an archive of `size` bytes: at least
/// [`TAIL_LEN`] of them, or all. `base` is the file position of the archive, for errors.
pub fn find_directory(tail: &[u8], size: u64, base: u64) -> Result<Directory, Malformed> {
    let fail = |at: u64, what: String| Malformed::new(base.saturating_add(at), what);
    let at = end_of_archive(tail).ok_or_else(|| {
        fail(
            size,
            "a zip archive without a central directory at its end: the file may be incomplete"
                .to_owned(),
        )
    })?;
    let end_at = size.saturating_sub(tail.len() as u64).saturating_add(at as u64);
    let (before, end) = tail.split_at(at);
    let plain = EndRecord::plain(end, base.saturating_add(end_at))?;
    let large = EndRecord::large(before, end_at, base)?;
    let several = plain.several || large.as_ref().is_some_and(|large| large.several);
    let (end, follows) = match large {
        Some(large) if !plain.is_short_for(&large) => {
            let what = format!(
                "the end records of the zip archive contradict each other: {:?} and, as zip64, \
                 {:?}",
                plain.directory, large.directory
            );
            return Err(fail(end_at, what));
        }
        Some(large) => (large, end_at.saturating_sub((LOCATOR_LEN + END64_LEN) as u64)),
        None => (plain, end_at),
    };
    if several {
        return Err(fail(
            end_at,
            "the zip archive is one of several parts: expected an archive in one file".to_owned(),
        ));
    }
    let Directory { start, len, count } = end.directory;
    if start.checked_add(len) != Some(follows) {
        let what = format!(
            "the directory of the zip archive: expected it to end at byte {follows}, found {len} \
             bytes from byte {start} on"
        );
        return Err(fail(follows, what));
    }
    // Each record has a name, extra fields and a comment, of at most 65,535 bytes each.
    let most = count.saturating_mul(CENTRAL_LEN + 3 * u64::from(u16::MAX)).min(MAX_DIRECTORY);
    if len > most {
        let what = format!("expected at most {most} bytes for {count} records, found {len}");
        return Err(fail(start, what));
    }
    if count > len / CENTRAL_LEN {
        let what = format!("a directory of {len} bytes cannot name {count} records");
        return Err(fail(start, what));
    }
    Ok(end.directory)
}

/// The position of the end record in the last bytes of an archive.
fn end_of_archive(tail: &[u8]) -> Option<usize> {
    let last = tail.len().checked_sub(END_LEN)?;
    (0..=last).rev().find(|&at| {
        let end = tail.split_at(at).1;
        let comment = end.get(END_LEN - 2..END_LEN).and_then(|len| <[u8; 2]>::try_from(len).ok());
        end.starts_with(&END)
            && comment.map(|len| usize::from(u16::from_le_bytes(len))) == Some(last - at)
    })
}

/// The end record of an archive.
struct EndRecord {
    directory: Directory,
    /// True if the archive claims to consist of several parts.
    several: bool,
}

impl EndRecord {
    /// Parses the end record that every archive has; `at` is its position.
    fn plain(bytes: &[u8], at: u64) -> Result<Self, Malformed> {
        let mut cursor = Cursor::new(bytes, at, "end of the zip archive");
        cursor.take(END.len(), "signature")?;
        let disks = [cursor.u16("part")?, cursor.u16("part of the directory")?];
        let counts = [cursor.u16("records here")?, cursor.u16("records")?];
        let (len, start) = (cursor.u32("size")?.into(), cursor.u32("position")?.into());
        let several = disks != [0, 0] || counts[0] != counts[1];
        Ok(EndRecord { directory: Directory { start, len, count: counts[1].into() }, several })
    }

    /// Parses the zip64 end record, which lies with its locator before the plain one; None if there
    /// is none.
    fn large(before: &[u8], end_at: u64, base: u64) -> Result<Option<Self>, Malformed> {
        let Some((before, locator)) =
            before.len().checked_sub(LOCATOR_LEN).and_then(|at| before.split_at_checked(at))
        else {
            return Ok(None);
        };
        if !locator.starts_with(&LOCATOR) {
            return Ok(None);
        }
        let at = end_at.saturating_sub(LOCATOR_LEN as u64);
        let mut cursor =
            Cursor::new(locator, base.saturating_add(at), "locator in the zip archive");
        cursor.take(LOCATOR.len(), "signature")?;
        let disk = cursor.u32("part")?;
        let (found_at, disks) = (cursor.u64("position")?, cursor.u32("parts")?);
        let at = at.saturating_sub(END64_LEN as u64);
        let fail = |what: String| Malformed::new(base.saturating_add(at), what);
        let bytes = before.len().checked_sub(END64_LEN).and_then(|from| before.get(from..));
        let bytes = bytes.filter(|_| found_at == at).ok_or_else(|| {
            fail(format!(
                "expected the zip64 end record of the zip archive at byte {at}, found its position \
                 given as {found_at}"
            ))
        })?;
        let mut cursor = Cursor::new(bytes, base.saturating_add(at), "end of the zip archive");
        let begin = (cursor.u32("signature")?, cursor.u64("length")?);
        if begin != (END64, END64_LEN as u64 - 12) {
            return Err(fail(
                "the zip64 end record of the zip archive has a wrong signature or length"
                    .to_owned(),
            ));
        }
        cursor.take(4, "versions")?;
        let parts = [disk, cursor.u32("part")?, cursor.u32("part of the directory")?];
        let counts = [cursor.u64("records here")?, cursor.u64("records")?];
        let (len, start) = (cursor.u64("size")?, cursor.u64("position")?);
        let several = parts != [0; 3] || disks > 1 || counts[0] != counts[1];
        Ok(Some(EndRecord { directory: Directory { start, len, count: counts[1] }, several }))
    }

    /// True if this plain end record agrees with the zip64 record `large`. The maximum of a field
    /// stands for any value.
    fn is_short_for(&self, large: &Self) -> bool {
        let (plain, large) = (&self.directory, &large.directory);
        let same = |short: u64, most: u64, value: u64| short == value || short == most;
        same(plain.start, u32::MAX.into(), large.start)
            && same(plain.len, u32::MAX.into(), large.len)
            && same(plain.count, u16::MAX.into(), large.count)
    }
}
