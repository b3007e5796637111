//! The index: one entry per tensor, with all that is needed to plan a load.

use super::prologue::{PROLOGUE_LEN, Prologue};
use crate::error::{Error, Malformed, Result};
use crate::fallible::try_with_capacity;
use crate::format::TensorKind;
use crate::format::bytes::Cursor;
use crate::format::catalog::{Entry, MAX_DIMS, checked_len};
use crate::format::dtype::DType;
use crate::format::name::{Component, Name};
use crate::format::name_tree::NameTree;
use crate::sys::to_usize;

/// Bytes of the version tag that begins entries of some files.
pub const TAG_LEN: u64 = size_of::<u32>() as u64;
const TAG_SHORT: u32 = 1;
const TAG_LONG: u32 = 5;
/// Bytes of the shortest possible entry: empty name, dtype and shape.
const MIN_ENTRY_LEN: usize = 2 + 1 + 1 + 1 + 24;
/// Minimum bytes that an entry allocates beside itself: a name, and its node in the tree of names.
const MIN_NAME_MEMORY: usize = 64;

impl Entry {
    /// Appends the entry; `tagged` writes the version tag.
    pub fn encode(&self, tagged: bool, out: &mut Vec<u8>) -> Result<()> {
        if tagged {
            let tag = if self.long { TAG_LONG } else { TAG_SHORT };
            out.extend_from_slice(&tag.to_le_bytes());
        }
        let name = self.name.stored().as_bytes();
        out.extend_from_slice(&narrow::<u16>(name.len(), "name length")?.to_le_bytes());
        out.extend_from_slice(name);
        out.push(self.kind as u8);
        encode_dtype_and_shape(self.dtype, &self.shape, self.long, out)?;
        for value in [self.header_offset, self.data_offset, self.data_len] {
            out.extend_from_slice(&value.to_le_bytes());
        }
        Ok(())
    }

    /// Bytes that [`Entry::encode`] appends.
    pub fn encoded_len(&self, tagged: bool) -> usize {
        2 + self.name.stored().len()
            + 1
            + dtype_and_shape_len(self.dtype, &self.shape, self.long)
            + 24
            + if tagged { size_of::<u32>() } else { 0 }
    }
}

/// True if a shape needs eight bytes per dimension.
pub fn is_long(shape: &[u64]) -> bool {
    shape.iter().any(|&dim| dim > u64::from(u32::MAX))
}

fn narrow<T: TryFrom<usize>>(value: usize, what: &str) -> Result<T> {
    T::try_from(value)
        .map_err(|_| Error::InvalidArgument(format!("{what} {value} is too large for the format")))
}

/// Bytes that [`encode_dtype_and_shape`] appends.
pub(super) fn dtype_and_shape_len(dtype: DType, shape: &[u64], long: bool) -> usize {
    1 + dtype.stored().len() + 1 + shape.len() * if long { 8 } else { 4 }
}

/// Encodes type and shape, which index entries and tensor headers store in the same form.
pub(super) fn encode_dtype_and_shape(
    dtype: DType,
    shape: &[u64],
    long: bool,
    out: &mut Vec<u8>,
) -> Result<()> {
    let stored = dtype.stored();
    out.push(narrow(stored.len(), "dtype length")?);
    out.extend_from_slice(stored.as_bytes());
    out.push(narrow(shape.len(), "number of dimensions")?);
    for &dim in shape {
        if long {
            out.extend_from_slice(&dim.to_le_bytes());
        } else {
            let dim = u32::try_from(dim)
                .map_err(|_| Error::Bug(format!("dimension {dim} written in four bytes")))?;
            out.extend_from_slice(&dim.to_le_bytes());
        }
    }
    Ok(())
}

/// Parses the bytes that [`encode_dtype_and_shape`] writes.
pub(super) fn parse_dtype_and_shape(
    cursor: &mut Cursor<'_>,
    long: bool,
) -> Result<(DType, Box<[u64]>), Malformed> {
    let at = cursor.offset();
    let len = cursor.u8("dtype length")?;
    let dtype = DType::parse(cursor.take(usize::from(len), "dtype")?)
        .map_err(|what| Malformed::new(at, what))?;
    let dims = usize::from(cursor.u8("number of dimensions")?);
    if dims > MAX_DIMS {
        return Err(cursor.error(format!("expected at most {MAX_DIMS} dimensions, found {dims}")));
    }
    let mut shape = Vec::with_capacity(dims);
    for _ in 0..dims {
        shape.push(dimension(cursor, long)?);
    }
    Ok((dtype, shape.into()))
}

