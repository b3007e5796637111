//! The catalog: the tensors that a format finds in one or more files, and the positions of their
//! bytes. The code that loads knows nothing else of a format.

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
    /// `.tensors`, the format of this package.
    Tensors,
    /// `.safetensors`.
    Safetensors,
    /// A file of `torch.save`.
    Torch,
}

impl Format {
    /// Its name in messages.
    pub fn name(self) -> &'static str {
        match self {
            Format::Tensors => "tensors",
            Format::Safetensors => "safetensors",
            Format::Torch => "torch",
        }
    }

    /// True if its files name tensors; false if they name only storages.
    pub fn names_tensors(self) -> bool {
        self != Format::Torch
    }

    /// True if its files hold hashes of tensors.
    pub fn has_hashes(self) -> bool {
        self == Format::Tensors
    }
}

/// Names and values that files hold beside their tensors. None if no file has any, which
/// safetensors distinguishes from an empty list. Damaged metadata do not prevent tensors from being
/// loaded.
pub type Metadata = Result<Option<Vec<(String, String)>>, Malformed>;

/// Tensors of one file, or of the shards of a checkpoint.
pub struct Catalog {
    /// The format of all files.
    pub format: Format,
    /// The tensors: of `.tensors` files in the order of the index, of a pickle in the order of the
    /// pickle, of other files by position.
    pub entries: Arc<Vec<Entry>>,
    /// The number of each tensor, by name.
    pub names: NameTree,
    /// The metadata of the files; shared by all catalogs of the same files.
    pub metadata: Arc<Metadata>,
    /// The file of each tensor, as an index of shards states it. Filled only where `entries` are
    /// storages and not yet the tensors; empty otherwise.
    pub indexed_files: BTreeMap<String, usize>,
}

/// One tensor.
#[derive(Debug, Clone)]
pub struct Entry {
    /// Its name.
    pub name: Name,
    /// Its role in the saved object.
    pub kind: TensorKind,
    /// Its element type.
    pub dtype: DType,
    /// Its dimensions.
    pub shape: Box<[u64]>,
    /// True if dimensions are stored in eight bytes, in the index and in the tensor's header
    /// (`.tensors`).
    pub long: bool,
    /// The number of its file.
    pub file: usize,
    /// File position of its header; that of its data in formats without headers.
    pub header_offset: u64,
    /// File position of its data.
    pub data_offset: u64,
    /// Bytes of data in the file; zero for a tensor of the `meta` device.
    pub data_len: u64,
    /// The whole tensor, if this is a slice of one. Then `shape` is that of the slice, and the
    /// other fields describe the whole.
    pub whole: Option<Arc<WholeTensor>>,
    /// True if its elements are not contiguous in row-major order (`torch.save`). Such a tensor is
    /// loaded from its storage by code that knows its strides.
    pub strided: bool,
}

/// The tensor of which a slice is loaded.
#[derive(Debug)]
pub struct WholeTensor {
    /// Its dimensions.
    pub shape: Box<[u64]>,
    /// The range of indices in each dimension.
    pub slice: Box<[Range<u64>]>,
}

impl Entry {
    /// A whole tensor of a state dict, in a format without headers.
    pub fn new(
        name: Name,
        dtype: DType,
        shape: Box<[u64]>,
        file: usize,
        data_offset: u64,
        data_len: u64,
    ) -> Self {
        Entry {
            name,
            kind: TensorKind::StateDict,
            dtype,
            shape,
            long: false,
            file,
            header_offset: data_offset,
            data_offset,
            data_len,
            whole: None,
            strided: false,
        }
    }

    /// Bytes that the tensor takes in memory, or `None` beyond 2⁶⁴ − 1.
    pub fn memory_len(&self) -> Option<u64> {
        element_count(&self.shape)?.checked_mul(self.dtype.size())
    }

    /// Its dimensions as signed numbers: all dimensions in a catalog fit.
    pub fn signed_shape(&self) -> &[i64] {
        bytemuck::cast_slice(&self.shape)
    }

    /// The dimensions of the tensor in the file, which may be that of a slice's whole tensor.
    pub fn whole_shape(&self) -> &[u64] {
        self.whole.as_ref().map_or(&self.shape, |whole| &whole.shape)
    }

    /// True if the tensor was on the `meta` device: it has a size but no data.
    pub fn is_meta(&self) -> bool {
        self.data_len == 0 && !self.whole_shape().contains(&0)
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

/// Bytes that a tensor takes in memory. None if it is too large for torch, which computes strides
/// from all dimensions, also of empty tensors.
pub fn checked_len(dtype: DType, shape: &[u64]) -> Option<u64> {
    let extent = shape.iter().try_fold(dtype.size(), |n, &dim| n.checked_mul(dim.max(1)))?;
    i64::try_from(extent).ok()?;
    element_count(shape)?.checked_mul(dtype.size())
}

/// Total bytes of data of some tensors. Saturates, because a file may state any number.
pub fn data_len<'e>(entries: impl Iterator<Item = &'e Entry>) -> u64 {
    entries.fold(0, |sum, entry| sum.saturating_add(entry.data_len))
}
