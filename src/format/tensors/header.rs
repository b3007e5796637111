//! The record before each tensor's data, and the bytes of it that hashes cover.

use std::ops::Range;

use super::crypt_info::CryptInfo;
use super::index::{
    dimension, dtype_and_shape_len, encode_dtype_and_shape, parse_dtype_and_shape, parse_kind,
};
use crate::error::{Error, Malformed, Result};
use crate::format::bytes::Cursor;
use crate::format::catalog::Entry;
use crate::format::dtype::DType;
use crate::format::name::Name;
use crate::sys::to_usize;

/// A hash algorithm that headers name.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
#[repr(u8)]
pub enum Algorithm {
    /// CRC-32 of zlib, stored little-endian.
    Crc32 = 0,
    /// SHA-256.
    Sha256 = 1,
}

impl Algorithm {
    /// The algorithm of a code.
    fn of(code: u8) -> Option<Self> {
        [Algorithm::Crc32, Algorithm::Sha256].get(usize::from(code)).copied()
    }

    /// Its name in messages.
    pub fn name(self) -> &'static str {
        match self {
            Algorithm::Crc32 => "CRC32",
            Algorithm::Sha256 => "SHA256",
        }
    }

    /// Bytes of a value.
    pub fn size(self) -> usize {
        match self {
            Algorithm::Crc32 => 4,
            Algorithm::Sha256 => 32,
        }
    }
}

/// A tensor's header, as read.
#[derive(Debug, Clone)]
pub struct TensorHeader<'h> {
    /// All bytes of the header.
    pub raw: &'h [u8],
    /// Number of the owning module in `named_modules()` order.
    pub module_index: u16,
    /// The range of the header that holds the hashes of header and data, after their count.
    hashes: Range<usize>,
    /// The encryption of the data; None in files without encryption.
    pub crypt_info: Option<CryptInfo>,
    /// The range of the header that holds the encryption block, its length field included.
    crypt_at: Option<Range<usize>>,
}

impl<'h> TensorHeader<'h> {
    /// Parses the header that the index describes. All that both of them state must agree.
    pub fn parse(raw: &'h [u8], entry: &Entry, encrypted: bool) -> Result<Self, Malformed> {
        let base = entry.header_offset;
        let mut cursor = Cursor::new(raw, base, "tensor header");
        let len = cursor.u64("header length")?;
        if len != raw.len() as u64 {
            return Err(disagreement(
                entry,
                format!("the index leaves {} bytes for it, its length field says {len}", raw.len()),
            ));
        }
        let module_index = cursor.u16("module index")?;
        let kind = parse_kind(&mut cursor)?;
        check_name(&mut cursor, entry)?;
        if kind != entry.kind {
            let what = format!("type {:?} in the index, {kind:?} in the header", entry.kind);
            return Err(disagreement(entry, what));
        }
        check_dtype_and_shape(&mut cursor, entry)?;
        let hashes = check_hashes(&mut cursor)?;
        let (crypt_info, crypt_at) = if encrypted {
            let from = cursor.position();
            let len = cursor.u64("encryption block length")?;
            let at = cursor.offset();
            let info = CryptInfo::parse(cursor.take(to_usize(len), "encryption block")?, at)?;
            (Some(info), Some(from..cursor.position()))
        } else {
            (None, None)
        };
        let rest = cursor.remaining();
        let data_len: [u8; 8] = *rest
            .last_chunk()
            .ok_or_else(|| cursor.error("the tensor header has no room for its data length"))?;
        let data_len = i64::from_le_bytes(data_len);
        if u64::try_from(data_len) != Ok(entry.data_len) {
            return Err(disagreement(
                entry,
                format!("data length {} in the index, {data_len} in the header", entry.data_len),
            ));
        }
        Ok(TensorHeader { raw, module_index, hashes, crypt_info, crypt_at })
    }

