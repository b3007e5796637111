//! What callers save, and how.

use std::sync::Arc;

use crate::codec::crypt::EncryptionOptions;
use crate::engine::write::Origin;
use crate::format::TensorKind;
use crate::format::dtype::DType;
use crate::format::name::Name;
use crate::format::tensors::header::Hashes;
use crate::format::tensors::pair::PairId;
use crate::memory_limit::MemoryLimit;

/// A tensor to be written.
pub struct SaveTensor<'a> {
    /// Its name.
    pub name: Name,
    /// What it is in the saved object.
    pub kind: TensorKind,
    /// Number of the owning module in `named_modules()` order.
    pub module_index: u16,
    /// Its element type.
    pub dtype: DType,
    /// Its dimensions.
    pub shape: Vec<u64>,
    /// Its bytes.
    pub data: Origin<'a>,
}

/// How to save.
#[derive(Debug, Clone)]
pub struct SaveOptions {
    /// Every tensor's data begin at a multiple of this in the file; a power of two. 1 gives the
    /// bytes that the old package writes.
    pub alignment: u64,
    /// Threads that hash and write at once.
    pub threads: Option<usize>,
    /// Which hashes to store.
    pub hashes: Hashes,
    /// Encrypt the tensors' data.
    pub encryption: Option<Arc<EncryptionOptions>>,
    /// Give the file an identity, by which the other half of a saved object knows it.
    pub pair: Option<Pair>,
    /// What the file says beside its tensors, as names and values: no name twice, and 100,000,000
    /// bytes at most. A safetensors file tells an empty list from none.
    pub metadata: Option<Vec<(String, String)>>,
    /// Whether a file that encrypts its tensors may have metadata, which are not encrypted.
    pub clear_metadata: bool,
    /// Bytes that a save may have in flight beside its tensors: copies, parts of an upload, staging
    /// buffers. None for what `TENSORIZER_MEMORY_MB` says.
    pub memory: MemoryLimit,
}

/// Where the identity of a file comes from.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Pair {
    /// From the tensors in it.
    FromContent,
    /// From the file of which this is a copy.
    Given(PairId),
}

impl Default for SaveOptions {
    fn default() -> Self {
        SaveOptions {
            alignment: 64,
            threads: None,
            hashes: Hashes::All,
            encryption: None,
            pair: None,
            metadata: None,
            clear_metadata: false,
            memory: MemoryLimit::default(),
        }
    }
}
