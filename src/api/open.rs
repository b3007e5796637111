//! Opens files: finds the file that a path or an address names, and the format of its bytes.

use std::ffi::OsStr;
use std::path::Path;
use std::sync::Arc;

use super::catalog_part::Opening;
use super::file::TensorFile;
use super::local_copies::{suspects_of_open, with_intact_copies};
use super::shard_index::ShardIndex;
use crate::cancel::{Cancel, Never};
use crate::error::Result;
use crate::format::shards;
use crate::io::uri::{self, Address};
use crate::io::{OpenOptions, ReadAt};

impl TensorFile {
    /// Opens a local path: a file, the index of shards, or a folder that holds one of these.
    pub fn open(path: &Path) -> Result<Self> {
        Self::open_path(path, &Never)
    }

    /// Opens a local path, as [`TensorFile::open`] does. `cancel` can end the call while it waits
    /// for a named pipe.
    pub fn open_path(path: &Path, cancel: &dyn Cancel) -> Result<Self> {
        Opening::new(cancel).source(uri::open_path(path)?, 0)
    }

    /// Opens an address, such as `https://host/model.safetensors`, or a local path.
    pub fn open_uri(uri: &str, cancel: &dyn Cancel) -> Result<Self> {
        let source = match uri::parse(OsStr::new(uri))? {
            // Options for servers are not read for a path: errors in them do not matter.
            Address::Path(path) => uri::open_path(&path)?,
            Address::Server(_) => uri::open_model(uri, &OpenOptions::from_environment()?, cancel)?,
        };
        Opening::new(cancel).source(source, 0)
    }

    /// Opens a source. `base` is the position of the file's first byte in it. Positions inside a
    /// `.tensors` file count from the start of the source, as the format has it.
    pub fn from_source(source: Arc<dyn ReadAt>, base: u64, cancel: &dyn Cancel) -> Result<Self> {
        Opening::new(cancel).source(source, base)
    }
}

impl Opening<'_> {
    /// Opens a source, whose file begins at `base`.
    pub fn source(&self, source: Arc<dyn ReadAt>, base: u64) -> Result<TensorFile> {
        with_intact_copies(&|error| suspects_of_open(&source, error), || {
            let head = self.head(&source, base)?;
            if shards::recognises(&head.bytes) {
                return ShardIndex::read(head, self)?.open_wanted(self);
            }
            head.open(self)
        })
    }
}