    /// The hashes of header and data: each with its algorithm, and the range of its value in the
    /// header.
    pub fn hashes(&self) -> impl Iterator<Item = (Algorithm, Range<usize>)> + '_ {
        let mut at = self.hashes.start;
        std::iter::from_fn(move || {
            let [code, size] = *self.raw.get(at..self.hashes.end)?.first_chunk()?;
            let start = at + 2;
            at = start + usize::from(size);
            // `parse` has validated the algorithm and the size.
            let algorithm = Algorithm::of(code)?;
            Some((algorithm, start..at))
        })
    }

    /// The bytes of the header that hashes cover: hash values are zeroed, the encryption block is
    /// cut out.
    #[allow(clippy::indexing_slicing)] // `parse` has validated the ranges.
    pub fn covered(&self) -> Vec<u8> {
        let mut bytes = self.raw.to_vec();
        for (_, at) in self.hashes() {
            bytes[at].fill(0);
        }
        if let Some(cut) = &self.crypt_at {
            bytes.drain(cut.clone());
        }
        bytes
    }
}

fn disagreement(entry: &Entry, what: String) -> Malformed {
    let what = format!("tensor `{}`: header and index disagree: {what}", entry.name);
    Malformed::new(entry.header_offset, what)
}

/// Checks that the name is that of the index. The bytes are usually equal; another spelling is
/// accepted.
fn check_name(cursor: &mut Cursor<'_>, entry: &Entry) -> Result<(), Malformed> {
    let len = cursor.u16("name length")?;
    let at = cursor.offset();
    let stored = cursor.take(usize::from(len), "name")?;
    if stored == entry.name.stored().as_bytes() {
        return Ok(());
    }
    let name = Name::parse(stored).map_err(|what| Malformed::new(at, what))?;
    if name == entry.name {
        return Ok(());
    }
    Err(disagreement(entry, format!("Unexpected tensor name `{name}`")))
}

/// Checks that type and shape are those of the index.
fn check_dtype_and_shape(cursor: &mut Cursor<'_>, entry: &Entry) -> Result<(), Malformed> {
    let mut ahead = cursor.clone();
    if is_of_entry(&mut ahead, entry).unwrap_or(false) {
        *cursor = ahead;
        return Ok(());
    }
    let (dtype, shape) = parse_dtype_and_shape(cursor, entry.long)?;
    if dtype == entry.dtype && *shape == *entry.whole_shape() {
        return Ok(());
    }
    let what = format!(
        "{} {:?} in the index, {dtype} {shape:?} in the header",
        entry.dtype,
        entry.whole_shape()
    );
    Err(disagreement(entry, what))
}

/// True if type and shape are stored exactly as a plain type of this entry is written. False
/// otherwise, even if they mean the same.
fn is_of_entry(cursor: &mut Cursor<'_>, entry: &Entry) -> Result<bool, Malformed> {
    let len = cursor.u8("dtype length")?;
    if !entry.dtype.is_usual_string(cursor.take(usize::from(len), "dtype")?)
        || usize::from(cursor.u8("number of dimensions")?) != entry.whole_shape().len()
    {
        return Ok(false);
    }
    for &dim in entry.whole_shape() {
        if dimension(cursor, entry.long)? != dim {
            return Ok(false);
        }
    }
    Ok(true)
}

/// Validates the section of hashes, and returns its range in the header, without the count.
fn check_hashes(cursor: &mut Cursor<'_>) -> Result<Range<usize>, Malformed> {
    let len = usize::from(cursor.u16("hash section length")?);
    let (from, at) = (cursor.position(), cursor.offset());
    let mut section = Cursor::new(cursor.take(len, "hash section")?, at, "hash section");
    let count = section.u8("hash count")?;
    let start = from + section.position();
    for _ in 0..count {
        let code = section.u8("hash type")?;
        let algorithm = Algorithm::of(code)
            .ok_or_else(|| section.error(format!("unknown hash type {code}")))?;
        let size = usize::from(section.u8("hash size")?);
        if size != algorithm.size() {
            return Err(section.error(format!(
                "invalid {} size: expected {}, found {size}",
                algorithm.name(),
                algorithm.size()
            )));
        }
        section.take(size, "hash value")?;
    }
    if !section.remaining().is_empty() {
        return Err(section.error(format!(
            "the hash section has {} bytes after its last hash",
            section.remaining().len()
        )));
    }
    Ok(start..from + section.position())
}

/// The hashes of each tensor that the writer stores.
#[derive(Debug, Clone, Copy, Default, PartialEq, Eq)]
pub enum Hashes {
    /// CRC-32 and SHA-256, as the old package does.
    #[default]
    All,
    /// CRC-32 only, which detects accidental damage and costs little.
    Crc32,
}

