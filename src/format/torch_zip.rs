//! Files of `torch.save`: zip archives of records. The record `data.pkl` is a pickle, and the
//! records `data/…` are the storages to which it refers.
//!
//! Records are used in place, so they must not be compressed, encrypted or overlapping, and their
//! local header must agree with the directory. torch writes a data descriptor after each record
//! (bit 3 of its flags), and no sizes into its local header. It pads that header to align the data,
//! and ends every archive with the records for large files (zip64), whatever its size.

use std::collections::HashSet;

use super::bytes::Cursor;
use crate::error::{Malformed, Shortened};

/// Bytes of a local header before the record's name.
pub const LOCAL_LEN: u64 = 30;
/// Bytes at the end of a file that contain all that [`find_directory`] needs: the zip64 end record,
/// its locator, the plain end record, and the longest comment.
pub const TAIL_LEN: u64 = (END_LEN + LOCATOR_LEN + END64_LEN) as u64 + 0xffff;

const END_LEN: usize = 22;
const LOCATOR_LEN: usize = 20;
const END64_LEN: usize = 56;
const CENTRAL_LEN: u64 = 46;
/// Maximum bytes of a directory that is read: those of a million records.
const MAX_DIRECTORY: u64 = 100_000_000;
const LOCAL: [u8; 4] = *b"PK\x03\x04";
const CENTRAL: u32 = u32::from_le_bytes(*b"PK\x01\x02");
const END: [u8; 4] = *b"PK\x05\x06";
const END64: u32 = u32::from_le_bytes(*b"PK\x06\x06");
const LOCATOR: [u8; 4] = *b"PK\x06\x07";
/// The id of the extra field with the values that do not fit into 32 bits.
const EXTRA64: u16 = 1;
const ENCRYPTED: u16 = 1 | 1 << 6 | 1 << 13;
/// The flag of records whose sizes are in a data descriptor, and may be missing from the local
/// header.
const DESCRIBED: u16 = 1 << 3;
/// Flags that are accepted: the compression level, UTF-8 names, and the one above.
const KNOWN_FLAGS: u16 = 0b110 | DESCRIBED | 1 << 11;

/// True if a file with these first bytes may be such an archive.
pub fn recognises(bytes: &[u8]) -> bool {
    bytes.starts_with(&LOCAL)
}

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

/// A record as the central directory describes it.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Record {
    /// Its name, that of the archive's folder included.
    pub name: String,
    /// Position of its local header.
    pub header_at: u64,
    /// Bytes of its data.
    pub len: u64,
    flags: u16,
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

/// Parses a central directory: the records, sorted by position. Overlaps are refused, as far as
/// they can be found without the local headers.
pub fn records(bytes: &[u8], directory: &Directory, base: u64) -> Result<Vec<Record>, Malformed> {
    let at = base.saturating_add(directory.start);
    let mut cursor = Cursor::new(bytes, at, "directory of the zip archive");
    let mut raw: Vec<CentralEntry<'_>> = Vec::new();
    while !cursor.remaining().is_empty() {
        raw.push(CentralEntry::read(&mut cursor)?);
    }
    if raw.len() as u64 != directory.count {
        let what = format!(
            "expected {} records in the directory of the zip archive, found {}",
            directory.count,
            raw.len()
        );
        return Err(Malformed::new(at, what));
    }
    check_kind(&raw, at)?;
    let mut records = raw.into_iter().map(CentralEntry::record).collect::<Result<Vec<_>, _>>()?;
    records.sort_by_key(|record| record.header_at);
    let ends = records.iter().skip(1).map(|next| next.header_at).chain([directory.start]);
    for (record, end) in records.iter().zip(ends) {
        if record.data_at_least().is_none_or(|from| from.saturating_add(record.len) > end) {
            return Err(record.overlaps(base));
        }
    }
    let mut names = HashSet::with_capacity(records.len());
    if let Some(twice) = records.iter().find(|record| !names.insert(&record.name)) {
        return Err(Malformed::new(
            at,
            format!("the zip archive has two records `{}`", Shortened(&twice.name)),
        ));
    }
    Ok(records)
}

