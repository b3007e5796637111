//! Files of `torch.save`: zip archives of records. The record `data.pkl` is a pickle, and the
//! records `data/…` are the storages to which it refers.
//!
//! Records are used in place, so they must not be encrypted or overlapping, and their local header
//! must agree with the directory. Records that other programs have added or deflated are accepted.
//! torch writes a data descriptor after each record (bit 3 of its flags), and no sizes into its
//! local header. It pads that header to align the data, and ends every archive with the records for
//! large files (zip64), whatever its size.

mod end;

use std::collections::HashSet;

pub use end::{Directory, TAIL_LEN, find_directory};

use super::bytes::Cursor;
use super::tensors::prologue::no_format;
use crate::error::{Malformed, Shortened};

/// Bytes of a local header before the record's name.
pub const LOCAL_LEN: u64 = 30;
const LOCAL: [u8; 4] = *b"PK\x03\x04";
const CENTRAL: u32 = u32::from_le_bytes(*b"PK\x01\x02");
/// The id of the extra field with the values that do not fit into 32 bits.
const EXTRA64: u16 = 1;
const ENCRYPTED: u16 = 1 | 1 << 6 | 1 << 13;
/// The methods of compression that are known: none, and deflate.
const STORED: u16 = 0;
const DEFLATED: u16 = 8;
/// The most bytes of a deflated pickle.
const MAX_PICKLE: u64 = 1 << 30;
/// The most bytes that a deflated byte stands for.
const MAX_RATIO: u64 = 1032;
/// The flag of records whose sizes are in a data descriptor, and may be missing from the local
/// header.
const DESCRIBED: u16 = 1 << 3;
/// Flags that are accepted: the compression level, UTF-8 names, and the one above.
const KNOWN_FLAGS: u16 = 0b110 | DESCRIBED | 1 << 11;

/// True if a file with these first bytes may be such an archive.
pub fn recognises(bytes: &[u8]) -> bool {
    bytes.starts_with(&LOCAL)
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
    /// Bytes of its data in the archive.
    pub packed: u64,
    /// The position of the next record, or of the directory.
    end: u64,
    method: u16,
    flags: u16,
}

/// Parses a central directory: the records that a load needs, sorted by position. Overlaps are
/// refused, as far as they can be found without the local headers.
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
    let folder = checked_folder(&raw, at)?;
    raw.sort_by_key(|central| central.header_at);
    let ends = raw.iter().skip(1).map(|next| next.header_at).chain([directory.start]);
    let ends: Vec<u64> = ends.collect();
    if let Some((central, _)) = raw.iter().zip(&ends).find(|(central, end)| !central.ends_by(**end))
    {
        let at = base.saturating_add(central.header_at);
        return Err(overlaps(&String::from_utf8_lossy(central.name), at, central.packed));
    }
    let is_needed = |central: &CentralEntry<'_>| {
        central.name.strip_prefix(folder).is_some_and(|name| {
            [&b"data.pkl"[..], b"byteorder", b"version"].contains(&name)
                || name.starts_with(b"data/")
        })
    };
    let needed = raw.into_iter().zip(ends).filter(|(central, _)| is_needed(central));
    let records =
        needed.map(|(central, end)| central.record(end)).collect::<Result<Vec<_>, _>>()?;
    let mut names = HashSet::with_capacity(records.len());
    if let Some(twice) = records.iter().find(|record| !names.insert(&record.name)) {
        return Err(Malformed::new(
            at,
            format!("the zip archive has two records `{}`", Shortened(&twice.name)),
        ));
    }
    Ok(records)
}

