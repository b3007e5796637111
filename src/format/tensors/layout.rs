//! The layout of a new file: the position of each tensor.

use crate::error::{Error, Result};
use crate::format::catalog::Entry;
use crate::format::dtype::DType;
use crate::format::name::Name;
use crate::format::tensors::crypt_info::{self, PIECE_LEN};
use crate::format::tensors::header::{Hashes, encoded_len};
use crate::format::tensors::index::is_long;
use crate::format::tensors::prologue::{
    VERSION_ENCRYPTED, VERSION_LONG, VERSION_META, VERSION_OPAQUE, VERSION_PLAIN,
};
use crate::format::{TensorKind, element_count};

/// Minimum bytes of the index: the fixed length of the old package, 256 KiB.
pub const MIN_INDEX_LEN: u64 = 256 << 10;

/// A tensor without a file position yet.
#[derive(Debug, Clone)]
pub struct UnplacedTensor {
    /// Its name.
    pub name: Name,
    /// Its role in the saved object.
    pub kind: TensorKind,
    /// Its element type.
    pub dtype: DType,
    /// Its dimensions.
    pub shape: Vec<u64>,
    /// True if it has no data: a tensor of the `meta` device.
    pub meta: bool,
}

/// The outcome of [`place_tensors`].
#[derive(Debug)]
pub struct FileLayout {
    /// The index entries, with their positions.
    pub entries: Vec<Entry>,
    /// File position after the last data.
    pub end: u64,
    /// The oldest data version that supports all entries.
    pub version: u32,
}

/// Assigns file positions to tensors, one after another from `start`. Headers are padded so that
/// the data of each tensor begin at a multiple of `alignment` in the file.
///
/// `hashes`: those that headers hold. `encrypted`: None without encryption, otherwise true if keys
/// are derived.
pub fn place_tensors(
    tensors: Vec<UnplacedTensor>,
    start: u64,
    alignment: u64,
    hashes: Hashes,
    encrypted: Option<bool>,
) -> Result<FileLayout> {
    let plain = if encrypted.is_some() { VERSION_ENCRYPTED } else { VERSION_PLAIN };
    let mut layout =
        FileLayout { entries: Vec::with_capacity(tensors.len()), end: start, version: plain };
    for tensor in tensors {
        let UnplacedTensor { name, kind, dtype, shape, meta } = tensor;
        let too_large = || {
            Error::InvalidArgument(format!(
                "tensor `{name}`: shape {shape:?} of {dtype} is too large"
            ))
        };
        let long = is_long(&shape);
        let size = element_count(&shape).and_then(|count| count.checked_mul(dtype.size()));
        let size = size.ok_or_else(too_large)?;
        let data_len = if meta { 0 } else { size };
        let header_offset = layout.end;
        let header_len = encoded_len(&name, dtype, &shape, long, hashes) as u64
            + encrypted.map_or(0, |derived| {
                crypt_info::encoded_len(derived, data_len.div_ceil(PIECE_LEN))
            });
        let data_offset = header_offset
            .checked_add(header_len)
            .and_then(|at| at.checked_next_multiple_of(alignment))
            .ok_or_else(too_large)?;
        layout.end = data_offset
            .checked_add(data_len)
            .filter(|&end| i64::try_from(end).is_ok())
            .ok_or_else(too_large)?;
        let needs =
            [(long, VERSION_LONG), (meta, VERSION_META), (dtype.is_opaque(), VERSION_OPAQUE)];
        for (_, version) in needs.into_iter().filter(|(needed, _)| *needed) {
            layout.version = layout.version.max(version);
        }
        let entry = Entry::new(name, dtype, shape.into(), 0, data_offset, data_len);
        layout.entries.push(Entry { kind, long, header_offset, ..entry });
    }
    Ok(layout)
}

/// Bytes to reserve for an index whose entries need `used` bytes. Lengths above the minimum are
/// rounded up to 4 KiB, which keeps every usual alignment.
pub fn index_len_for(used: u64) -> u64 {
    if used <= MIN_INDEX_LEN { MIN_INDEX_LEN } else { used.next_multiple_of(4096) }
}