/// Parses one dimension of a shape.
pub(super) fn dimension(cursor: &mut Cursor<'_>, long: bool) -> Result<u64, Malformed> {
    if long { cursor.u64("dimensions") } else { cursor.u32("dimensions").map(u64::from) }
}

/// Parses a tensor kind.
pub(super) fn parse_kind(cursor: &mut Cursor<'_>) -> Result<TensorKind, Malformed> {
    let at = cursor.offset();
    let byte = cursor.u8("tensor type")?;
    TensorKind::from_u8(byte)
        .ok_or_else(|| Malformed::new(at, format!("expected tensor type 0, 1 or 2, found {byte}")))
}

/// A parsed index block.
pub struct ParsedIndex {
    /// The tensors, in the order of the index.
    pub entries: Vec<Entry>,
    /// The number of each entry, by name.
    pub names: NameTree,
    /// Bytes of all entries, without the space that follows them in the block.
    pub len: usize,
}

/// Parses the index block, which lies at file position `base`.
///
/// `file_len` is the size of the file, if it is known. Every entry is checked against it and
/// against the other entries. The bytes of two tensors never overlap, so the total size of all
/// tensors is bounded by the size of the file.
pub fn parse(
    block: &[u8],
    base: u64,
    prologue: &Prologue,
    file_len: Option<u64>,
    uri: &str,
) -> Result<ParsedIndex> {
    let mut cursor = Cursor::new(block, base, "tensor index");
    if prologue.count == 0 || block.is_empty() {
        return Err(cursor.error("Tensor index in the file is empty").in_file(uri));
    }
    let most = block.len() / MIN_ENTRY_LEN;
    let count = to_usize(prologue.count);
    if count > most {
        let what = format!("an index of {} bytes cannot hold {count} tensors", block.len());
        return Err(cursor.error(what).in_file(uri));
    }
    let mut entries = try_with_capacity(count, "an index")?;
    // Names and shapes are allocated one by one, and a failure of that could not be reported as an
    // error. So memory for all of them is allocated once before, and released, to find out if there
    // is enough.
    try_with_capacity::<[u8; MIN_NAME_MEMORY]>(count, "names and shapes of an index")?;
    let mut names = NameTree::default();
    for number in 0..count {
        let at = cursor.offset();
        let entry = parse_entry(&mut cursor, prologue)
            .and_then(|entry| check_entry(entry, at, prologue.version))
            .map_err(|e| e.in_file(uri))?;
        names.insert(&entry.name, number).map_err(|what| Malformed::new(at, what).in_file(uri))?;
        entries.push(entry);
    }
    check_extents(&entries, base.saturating_add(prologue.index_len), file_len, uri)?;
    Ok(ParsedIndex { entries, names, len: cursor.position() })
}

/// Maximum bytes of an index that is read: room for 60,000 names of full length, or for tens of
/// millions of usual names.
pub const MAX_LEN: u64 = 4 << 30;

/// Maximum bytes of an entry: tag, name, kind, dtype, dimensions, positions.
const LONGEST_ENTRY: usize = 4 + (2 + 0xffff) + 1 + (1 + 0xff) + (1 + 8 * MAX_DIMS) + 24;
/// Maximum bytes after the entries that are read if the length of the file is unknown: metadata,
/// and reserved space for more tensors.
const MAX_TRAILER_LEN: u64 = 256 << 20;

/// Progress of validating an index while its bytes arrive.
#[derive(Default)]
pub struct IndexValidator {
    entries: u64,
    position: usize,
}

impl IndexValidator {
    /// Validates further entries of a block that lies at `base` and is still arriving. Stops before
    /// an entry that may continue after the bytes that are there.
    pub fn read(&mut self, block: &[u8], base: u64, prologue: &Prologue) -> Result<(), Malformed> {
        let at = base.saturating_add(self.position as u64);
        let mut cursor = Cursor::new(block.get(self.position..).unwrap_or(&[]), at, "tensor index");
        while self.entries < prologue.count && cursor.remaining().len() >= LONGEST_ENTRY {
            parse_entry(&mut cursor, prologue)?;
            self.entries += 1;
        }
        self.position += cursor.position();
        let trailer_len = prologue.index_len.saturating_sub(self.position as u64);
        if self.entries == prologue.count && trailer_len > MAX_TRAILER_LEN {
            return Err(cursor.error(format!(
                "expected at most {MAX_TRAILER_LEN} bytes behind the entries of an index that is read \
                 front to back, found {trailer_len}"
            )));
        }
        Ok(())
    }
}