/// Returns the folder of the first record, in which torch looks for all others; refuses archives
/// that were not written by `torch.save`.
fn checked_folder<'b>(raw: &[CentralEntry<'b>], at: u64) -> Result<&'b [u8], Malformed> {
    let name = raw.first().map_or(&[][..], |first| first.name);
    let folder = name.iter().position(|&byte| byte == b'/').and_then(|end| name.get(..=end));
    let has = |what: fn(&[u8]) -> bool| {
        let top = folder?;
        raw.iter().any(|central| central.name.strip_prefix(top).is_some_and(what)).then_some(top)
    };
    if has(|name| name == b"constants.pkl" || name.starts_with(b"code/")).is_some() {
        let what =
            "a TorchScript archive, as torch.jit.save writes it: load it with torch.jit.load";
        return Err(Malformed::new(at, what));
    }
    has(|name| name == b"data.pkl").ok_or_else(|| {
        let is_npz = raw.iter().any(|central| central.name.ends_with(b".npy"));
        let what = if is_npz {
            "this is an .npz archive of numpy: numpy.load reads it"
        } else {
            "this is a zip archive without the `data.pkl` that torch.save writes: if a checkpoint \
             was packed into it, unpack it first"
        };
        Malformed::new(at, no_format(what))
    })
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

    /// True if its data may end at this position or before.
    fn ends_by(&self, end: u64) -> bool {
        let header = LOCAL_LEN.saturating_add(self.name.len() as u64);
        self.header_at.saturating_add(header).saturating_add(self.packed) <= end
    }

    fn record(self, end: u64) -> Result<Record, Malformed> {
        let (len, packed) = (self.len, self.packed);
        if self.flags & ENCRYPTED != 0 {
            return Err(self.fail("is encrypted, which torch.save never does".to_owned()));
        }
        if ![STORED, DEFLATED].contains(&self.method) {
            let method = self.method;
            return Err(self.fail(format!(
                "is compressed (method {method}), which torch.save never does: unpack the archive, \
                 and pack it without compression"
            )));
        }
        if self.flags & !KNOWN_FLAGS != 0 {
            return Err(
                self.fail(format!("has flags {:#06x}, of which some are unknown", self.flags))
            );
        }
        if self.method == STORED && packed != len {
            return Err(self.fail(format!(
                "has {packed} bytes in the archive, and {len} without compression: expected the \
                 same"
            )));
        }
        if len > packed.saturating_mul(MAX_RATIO) {
            let what = format!(
                "claims to have {len} bytes, deflated to {packed}: expected at most {MAX_RATIO} \
                 for each"
            );
            return Err(self.fail(what));
        }
        if self.method == DEFLATED && len > MAX_PICKLE && self.name.ends_with(b".pkl") {
            return Err(self.fail(format!("has {len} bytes: expected at most {MAX_PICKLE}")));
        }
        if self.disk != 0 {
            return Err(self.fail("is in another part of the archive".to_owned()));
        }
        let name = std::str::from_utf8(self.name)
            .map_err(|_| self.fail("has a name that is not UTF-8".to_owned()))?
            .to_owned();
        let CentralEntry { header_at, method, flags, .. } = self;
        Ok(Record { name, header_at, len, packed, end, method, flags })
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

    /// Its name in the archive's folder, which `torch.save` names after the file.
    pub fn name_in_folder(&self) -> &str {
        self.name.split_once('/').map_or(&self.name, |(_, name)| name)
    }

    /// True if its data are deflated.
    pub fn is_deflated(&self) -> bool {
        self.method == DEFLATED
    }

    /// Returns the position of its data. The local header must agree with the directory, and the
    /// data must end where the next record or the directory begins, or before.
    pub fn data_at(&self, header: &[u8], base: u64) -> Result<u64, Malformed> {
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
        if cursor.u16("method")? != self.method {
            return Err(differs("its method"));
        }
        cursor.take(8, "time and CRC-32")?;
        for expected in [self.packed, self.len] {
            let size = cursor.u32("size")?;
            let is_unset = size == 0 && self.flags & DESCRIBED != 0;
            // A size in the extra field, which is not parsed here, has all bits set.
            if !is_unset && u64::from(size) != expected && size != u32::MAX {
                return Err(differs("its size"));
            }
        }
        let (name_len, extra_len) = (cursor.u16("name")?, cursor.u16("extra fields")?);
        if usize::from(name_len) != self.name.len() || cursor.remaining() != self.name.as_bytes() {
            return Err(differs("its name"));
        }
        let header = self.header_len().saturating_add(extra_len.into());
        let from = self.header_at.saturating_add(header);
        let fits = from.saturating_add(self.packed) <= self.end;
        fits.then_some(from).ok_or_else(|| overlaps(&self.name, at, self.packed))
    }
}

fn overlaps(name: &str, at: u64, len: u64) -> Malformed {
    let name = Shortened(name);
    let what = format!("record `{name}` of {len} bytes overlaps the next record, or the directory");
    Malformed::new(at, what)
}