/// Refuses archives that were not written by `torch.save`.
fn check_kind(raw: &[CentralEntry<'_>], at: u64) -> Result<(), Malformed> {
    let folder = |central: &CentralEntry<'_>| central.name.iter().position(|&byte| byte == b'/');
    let first = raw.first().and_then(|first| first.name.get(..=folder(first)?));
    let has = |what: fn(&[u8]) -> bool| {
        raw.iter()
            .any(|central| first.and_then(|top| central.name.strip_prefix(top)).is_some_and(what))
    };
    if has(|name| name == b"constants.pkl" || name.starts_with(b"code/")) {
        let what =
            "a TorchScript archive, as torch.jit.save writes it: load it with torch.jit.load";
        return Err(Malformed::new(at, what));
    }
    if !has(|name| name == b"data.pkl") {
        let what = "a zip archive without the `data.pkl` that torch.save writes: if a checkpoint was \
                    packed into it, unpack it first";
        return Err(Malformed::new(at, what));
    }
    let top = first.unwrap_or(b"");
    match raw.iter().find(|central| !central.name.starts_with(top)) {
        Some(other) => Err(other.fail("is in another folder than the first record".to_owned())),
        None => Ok(()),
    }
}

/// An entry of a central directory before it is validated.
struct CentralEntry<'b> {
    position: u64,
    name: &'b [u8],
    flags: u16,
    method: u16,
    packed: u64,
    len: u64,
    disk: u32,
    header_at: u64,
}

impl<'b> CentralEntry<'b> {
    fn read(cursor: &mut Cursor<'b>) -> Result<Self, Malformed> {
        let position = cursor.offset();
        if cursor.u32("signature")? != CENTRAL {
            return Err(Malformed::new(
                position,
                "the directory of the zip archive has an entry with a wrong signature",
            ));
        }
        cursor.take(4, "versions")?;
        let (flags, method) = (cursor.u16("flags")?, cursor.u16("method")?);
        cursor.take(8, "time and CRC-32")?;
        let (packed, len) = (cursor.u32("size")?, cursor.u32("size")?);
        let lens = [cursor.u16("name")?, cursor.u16("extra fields")?, cursor.u16("comment")?];
        let disk = cursor.u16("disk")?;
        cursor.take(6, "attributes")?;
        let header_at = cursor.u32("position")?;
        let name = cursor.take(lens[0].into(), "name")?;
        let extra_at = cursor.offset();
        let extra = cursor.take(lens[1].into(), "extra fields")?;
        cursor.take(lens[2].into(), "comment")?;
        let mut large = extra64(extra, extra_at)?;
        // The extra field has only those values that are set to their maximum here, in this order.
        let mut or_large = |value: u32, what: &str| match &mut large {
            Some(cursor) if value == u32::MAX => cursor.u64(what),
            _ => Ok(value.into()),
        };
        let len = or_large(len, "size")?;
        let packed = or_large(packed, "size")?;
        let header_at = or_large(header_at, "position")?;
        let disk = match &mut large {
            Some(cursor) if disk == u16::MAX => cursor.u32("disk")?,
            _ => disk.into(),
        };
        Ok(CentralEntry { position, name, flags, method, packed, len, disk, header_at })
    }

    fn fail(&self, what: String) -> Malformed {
        let name = String::from_utf8_lossy(self.name);
        Malformed::new(self.position, format!("record `{}`: it {what}", Shortened(&name)))
    }

