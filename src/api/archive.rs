//! Archives of `torch.save`: their records as entries, and the tensors in them that a pickle names.

use std::ops::Range;
use std::sync::Arc;

use super::catalog_part::{CatalogPart, Opening, malformed, read_growing};
use super::file::TensorFile;
use super::reads::{Run, drain};
use super::tensor::dtype_of;
use crate::cancel::Cancel;
use crate::codec::TensorCodec;
use crate::engine::destination::host::{HostDestination, TensorMemory};
use crate::engine::load_options::LoadOptions;
use crate::engine::plan::{Extent, ExtentUse, ReadPlan};
use crate::error::{Error, Result};
use crate::format::catalog::{Entry, Format, MAX_DIMS, checked_len};
use crate::format::dtype::DType;
use crate::format::name::Name;
use crate::format::torch_legacy;
use crate::format::torch_zip::{self, Record, TAIL_LEN};
use crate::io::{DeflatedRecord, InflatedSource, ReadAt, agree};
use crate::mem::{SliceRemainder, as_uninit};
use crate::numbers::TensorNumber;
use crate::stats::Counters;
use crate::sys::to_usize;

/// Number of concurrent requests for local headers. Each has a full latency, although it returns
/// few bytes.
const REQUESTS: usize = 32;

/// True if a file with these first bytes may be one of `torch.save`.
pub fn recognises(bytes: &[u8]) -> bool {
    torch_zip::recognises(bytes) || torch_legacy::recognises(bytes)
}

/// Reads the records of a file of `torch.save` that begins at `base`, and `head` its first bytes.
/// `file`: its number among several. `at_once`: number of files that are opened concurrently. Each
/// record becomes an entry of bytes, named `<file>/<record>`.
pub fn read_archive(
    source: Arc<dyn ReadAt>,
    base: u64,
    head: Vec<u8>,
    (file, at_once): (usize, usize),
    opening: &Opening<'_>,
) -> Result<CatalogPart> {
    let uri = source.uri();
    if !opening.storages {
        return Err(Error::Unsupported(format!(
            "`{uri}` looks like a checkpoint of torch.save, whose pickle only the Python package \
             reads: load it with tensorizer.load in Python, or convert it with `tensorizer cp` to a \
             .tensors file"
        )));
    }
    let is_legacy = torch_legacy::recognises(&head);
    let Some(size) = source.facts().len else {
        let why = if is_legacy { "tensors may be in any order" } else { "directory is at its end" };
        return Err(Error::Unsupported(format!(
            "`{uri}` is a checkpoint of torch.save, whose {why}, but this source can only be read \
             front to back: use a local file, or a server that supports range requests"
        )));
    };
    let size = size.saturating_sub(base);
    let (source, records) = if is_legacy {
        let records = legacy_records(&*source, base, size, head, opening.cancel)?;
        (source, records)
    } else {
        zip_records(source, base, size, at_once, opening.cancel)?
    };
    let entries = records.into_iter().map(|(name, data_offset, len)| {
        let name = Name::from_key(&format!("{file}/{name}"))
            .map_err(|what| malformed(source.uri(), what))?;
        Ok(Entry::new(name, dtype_of::<u8>()?, [len].into(), file, data_offset, len))
    });
    let entries = entries.collect::<Result<Vec<_>>>()?;
    let format = Format::Torch;
    Ok(CatalogPart { source, format, head: None, entries, metadata: None })
}

/// The name of a record, and the position and the bytes of its data.
type PlacedRecord = (String, u64, u64);

