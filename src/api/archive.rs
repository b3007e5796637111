//! Archives of `torch.save`: their records as entries, and the tensors in them that a pickle names.

use std::sync::Arc;

use super::catalog_part::{CatalogPart, Opening, malformed, read_growing};
use super::file::TensorFile;
use super::reads::{Run, drain};
use crate::cancel::Cancel;
use crate::codec::TensorCodec;
use crate::engine::destination::host::{HostDestination, TensorMemory};
use crate::engine::load_options::LoadOptions;
use crate::engine::plan::{Extent, ExtentUse, ReadPlan};
use crate::error::{Error, Result};

use crate::format::catalog::{Entry, Format, MAX_DIMS, checked_len};
use crate::format::dtype::DType;
use crate::format::name::Name;
use crate::format::torch_zip::{self, Record, TAIL_LEN};
use crate::io::ReadAt;
use crate::mem::{SliceRemainder, as_uninit};
use crate::numbers::TensorNumber;
use crate::stats::Counters;
use crate::sys::to_usize;

/// Number of concurrent requests for local headers. Each has a full latency, although it returns
/// few bytes.
const REQUESTS: usize = 32;

/// Reads the records of an archive that begins at `base`. `file`: number of the archive among
/// several. `at_once`: number of archives that are opened concurrently. Each record becomes an
/// entry of bytes, named `<file>/<record>`.
pub fn read_archive(
    source: Arc<dyn ReadAt>,
    base: u64,
    (file, at_once): (usize, usize),
    opening: &Opening<'_>,
) -> Result<CatalogPart> {
    let uri = source.uri();
    if !opening.storages {
        return Err(Error::Unsupported(format!(
            "`{uri}` is a checkpoint of torch.save, whose pickle only the Python package reads: \
             load it with tensorizer.load in Python, or convert it with `tensorizer cp` to a \
             .tensors file"
        )));
    }
    let Some(size) = source.facts().len else {
        return Err(Error::Unsupported(format!(
            "`{uri}` is a checkpoint of torch.save, whose directory is at its end, but this source \
             can only be read front to back: use a local file, or a server that supports range \
             requests"
        )));
    };
    let size = size.saturating_sub(base);
    let records = read_directory(&*source, base, size, opening.cancel)?;
    let readers = (!source.facts().is_local).then_some((REQUESTS / at_once.max(1)).max(1));
    let positions = read_headers(&source, base, &records, readers, opening.cancel)?;
    // Names begin with the archive's folder, which `torch.save` names after the file.
    let folder = |name: &str| name.find('/').map_or(0, |at| at + 1);
    let entries = records.0.iter().zip(positions).map(|(record, data_offset)| {
        let name = record.name.split_at(folder(&record.name)).1;
        let name =
            Name::from_key(&format!("{file}/{name}")).map_err(|what| malformed(uri, what))?;
        let shape = [record.len].into();
        Ok(Entry::new(name, bytes_dtype()?, shape, file, data_offset, record.len))
    });
    let entries = entries.collect::<Result<Vec<_>>>()?;
    let format = Format::TorchZip;
    Ok(CatalogPart { source, format, head: None, entries, metadata: None })
}

/// Returns the dtype of bytes.
pub(super) fn bytes_dtype() -> Result<DType> {
    DType::from_name("uint8").ok_or_else(|| Error::Bug("no type of bytes".to_owned()))
}

/// Records, and the position of the directory that follows the last record.
type ArchiveRecords = (Vec<Record>, u64);

fn read_directory(
    source: &dyn ReadAt,
    base: u64,
    size: u64,
    cancel: &dyn Cancel,
) -> Result<ArchiveRecords> {
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
    Ok((records.map_err(|e| e.in_file(uri))?, found.start))
}

/// Reads the local headers of records, and returns the positions of their data.
fn read_headers(
    source: &Arc<dyn ReadAt>,
    base: u64,
    (records, directory): &ArchiveRecords,
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
    let positions = records.iter().zip(lens).enumerate().map(|(number, (record, len))| {
        let end = records.get(number + 1).map_or(*directory, |next| next.header_at);
        let raw = rest.split_off(..len).unwrap_or(&[]);
        let at = record.data_at(raw, end, base).map_err(|e| e.in_file(source.uri()))?;
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
