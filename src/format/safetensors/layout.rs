//! The layout of a new file: its header, and the position of each tensor.

use std::cmp::Reverse;
use std::collections::{BTreeMap, BTreeSet};

use super::{MAX_HEADER_LEN, METADATA};
use crate::error::{Error, Result};

use crate::format::catalog::{Entry, checked_len};
use crate::format::dtype::DType;
use crate::format::name::Name;

fn refused(what: String) -> Error {
    Error::InvalidArgument(what)
}

/// A tensor without a file position yet.
#[derive(Debug, Clone)]
pub struct SafetensorsTensor {
    /// Its name, which is a plain string.
    pub name: Name,
    /// Its element type.
    pub dtype: DType,
    /// Its dimensions.
    pub shape: Vec<u64>,
}

impl SafetensorsTensor {
    fn too_large(&self) -> Error {
        let SafetensorsTensor { name, dtype, shape } = self;
        refused(format!("tensor `{name}`: shape {shape:?} of {dtype} is too large"))
    }

    fn len(&self) -> Result<u64> {
        checked_len(self.dtype, &self.shape).ok_or_else(|| self.too_large())
    }

    /// The header's JSON for this tensor.
    fn described(&self, start: u64, end: u64) -> Result<String> {
        let none = || refused(format!("tensor `{}`: safetensors has no {}", self.name, self.dtype));
        let (dtype, values, _) = self.dtype.safetensors().ok_or_else(none)?;
        let mut shape = self.shape.clone();
        if values > 1 {
            let last = shape.last_mut().ok_or_else(none)?;
            *last = last.checked_mul(values).ok_or_else(|| self.too_large())?;
        }
        let (dtype, shape) = (to_json(dtype)?, to_json(&shape)?);
        Ok(format!(r#"{{"dtype":{dtype},"shape":{shape},"data_offsets":[{start},{end}]}}"#))
    }
}

/// Returns the tensors in the order of a file, with their names and their numbers in `tensors`.
fn sorted(tensors: Vec<SafetensorsTensor>) -> Result<Vec<(String, usize, SafetensorsTensor)>> {
    let mut sorted = Vec::with_capacity(tensors.len());
    for (number, tensor) in tensors.into_iter().enumerate() {
        let (name, dtype) = (&tensor.name, tensor.dtype);
        let nested = "safetensors files cannot hold nested structures";
        let key = name.key().ok_or_else(|| refused(format!("tensor `{name}`: {nested}")))?;
        if key == METADATA {
            return Err(refused(format!(
                "a tensor of a safetensors file cannot be named `{METADATA}`"
            )));
        }
        let none = || refused(format!("tensor `{name}`: safetensors has no {dtype}"));
        let (_, _, rank) = dtype.safetensors().ok_or_else(none)?;
        sorted.push((Reverse(rank), key, number, tensor));
    }
    sorted.sort_unstable_by(|one, other| (one.0, &one.1, one.2).cmp(&(other.0, &other.1, other.2)));
    Ok(sorted.into_iter().map(|(_, key, number, tensor)| (key, number, tensor)).collect())
}

/// The layout of a file that is to be written.
#[derive(Debug)]
pub struct SafetensorsLayout {
    /// The length field and the header.
    pub head: Vec<u8>,
    /// The tensors, in the order of their data: larger elements first, then by name.
    pub entries: Vec<Entry>,
    /// For each entry, its number in the list of tensors that was given.
    pub order: Vec<usize>,
    /// Position after the data, which is also the end of the file.
    pub end: u64,
}

impl SafetensorsLayout {
    /// Lays out a file at position `base`, byte for byte as the safetensors library does, except
    /// that metadata are sorted by name. The error says what cannot be written.
    pub fn new(
        tensors: Vec<SafetensorsTensor>,
        metadata: Option<&[(String, String)]>,
        base: u64,
    ) -> Result<Self> {
        let sorted = sorted(tensors)?;
        let mut json = beginning(metadata)?;
        let mut entries = Vec::with_capacity(sorted.len());
        let mut order = Vec::with_capacity(sorted.len());
        let mut end = 0u64;
        let mut names = BTreeSet::new();
        for (key, number, tensor) in sorted {
            let (start, len) = (end, tensor.len()?);
            end = end.checked_add(len).ok_or_else(|| tensor.too_large())?;
            json += &format!("{}:{},", to_json(&key)?, tensor.described(start, end)?);
            let SafetensorsTensor { name, dtype, shape } = tensor;
            if !names.insert(key) {
                return Err(refused(format!("tensor `{name}` is given twice")));
            }
            order.push(number);
            entries.push(Entry::new(name, dtype, shape.into(), 0, start, len));
        }
        let head = ended(json)?;
        let data_at = base.saturating_add(head.len() as u64);
        for entry in &mut entries {
            entry.data_offset = entry.data_offset.saturating_add(data_at);
            entry.header_offset = entry.data_offset;
        }
        let end = data_at.saturating_add(end);
        if i64::try_from(end).is_err() {
            return Err(refused(format!("{end} bytes of tensors are too many for one file")));
        }
        Ok(SafetensorsLayout { head, entries, order, end })
    }
}

/// The part of the header before its tensors.
fn beginning(metadata: Option<&[(String, String)]>) -> Result<String> {
    let mut json = String::from("{");
    if let Some(metadata) = metadata {
        let sorted: BTreeMap<_, _> = metadata.iter().map(|(name, value)| (name, value)).collect();
        json += &format!("{}:{},", to_json(METADATA)?, to_json(&sorted)?);
    }
    Ok(json)
}

/// Returns the length field and the header, padded so that data begin at a multiple of eight bytes.
fn ended(mut json: String) -> Result<Vec<u8>> {
    if json.ends_with(',') {
        json.pop();
    }
    json.push('}');
    let len = json.len().next_multiple_of(size_of::<u64>());
    if len as u64 > MAX_HEADER_LEN {
        let what = format!(
            "names, shapes and metadata need a safetensors header of {len} bytes, expected at most \
             {MAX_HEADER_LEN}: save shards (max_shard_size=, --max-shard-size), or a .tensors file"
        );
        return Err(refused(what));
    }
    let mut head = (len as u64).to_le_bytes().to_vec();
    head.extend(json.into_bytes());
    head.resize(len + size_of::<u64>(), b' ');
    Ok(head)
}

fn to_json<T: serde::Serialize + ?Sized>(value: &T) -> Result<String> {
    serde_json::to_string(value).map_err(|e| refused(e.to_string()))
}
