//! The tensors and the options of a save.

use std::sync::Arc;

use crate::codec::crypt::EncryptionOptions;
use crate::engine::write::TensorData;
use crate::error::{Error, Result};
use crate::format::TensorKind;
use crate::format::catalog::MAX_DIMS;
use crate::format::dtype::DType;
use crate::format::name::Name;
use crate::format::tensors::header::Hashes;
use crate::format::tensors::identity::FileIdentity;
use crate::memory_limit::MemoryLimit;

/// A tensor to be written.
pub struct SaveTensor<'a> {
    /// Its name.
    pub name: Name,
    /// Its kind in the saved object: a parameter, a buffer, or an item of a state dict.
    pub kind: TensorKind,
    /// Number of the owning module in `named_modules()` order.
    pub module_index: u16,
    /// Its element type.
    pub dtype: DType,
    /// Its dimensions.
    pub shape: Vec<u64>,
    /// Its bytes.
    pub data: TensorData<'a>,
}

impl SaveTensor<'_> {
    /// Refuses a tensor that could not be loaded again.
    pub(super) fn check(&self, uri: &str) -> Result<()> {
        if self.shape.len() <= MAX_DIMS {
            return Ok(());
        }
        Err(Error::InvalidArgument(format!(
            "tensor `{}` for `{uri}`: expected at most {MAX_DIMS} dimensions, found {}",
            self.name,
            self.shape.len()
        )))
    }
}

/// Options of a save.
#[derive(Debug, Clone)]
pub struct SaveOptions {
    /// Every tensor's data begin at a multiple of this in the file; a power of two. 1 gives the
    /// bytes that the old package writes.
    pub alignment: u64,
    /// Threads that hash and write at once.
    pub threads: Option<usize>,
    /// The hashes to store.
    pub hashes: Hashes,
    /// If set, the tensors' data are encrypted.
    pub encryption: Option<Arc<EncryptionOptions>>,
    /// If set, the file gets an identity, by which the pickle of a saved object refers to it.
    pub identity: Option<IdentitySource>,
    /// Metadata of the file, as names and values: no name twice, and at most 100,000,000 bytes. A
    /// safetensors file distinguishes an empty list from none.
    pub metadata: Option<Vec<(String, String)>>,
    /// True if a file with encrypted tensors may have metadata, which are not encrypted.
    pub clear_metadata: bool,
    /// True to leave room in the index for the tensors of later writes.
    pub room_for_more: bool,
    /// The memory that a save may have in flight beside its tensors: copies, parts of an upload,
    /// staging buffers. If it is not set, `TENSORIZER_MEMORY_LIMIT_MB` applies.
    pub memory: MemoryLimit,
}

/// The source of a file's identity.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum IdentitySource {
    /// From the tensors in it.
    FromContent,
    /// From the file of which this is a copy.
    Given(FileIdentity),
}

impl Default for SaveOptions {
    fn default() -> Self {
        SaveOptions {
            alignment: 64,
            threads: None,
            hashes: Hashes::All,
            encryption: None,
            identity: None,
            metadata: None,
            clear_metadata: false,
            room_for_more: true,
            memory: MemoryLimit::default(),
        }
    }
}