/// Reads the pickles of a file that is no archive. What follows them is the record `storages`:
/// Python, which reads the pickles, finds each storage in it.
fn legacy_records(
    source: &dyn ReadAt,
    base: u64,
    size: u64,
    mut bytes: Vec<u8>,
    cancel: &dyn Cancel,
) -> Result<Vec<PlacedRecord>> {
    /// The bytes of the first read.
    const FIRST: u64 = 64 << 10;
    let what = "the pickles of torch.save";
    let found = loop {
        let found = torch_legacy::pickles(&bytes, base).map_err(|e| e.in_file(source.uri()))?;
        if let Some(found) = found {
            break found;
        }
        let len = bytes.len() as u64;
        let until = (2 * len).max(FIRST).min(size);
        if until <= len {
            let end = base.saturating_add(len).saturating_add(1);
            let size = base.saturating_add(size);
            return Err(Error::truncated(source.uri(), what, base..end, size));
        }
        if until > torch_legacy::MAX_PICKLES {
            let what = format!("expected {what} to end within {} bytes", torch_legacy::MAX_PICKLES);
            return Err(malformed(source.uri(), what));
        }
        read_growing(source, base.saturating_add(len), until, &mut bytes, what, cancel)?;
    };
    let placed = |name: &str, range: Range<u64>| {
        (name.to_owned(), base.saturating_add(range.start), range.end.saturating_sub(range.start))
    };
    let pickle = |name, range: Range<usize>| placed(name, range.start as u64..range.end as u64);
    let storages = (found.keys.end as u64)..size;
    Ok(vec![
        pickle("machine.pkl", found.machine),
        pickle("data.pkl", found.object),
        pickle("keys.pkl", found.keys),
        placed("storages", storages),
    ])
}

/// Reads the directory of an archive, and the headers of its records. Returns the source of these,
/// too.
fn zip_records(
    source: Arc<dyn ReadAt>,
    base: u64,
    size: u64,
    at_once: usize,
    cancel: &dyn Cancel,
) -> Result<(Arc<dyn ReadAt>, Vec<PlacedRecord>)> {
    let records = read_directory(&*source, base, size, cancel)?;
    let readers = (!source.facts().is_local).then_some((REQUESTS / at_once.max(1)).max(1));
    let positions = read_headers(&source, base, &records, readers, cancel)?;
    let (mut placed, mut deflated) = (Vec::new(), Vec::new());
    let mut end = base.saturating_add(size);
    for (record, packed_at) in records.iter().zip(positions) {
        let &Record { len, packed, .. } = record;
        let mut at = packed_at;
        if record.is_deflated() {
            at = end;
            end = end.saturating_add(len);
            deflated.push(DeflatedRecord { at, len, packed_at, packed });
        }
        placed.push((record.name_in_folder().to_owned(), at, len));
    }
    if deflated.is_empty() {
        return Ok((source, placed));
    }
    // The stated checksum, if there is one, is compared now, as records are not bytes of the file.
    agree(&*source, cancel)?;
    Ok((Arc::new(InflatedSource::new(source, end, deflated)), placed))
}

fn read_directory(
    source: &dyn ReadAt,
    base: u64,
    size: u64,
    cancel: &dyn Cancel,
) -> Result<Vec<Record>> {
    let what = "the directory of the zip archive";
    let some = |start: u64, len: u64| {
        let mut bytes = Vec::new();
        read_growing(source, base.saturating_add(start), len, &mut bytes, what, cancel)?;
        Ok(bytes)
    };
    let uri = source.uri();
    let tail_at = size.saturating_sub(TAIL_LEN);
    let tail = some(tail_at, size.min(TAIL_LEN))?;
    let found = torch_zip::find_directory(&tail, size, base).map_err(|e| e.in_file(uri))?;
    let in_tail = found.start.checked_sub(tail_at).and_then(|from| {
        let (from, len) = (to_usize(from), to_usize(found.len));
        tail.get(from..from.checked_add(len)?)
    });
    let records = match in_tail {
        Some(bytes) => torch_zip::records(bytes, &found, base),
        None => torch_zip::records(&some(found.start, found.len)?, &found, base),
    };
    records.map_err(|e| e.in_file(uri))
}

