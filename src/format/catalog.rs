//! What a format makes of a file, or of several: tensors, and where their bytes lie. What loads
//! knows nothing else of it.

use std::collections::BTreeMap;
use std::ops::Range;
use std::sync::Arc;

use super::dtype::DType;
use super::name::Name;
use super::name_tree::NameTree;
use super::{TensorKind, element_count};
use crate::error::Malformed;

/// The most dimensions that torch and numpy allow.
pub const MAX_DIMS: usize = 64;

/// A format of files.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Format {
    /// Our own.
    Tensors,
    /// `.safetensors`.
    Safetensors,
    /// What `torch.save` writes: a zip archive.
    TorchZip,
}

impl Format {
    /// Its name in messages.
    pub fn name(self) -> &'static str {
        match self {
            Format::Tensors => "tensors",
            Format::Safetensors => "safetensors",
            Format::TorchZip => "torch",
        }
    }

    /// Whether its files name tensors, and not only storages.
    pub fn names_tensors(self) -> bool {
        self != Format::TorchZip
    }

    /// Whether its files hold hashes of tensors.
    pub fn has_hashes(self) -> bool {
        self == Format::Tensors
    }
}

/// Names and values that files have beside their tensors; None if no file states any, which
/// safetensors tells from an empty list. Tensors can be loaded although these are damaged.
pub type Metadata = Result<Option<Vec<(String, String)>>, Malformed>;

/// Tensors of one file, or of the shards of a checkpoint.
pub struct Catalog {
    /// The format of all files.
    pub format: Format,
    /// The tensors: those of `.tensors` files in the order of their index, those of a pickle in that
    /// of the pickle, others by position.
    pub entries: Arc<Vec<Entry>>,
    /// Their numbers by name.
    pub names: NameTree,
    /// What else the files say; shared by all catalogs of the same files.
    pub metadata: Arc<Metadata>,
    /// Which tensor is in which file, as an index of shards says, where these entries are not yet the
    /// tensors.
    pub promised: BTreeMap<String, usize>,
}

/// One tensor.
#[derive(Debug, Clone)]
pub struct Entry {
    /// Its name.
    pub name: Name,
    /// What it was in the saved object.
    pub kind: TensorKind,
    /// Its element type.
    pub dtype: DType,
    /// Its dimensions.
    pub shape: Box<[u64]>,
    /// Dimensions are stored in eight bytes, in the index and in the tensor's header (`.tensors`).
    pub long: bool,
    /// Which file it is in.
    pub file: usize,
    /// File position of its header; that of its data where a format has none.
    pub header_offset: u64,
    /// File position of its data.
    pub data_offset: u64,
    /// Bytes of data in the file; zero for a tensor of the `meta` device.
    pub data_len: u64,
    /// What this is a slice of: `shape` is the slice's then, and the rest that of the whole tensor.
    pub whole: Option<Arc<Whole>>,
    /// Its elements do not lie one behind the other in row-major order (`torch.save`): only who knows
    /// its strides can load it, from its storage.
    pub strided: bool,
}

/// A tensor of which a slice is wanted.
#[derive(Debug)]
pub struct Whole {
    /// Its dimensions.
    pub shape: Box<[u64]>,
    /// The range of indices in each of them.
    pub slice: Box<[Range<u64>]>,
}

impl Entry {
    /// Bytes that the tensor takes in memory, or `None` beyond 2⁶⁴ − 1.
    pub fn memory_len(&self) -> Option<u64> {
        element_count(&self.shape)?.checked_mul(self.dtype.size())
    }

    /// Its dimensions as signed numbers; those of a catalog fit.
    pub fn signed_shape(&self) -> &[i64] {
        bytemuck::cast_slice(&self.shape)
    }

    /// The tensor was on the `meta` device: it has a size but no data.
    pub fn is_meta(&self) -> bool {
        let shape = self.whole.as_ref().map_or(&self.shape, |whole| &whole.shape);
        self.data_len == 0 && !shape.contains(&0)
    }

    /// Bytes of memory that are filled when it is loaded: none for a tensor of the `meta` device.
    pub fn loaded_len(&self) -> u64 {
        if self.is_meta() { 0 } else { self.memory_len().unwrap_or(u64::MAX) }
    }

    /// File position after the tensor's data.
    pub fn end(&self) -> u64 {
        self.data_offset.saturating_add(self.data_len)
    }
}

/// Bytes that a tensor takes in memory, or None where it is too large for torch, which computes
/// strides from all dimensions, those of empty tensors included.
pub fn checked_len(dtype: DType, shape: &[u64]) -> Option<u64> {
    let extent = shape.iter().try_fold(dtype.size(), |n, &dim| n.checked_mul(dim.max(1)))?;
    i64::try_from(extent).ok()?;
    element_count(shape)?.checked_mul(dtype.size())
}

/// Bytes of data of tensors together; what a file claims may be any number.
pub fn data_len<'e>(entries: impl Iterator<Item = &'e Entry>) -> u64 {
    entries.fold(0, |sum, entry| sum.saturating_add(entry.data_len))
}