fn parse_entry(cursor: &mut Cursor<'_>, prologue: &Prologue) -> Result<Entry, Malformed> {
    let long = prologue.versioned_entries
        && match cursor.u32("entry version")? {
            TAG_SHORT => false,
            TAG_LONG => true,
            other => {
                return Err(cursor.error(format!(
                    "Unsupported index entry version: expected {TAG_SHORT} or {TAG_LONG}, found {other}"
                )));
            }
        };
    let at = cursor.offset();
    let len = cursor.u16("name length")?;
    let name = Name::parse(cursor.take(usize::from(len), "name")?)
        .map_err(|what| Malformed::new(at, what))?;
    let kind = parse_kind(cursor)?;
    let (dtype, shape) = parse_dtype_and_shape(cursor, long)?;
    let header_offset = cursor.u64("header offset")?;
    let data_offset = cursor.u64("data offset")?;
    let data_len = cursor.u64("data length")?;
    let entry = Entry::new(name, dtype, shape, 0, data_offset, data_len);
    Ok(Entry { kind, long, header_offset, ..entry })
}

fn check_entry(entry: Entry, at: u64, version: u32) -> Result<Entry, Malformed> {
    let fail = |what: String| Err(Malformed::new(at, format!("tensor `{}`: {what}", entry.name)));
    let Some(memory_len) = checked_len(entry.dtype, &entry.shape) else {
        return fail(format!("shape {:?} of {} is too large", entry.shape, entry.dtype));
    };
    if entry.data_len == 0 && memory_len > 0 {
        // Tensors without data exist since version 4; in older files this is damage.
        if version < super::prologue::VERSION_META {
            return fail(format!(
                "expected {memory_len} bytes of data for shape {:?} of {}, found none",
                entry.shape, entry.dtype
            ));
        }
    } else if entry.data_len != memory_len {
        return fail(format!(
            "expected {memory_len} bytes of data for shape {:?} of {}, found {}",
            entry.shape, entry.dtype, entry.data_len
        ));
    }
    let is_nested = |path: Vec<Component>| !matches!(*path, [Component::Key(_)]);
    if entry.kind != TensorKind::StateDict && entry.name.path().is_some_and(is_nested) {
        return fail(format!("structured names are for state dicts, found type {:?}", entry.kind));
    }
    Ok(entry)
}

fn check_extents(entries: &[Entry], first: u64, file_len: Option<u64>, uri: &str) -> Result<()> {
    let mut order: Vec<&Entry> = entries.iter().collect();
    order.sort_unstable_by_key(|entry| entry.header_offset);
    let mut end = first;
    for entry in order {
        let malformed = |what: String| {
            Malformed::new(entry.header_offset, format!("tensor `{}`: {what}", entry.name))
                .in_file(uri)
        };
        if entry.header_offset < end {
            return Err(malformed(format!(
                "expected its header at byte {end} or later, found {}: it overlaps what is before it",
                entry.header_offset
            )));
        }
        if entry.data_offset <= entry.header_offset {
            return Err(malformed(format!(
                "expected its data after its header at byte {}, found {}",
                entry.header_offset, entry.data_offset
            )));
        }
        // The format can need this much: name, type, shape, hashes, padding of up to 2 MiB, and an
        // authentication tag of 16 bytes for each piece of at least 1 KiB of data.
        let most = (4 << 20) + entry.data_len / 64;
        let len = entry.data_offset - entry.header_offset;
        if len > most {
            return Err(malformed(format!(
                "expected a header of at most {most} bytes, found one of {len}"
            )));
        }
        end = entry
            .data_offset
            .checked_add(entry.data_len)
            .filter(|&end| i64::try_from(end).is_ok())
            .ok_or_else(|| {
                malformed(format!(
                    "{} bytes of data cannot begin at byte {}",
                    entry.data_len, entry.data_offset
                ))
            })?;
        if let Some(size) = file_len.filter(|&size| end > size) {
            let what = format!("tensor `{}`", entry.name);
            return Err(Error::truncated(uri, &what, entry.header_offset..end, size));
        }
    }
    Ok(())
}

/// Encodes the index block: entries, then zeros up to `index_len`.
pub fn encode(entries: &[Entry], tagged: bool, index_len: u64) -> Result<Vec<u8>> {
    let len = to_usize(index_len);
    let mut out = try_with_capacity(len, "an index")?;
    for entry in entries {
        entry.encode(tagged, &mut out)?;
    }
    if out.len() > len {
        return Err(Error::Bug(format!("{} bytes of index in a space of {len}", out.len())));
    }
    out.resize(len, 0);
    Ok(out)
}

/// File position of the first byte after the index.
pub fn end_of_index(base: u64, index_len: u64) -> u64 {
    base.saturating_add(PROLOGUE_LEN as u64).saturating_add(index_len)
}