/// Reads the local headers of records, and returns the positions of their data.
fn read_headers(
    source: &Arc<dyn ReadAt>,
    base: u64,
    records: &[Record],
    readers: Option<usize>,
    cancel: &dyn Cancel,
) -> Result<Vec<u64>> {
    let mut plan = ReadPlan::new(&[], &[], false);
    for (tensor, record) in records.iter().enumerate() {
        let offset = base.saturating_add(record.header_at);
        let data_len = record.header_len();
        let extent = Extent { file: 0, header_offset: offset, data_offset: offset, data_len };
        let tensors = TensorNumber::range(tensor..tensor + 1);
        plan.push(extent, ExtentUse { tensors, start: 0, gathered: false });
    }
    let lens = records.iter().map(|record| to_usize(record.header_len()));
    let mut headers = vec![0; lens.clone().sum()];
    let mut rest = SliceRemainder::new(&mut headers);
    let memory = lens.clone().map(|len| Ok(SliceRemainder::new(as_uninit(rest.next(len)?))));
    let memory = TensorMemory::Lent(memory.collect::<Result<_>>()?);
    let options = LoadOptions { readers, ..LoadOptions::default() };
    let counters = Counters::default();
    let codec = TensorCodec::none(source.uri());
    let to = (HostDestination::new(memory, Vec::new()), None);
    let run = Run::new(&options, &counters, cancel);
    drain((std::slice::from_ref(source), &plan), &codec, to, &run, &mut || Ok(false))?;
    let mut rest = &*headers;
    let positions = records.iter().zip(lens).map(|(record, len)| {
        let raw = rest.split_off(..len).unwrap_or(&[]);
        let at = record.data_at(raw, base).map_err(|e| e.in_file(source.uri()))?;
        Ok(base.saturating_add(at))
    });
    positions.collect()
}

/// A tensor that a pickle names.
#[doc(hidden)]
pub struct PickledTensor {
    /// Its name.
    pub name: Name,
    /// Its element type.
    pub dtype: DType,
    /// Its dimensions.
    pub shape: Box<[u64]>,
    /// The number of the record that holds its storage, and the position of its first element
    /// there; None for a tensor of the `meta` device.
    pub storage: Option<(usize, u64)>,
    /// See [`Entry::strided`].
    pub strided: bool,
}

impl TensorFile {
    /// Returns the same files with the given tensors, which are parts of their storages, in the
    /// order given. Tensors may share bytes.
    #[doc(hidden)]
    pub fn pickled(&self, tensors: Vec<PickledTensor>) -> Result<Self> {
        let entries = tensors.into_iter().map(|tensor| self.pickled_entry(tensor));
        self.with_entries(entries.collect::<Result<_>>()?, false).map_err(|error| match error {
            Error::InvalidArgument(what) => malformed(self.uri(), what),
            other => other,
        })
    }

    fn pickled_entry(&self, tensor: PickledTensor) -> Result<Entry> {
        let PickledTensor { name, dtype, shape, storage, strided } = tensor;
        let fail = |what: String| malformed(self.uri(), format!("tensor `{name}`: {what}"));
        if shape.len() > MAX_DIMS {
            let count = shape.len();
            return Err(fail(format!("expected at most {MAX_DIMS} dimensions, found {count}")));
        }
        let len = checked_len(dtype, &shape)
            .ok_or_else(|| fail(format!("shape {shape:?} of {dtype} is too large")))?;
        let (file, data_offset, data_len) = match storage {
            None => (0, 0, 0),
            Some((record, offset)) => {
                let record = self.entry(record)?;
                let end = offset.checked_add(if strided { 0 } else { len });
                if end.is_none_or(|end| end > record.data_len) {
                    return Err(fail(format!(
                        "expected {len} bytes at byte {offset} of its storage, which has only {}",
                        record.data_len
                    )));
                }
                // Empty tensors are placed at the start of the record, not inside another tensor's
                // bytes.
                let offset = if len == 0 { 0 } else { offset };
                (record.file, record.data_offset.saturating_add(offset), len)
            }
        };
        Ok(Entry { strided, ..Entry::new(name, dtype, shape, file, data_offset, data_len) })
    }
}
