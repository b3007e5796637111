//! The first 73 bytes: magic, version, feature flags, totals and the length of the index.

use crate::error::{Error, Malformed, Result};
use crate::format::bytes::Cursor;

/// `|TZR|`.
pub const MAGIC: [u8; 5] = *b"|TZR|";
/// Bytes of the prologue, with the length of the index as its last field.
pub const PROLOGUE_LEN: usize = 73;
/// The newest data version.
pub const NEWEST_VERSION: u32 = 5;

/// The data version of files that need none of the following features.
pub const VERSION_PLAIN: u32 = 1;
/// The oldest data version that supports opaque dtypes.
pub const VERSION_OPAQUE: u32 = 2;
/// The oldest data version that supports encryption. Files of this version are always encrypted.
pub const VERSION_ENCRYPTED: u32 = 3;
/// The oldest data version that supports tensors on the `meta` device.
pub const VERSION_META: u32 = 4;
/// The oldest data version that supports dimensions of 2³² or more.
pub const VERSION_LONG: u32 = 5;

const FLAG_ENCRYPTED: u8 = 1;
const FLAG_VERSIONED: u8 = 2;

/// The parsed prologue of a file.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Prologue {
    /// Data version, 1 to 5.
    pub version: u32,
    /// True if every tensor header has an encryption block.
    pub encrypted: bool,
    /// True if every index entry begins with a version tag.
    pub versioned_entries: bool,
    /// Sum of the lengths of all tensors' data, as the writer counted it.
    pub tensor_bytes: u64,
    /// Number of index entries.
    pub count: u64,
    /// Length of the index block in bytes.
    pub index_len: u64,
}

impl Prologue {
    /// Parses the prologue from the first bytes of a file, which may be too few.
    pub fn parse(bytes: &[u8], base: u64, uri: &str) -> Result<Self> {
        let malformed = |e: Malformed| e.in_file(uri);
        let mut cursor = Cursor::new(bytes, base, "file prologue");
        if !bytes.starts_with(&MAGIC) {
            let what = unknown_format(bytes, uri);
            return Err(malformed(cursor.error(what)));
        }
        if bytes.len() < PROLOGUE_LEN {
            let found = bytes.len();
            return Err(malformed(cursor.error(format!(
                "File too small: expected at least {PROLOGUE_LEN} bytes, found {found}"
            ))));
        }
        cursor.take(MAGIC.len(), "magic").map_err(malformed)?;
        let version = cursor.u32("version").map_err(malformed)?;
        if !(VERSION_PLAIN..=NEWEST_VERSION).contains(&version) {
            return Err(Error::Version { uri: uri.to_owned(), found: version });
        }
        let flags_at = cursor.offset();
        let flags: [u8; 32] = cursor.fixed("feature flags").map_err(malformed)?;
        let (low, high) = (flags[0], &flags[1..]);
        let flag_error = |what: String| Malformed::new(flags_at, what).in_file(uri);
        if low & !(FLAG_ENCRYPTED | FLAG_VERSIONED) != 0 || high.iter().any(|&b| b != 0) {
            return Err(flag_error(format!("Unsupported feature flags: {flags:02x?}")));
        }
        let versioned_entries = low & FLAG_VERSIONED != 0;
        if versioned_entries && version < VERSION_LONG {
            return Err(flag_error(format!(
                "Invalid feature flags: versioned index entries need data version {VERSION_LONG}, \
                 found {version}"
            )));
        }
        let encrypted = version == VERSION_ENCRYPTED
            || (version > VERSION_ENCRYPTED && low & FLAG_ENCRYPTED != 0);
        let tensor_bytes = cursor.u64("tensor data bytes").map_err(malformed)?;
        cursor.u64("unused field").map_err(malformed)?;
        let count = cursor.u64("tensor count").map_err(malformed)?;
        let index_len = cursor.u64("index length").map_err(malformed)?;
        Ok(Prologue { version, encrypted, versioned_entries, tensor_bytes, count, index_len })
    }

    /// Encodes the prologue.
    pub fn encode(&self) -> [u8; PROLOGUE_LEN] {
        let mut flags = [0u8; 32];
        if self.version > VERSION_ENCRYPTED && self.encrypted {
            flags[0] |= FLAG_ENCRYPTED;
        }
        if self.versioned_entries {
            flags[0] |= FLAG_VERSIONED;
        }
        let mut out = [0u8; PROLOGUE_LEN];
        let fields: [&[u8]; 7] = [
            &MAGIC,
            &self.version.to_le_bytes(),
            &flags,
            &self.tensor_bytes.to_le_bytes(),
            &[0; 8],
            &self.count.to_le_bytes(),
            &self.index_len.to_le_bytes(),
        ];
        out.copy_from_slice(&fields.concat());
        out
    }
}

/// Returns the message for a file of no format that is read, by its first bytes and its name.
pub fn unknown_format(bytes: &[u8], uri: &str) -> String {
    let path = uri.split(['?', '#']).next().unwrap_or(uri);
    let begin = format!("\"{}\"", bytes.get(..9).unwrap_or(bytes).escape_ascii());
    let found = match looks_like(bytes) {
        Some(kind) => format!("this is {kind}"),
        None if path.to_ascii_lowercase().ends_with(".safetensors") => {
            format!(
                "this is a damaged safetensors file: expected 8 bytes with the length of its header, \
                 then `{{`, found {begin}"
            )
        }
        None => format!("it begins with {begin}"),
    };
    no_format(&found)
}

/// Returns the message for a file of no format that is read, and of what it is.
pub fn no_format(found: &str) -> String {
    format!("no format that tensorizer reads (.tensors, safetensors, torch.save): {found}")
}

/// Names the kind of a file by its first bytes; None if it is unknown.
pub fn looks_like(bytes: &[u8]) -> Option<&'static str> {
    let text = bytes.strip_prefix(b"\xef\xbb\xbf").unwrap_or(bytes);
    let text = text.trim_ascii_start().to_ascii_lowercase();
    let is_html = [&b"<!doctype html"[..], b"<html", b"<head", b"<!--"]
        .iter()
        .any(|tag| text.starts_with(tag));
    Some(match bytes {
        [] => "an empty file",
        [b'P', b'K', 5, 6, ..] => "a zip archive that holds nothing",
        [0x80, 2..=5, ..] => {
            "a pickle that torch.save did not write: the program that wrote it can load it, and \
             save its tensors"
        }
        [0x1f, 0x8b, ..] => "a gzip file: decompress it first",
        [b'G', b'G', b'U', b'F', ..] => "a GGUF file: transformers reads it with gguf_file=",
        [0x89, b'H', b'D', b'F', ..] => "an HDF5 file, as Keras saves weights: h5py reads it",
        [0x93, b'N', b'U', b'M', b'P', b'Y', ..] => "an array of numpy: numpy.load reads it",
        // Field 1, the version of its format, then a name of field 2 or another message. TensorFlow's
        // models begin so, with version 1.
        [8, 3..=20, 0x12 | 0x1a | 0x22 | 0x3a | 0x42, ..] => {
            "probably an ONNX model: onnx reads it"
        }
        _ if bytes.starts_with(b"version https://git-lfs") => {
            "a pointer of Git LFS, not the file itself: `git lfs pull` fetches it"
        }
        _ if is_html => "an HTML page, as servers send for errors and logins",
        _ if text.starts_with(b"<?xml") => "XML, as servers send errors",
        _ => return None,
    })
}