    fn record(self) -> Result<Record, Malformed> {
        if self.flags & ENCRYPTED != 0 {
            return Err(self.fail("is encrypted, which torch.save never does".to_owned()));
        }
        if self.method != 0 {
            let method = self.method;
            return Err(self.fail(format!(
                "is compressed (method {method}), which torch.save never does: unpack the archive, and pack it without compression"
            )));
        }
        if self.flags & !KNOWN_FLAGS != 0 {
            return Err(
                self.fail(format!("has flags {:#06x}, of which some are unknown", self.flags))
            );
        }
        if self.packed != self.len {
            let (packed, len) = (self.packed, self.len);
            return Err(self.fail(format!(
                "has {packed} bytes in the archive, and {len} without compression: expected the \
                 same"
            )));
        }
        if self.disk != 0 {
            return Err(self.fail("is in another part of the archive".to_owned()));
        }
        let name = std::str::from_utf8(self.name)
            .map_err(|_| self.fail("has a name that is not UTF-8".to_owned()))?
            .to_owned();
        Ok(Record { name, header_at: self.header_at, len: self.len, flags: self.flags })
    }
}

/// Finds the values of the zip64 extra field.
fn extra64(extra: &[u8], at: u64) -> Result<Option<Cursor<'_>>, Malformed> {
    let mut cursor = Cursor::new(extra, at, "extra fields of a record");
    // A remainder that is too short for a field is padding.
    while cursor.remaining().len() >= 4 {
        let (id, len) = (cursor.u16("number")?, cursor.u16("length")?);
        let from = cursor.offset();
        let field = cursor.take(len.into(), "field")?;
        if id == EXTRA64 {
            return Ok(Some(Cursor::new(field, from, "extra field for large files")));
        }
    }
    Ok(None)
}

impl Record {
    /// Bytes of its local header, without the extra field, whose length the directory does not
    /// state.
    pub fn header_len(&self) -> u64 {
        LOCAL_LEN.saturating_add(self.name.len() as u64)
    }

    fn data_at_least(&self) -> Option<u64> {
        self.header_at.checked_add(self.header_len())
    }

    fn overlaps(&self, base: u64) -> Malformed {
        let at = base.saturating_add(self.header_at);
        let what = format!(
            "record `{}` of {} bytes overlaps the next record, or the directory",
            Shortened(&self.name),
            self.len
        );
        Malformed::new(at, what)
    }

    /// Returns the position of its data. The local header must agree with the directory, and the
    /// data must end at `end`, where the next record or the directory begins, or before.
    pub fn data_at(&self, header: &[u8], end: u64, base: u64) -> Result<u64, Malformed> {
        let at = base.saturating_add(self.header_at);
        let differs = |what: &str| {
            let name = Shortened(&self.name);
            Malformed::new(
                at,
                format!("record `{name}`: {what} in its local header differs from the directory"),
            )
        };
        let mut cursor = Cursor::new(header, at, "local header of a record");
        if cursor.take(LOCAL.len(), "signature")? != LOCAL {
            return Err(differs("its signature"));
        }
        cursor.take(2, "version")?;
        if cursor.u16("flags")? != self.flags {
            return Err(differs("its flags"));
        }
        if cursor.u16("method")? != 0 {
            return Err(differs("its method"));
        }
        cursor.take(8, "time and CRC-32")?;
        let unset = if self.flags & DESCRIBED != 0 { 0 } else { self.len };
        for size in [cursor.u32("size")?, cursor.u32("size")?] {
            let is_one_of = [self.len, unset].contains(&u64::from(size));
            // A size in the extra field, which is not parsed here, has all bits set.
            if !is_one_of && size != u32::MAX {
                return Err(differs("its size"));
            }
        }
        let (name_len, extra_len) = (cursor.u16("name")?, cursor.u16("extra fields")?);
        if usize::from(name_len) != self.name.len() || cursor.remaining() != self.name.as_bytes() {
            return Err(differs("its name"));
        }
        let from = self.data_at_least().and_then(|from| from.checked_add(extra_len.into()));
        let from = from.filter(|from| from.checked_add(self.len).is_some_and(|to| to <= end));
        from.ok_or_else(|| self.overlaps(base))
    }
}
