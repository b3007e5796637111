//! Opening: what a path or an address names, and which format its bytes are of.

use std::ffi::OsStr;
use std::fs::File;
use std::path::Path;
use std::sync::Arc;

use super::copies::{opened, with_sound_copies};
use super::file::TensorFile;
use super::folder;
use super::head::Head;
use super::part::Opening;
use super::parts::open_parts;
use crate::cancel::{Cancel, Never};
use crate::error::{Error, Result};
use crate::format::shards;
use crate::io::cache::Cache;
use crate::io::source::address::{self, Address};
use crate::io::source::{FileSource, KnownHeads, Pipe, PipeSource, ReadAt};

impl TensorFile {
    /// Opens a local path: a file, the index of shards, or a folder that holds one of these.
    pub fn open(path: &Path) -> Result<Self> {
        Self::open_path(path, &Never)
    }

    /// The same, unless the call is to end before: a named pipe is waited for.
    pub fn open_path(path: &Path, cancel: &dyn Cancel) -> Result<Self> {
        Opening::new(cancel).path(path)
    }

    /// Opens an address, such as `https://host/model.safetensors`, or a local path.
    pub fn open_uri(uri: &str, cancel: &dyn Cancel) -> Result<Self> {
        Opening::new(cancel).uri(uri, &KnownHeads::default(), None)
    }

    /// Opens a source. `base` is the position of the file's first byte in it; positions inside a
    /// `.tensors` file are the source's own, as the format has it.
    pub fn from_source(source: Arc<dyn ReadAt>, base: u64, cancel: &dyn Cancel) -> Result<Self> {
        Opening::new(cancel).source(source, base)
    }
}

impl Opening<'_> {
    /// Opens an address or a local path. Files of which the heads are known are opened without a
    /// request. `cache` goes before the one of the environment.
    pub fn uri(&self, uri: &str, known: &KnownHeads, cache: Option<&Cache>) -> Result<TensorFile> {
        match address::parse(OsStr::new(uri))? {
            Address::Path(path) => self.path(&path),
            Address::Scheme(_) => {
                self.source(folder::open_address(uri, known, cache, self.cancel)?, 0)
            }
        }
    }

    /// Opens a local path.
    pub fn path(&self, path: &Path) -> Result<TensorFile> {
        let uri = path.display().to_string();
        let found = if path.is_dir() { folder::find(path)? } else { path.to_owned() };
        let file = crate::sys::open_at_once(&found).map_err(|e| Error::io("opening", &uri, e))?;
        if is_pipe(&file, &uri)? {
            return self.file(file, uri, 0);
        }
        self.source(Arc::new(FileSource::at(&found, file)?), 0)
    }

    /// Opens an open file: from `base` on if it is a regular file, from where it is if it is a pipe,
    /// which can only be read front to back.
    pub fn file(&self, file: File, uri: String, base: u64) -> Result<TensorFile> {
        if is_pipe(&file, &uri)? {
            return self.source(Arc::new(PipeSource::new(Pipe(file), uri)), 0);
        }
        self.source(Arc::new(FileSource::new(file, uri)?), base)
    }

    /// Opens a source, whose file begins at `base`.
    pub fn source(&self, source: Arc<dyn ReadAt>, base: u64) -> Result<TensorFile> {
        with_sound_copies(&|error| opened(&source, error), self.cancel, || {
            let head = Head::read(Arc::clone(&source), base, self.cancel)?;
            if shards::begins(head.bytes()) { open_parts(head, self) } else { head.open(self) }
        })
    }
}

fn is_pipe(file: &File, uri: &str) -> Result<bool> {
    use std::os::unix::fs::FileTypeExt as _;
    let kind = file.metadata().map_err(|e| Error::io("examining", uri, e))?.file_type();
    Ok(kind.is_fifo() || kind.is_socket() || kind.is_char_device())
}