impl Hashes {
    /// The algorithms, in the order in which their hashes are stored.
    fn algorithms(self) -> &'static [Algorithm] {
        match self {
            Hashes::All => &[Algorithm::Crc32, Algorithm::Sha256],
            Hashes::Crc32 => &[Algorithm::Crc32],
        }
    }

    /// Bytes of all hashes with their types and sizes, without the count.
    fn encoded_len(self) -> usize {
        self.algorithms().iter().map(|algorithm| 2 + algorithm.size()).sum()
    }
}

/// A header that is to be written, with zeros in place of its hashes.
#[derive(Debug)]
pub struct HeaderDraft {
    /// The bytes that hashes cover.
    pub bytes: Vec<u8>,
    hashes: Vec<(Algorithm, usize)>,
    /// The position at which the encryption block is inserted.
    crypt_at: usize,
}

/// Length of the header of a tensor, without padding.
pub fn encoded_len(name: &Name, dtype: DType, shape: &[u64], long: bool, hashes: Hashes) -> usize {
    /// Bytes of the fields of fixed length.
    const FIXED: usize = 8 + 2 + 1 + 2 + 2 + 1 + 8;
    let dtype_and_shape = dtype_and_shape_len(dtype, shape, long);
    FIXED + name.stored().len() + dtype_and_shape + hashes.encoded_len()
}

impl HeaderDraft {
    /// Drafts the header of `entry`, padded with zeros to the length that the entry leaves for it.
    ///
    /// `crypt_len`: bytes to leave for the encryption block, which hashes do not cover.
    pub fn new(entry: &Entry, module_index: u16, hashes: Hashes, crypt_len: usize) -> Result<Self> {
        let bug = |what: &str| Error::Bug(format!("header of `{}`: {what}", entry.name));
        let len = to_usize(entry.data_offset.saturating_sub(entry.header_offset));
        let mut out = Vec::with_capacity(len);
        out.extend_from_slice(&(len as u64).to_le_bytes());
        out.extend_from_slice(&module_index.to_le_bytes());
        out.push(entry.kind as u8);
        let name = entry.name.stored().as_bytes();
        let name_len = u16::try_from(name.len()).map_err(|_| bug("name too long"))?;
        out.extend_from_slice(&name_len.to_le_bytes());
        out.extend_from_slice(name);
        encode_dtype_and_shape(entry.dtype, &entry.shape, entry.long, &mut out)?;
        let section = 1 + hashes.encoded_len();
        out.extend_from_slice(
            &u16::try_from(section).map_err(|_| bug("hash section"))?.to_le_bytes(),
        );
        let algorithms = hashes.algorithms();
        out.push(u8::try_from(algorithms.len()).map_err(|_| bug("hash count"))?);
        let mut hashes = Vec::with_capacity(algorithms.len());
        for &algorithm in algorithms {
            out.push(algorithm as u8);
            out.push(u8::try_from(algorithm.size()).map_err(|_| bug("hash size"))?);
            hashes.push((algorithm, out.len()));
            out.resize(out.len() + algorithm.size(), 0);
        }
        let crypt_at = out.len();
        let padded = len.checked_sub(8 + crypt_len).filter(|&end| end >= crypt_at);
        let padded = padded.ok_or_else(|| bug("no room"))?;
        out.resize(padded, 0);
        let data_len = i64::try_from(entry.data_len).map_err(|_| bug("data too long"))?;
        out.extend_from_slice(&data_len.to_le_bytes());
        Ok(HeaderDraft { bytes: out, hashes, crypt_at })
    }

    /// Fills in the hashes, and inserts the encryption block, which may be empty.
    pub fn finish(mut self, crc: u32, sha: &[u8; 32], crypt: &[u8]) -> Vec<u8> {
        let crc = crc.to_le_bytes();
        for (algorithm, at) in self.hashes {
            let value = match algorithm {
                Algorithm::Crc32 => &crc[..],
                Algorithm::Sha256 => &sha[..],
            };
            if let Some(slot) = self.bytes.get_mut(at..at + value.len()) {
                slot.copy_from_slice(value);
            }
        }
        self.bytes.splice(self.crypt_at..self.crypt_at, crypt.iter().copied());
        self.bytes
    }
}
