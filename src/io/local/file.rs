//! Local regular files, read with positional reads.

use std::fs::{File, Metadata};
use std::io;
use std::path::{Path, PathBuf};
use std::sync::Arc;

use super::shard::Shard;
use crate::cancel::Cancel;
use crate::error::{Error, Result};
use crate::io::{Capabilities, ReadAt};
use crate::mem::Buffers;

/// Bytes per read: enough for a disk to stream, and few enough that a chunk is still in the cache
/// when it is hashed, and that an interrupt is noticed at once.
const REQUEST_LEN: u64 = 8 << 20;
/// Reading this many unwanted bytes costs less than another system call.
const MERGE_GAP: u64 = 16 << 10;
/// One reader per core at first: if the file is in the page cache, more are no faster.
const MIN_READERS: usize = 2;
const MAX_FIRST_READERS: usize = 16;
/// The factor for readers that wait for a disk, up to a number that exceeds the needs of every
/// disk.
const DISK_READERS_FACTOR: usize = 4;
const MAX_DISK_READERS: usize = 32;

/// A local regular file.
pub struct FileSource {
    file: FileDescriptor,
    uri: String,
    len: u64,
}

/// The descriptor of a file.
enum FileDescriptor {
    /// A descriptor that stays open, and the path by which it was opened, if it was opened by a
    /// path.
    Open(Arc<File>, Option<PathBuf>),
    /// A shard of a checkpoint, whose descriptor may be closed and opened again.
    Shard(Shard),
}

impl FileSource {
    /// Opens a path, which must name a regular file.
    pub fn open(path: &Path) -> Result<Self> {
        let uri = path.display().to_string();
        let file = crate::sys::open_nonblocking(path).map_err(|e| Error::io("opening", &uri, e))?;
        Self::from_path(path, file)
    }

    /// Takes the open file of a path.
    pub fn from_path(path: &Path, file: File) -> Result<Self> {
        let uri = path.display().to_string();
        let len = metadata_of_file(&file, &uri)?.len();
        // Siblings are opened later, when the working directory may be another one.
        let absolute = std::path::absolute(path).unwrap_or_else(|_| path.to_owned());
        Ok(FileSource { file: FileDescriptor::Open(Arc::new(file), Some(absolute)), uri, len })
    }

    /// Opens one of many files, whose descriptor may be closed and opened again.
    fn open_shard(path: &Path, uri: String) -> Result<Self> {
        let file = crate::sys::open_nonblocking(path).map_err(|e| Error::io("opening", &uri, e))?;
        let found = metadata_of_file(&file, &uri)?;
        let len = found.len();
        Ok(FileSource { file: FileDescriptor::Shard(Shard::new(path, file, &found)), uri, len })
    }

    /// Takes an open file; its own position does not matter.
    pub fn new(file: File, uri: String) -> Result<Self> {
        let len = metadata_of_file(&file, &uri)?.len();
        Ok(Self::from_prefix(file, uri, len))
    }

    /// Takes the first `len` bytes of a regular file, which has at least that many.
    pub fn from_prefix(file: File, uri: String, len: u64) -> Self {
        FileSource { file: FileDescriptor::Open(Arc::new(file), None), uri, len }
    }

    fn open_file(&self) -> Result<Arc<File>> {
        match &self.file {
            FileDescriptor::Open(file, _) => Ok(Arc::clone(file)),
            FileDescriptor::Shard(shard) => shard.file(&self.uri),
        }
    }
}

/// The metadata of an open file; an error if it is a folder.
fn metadata_of_file(file: &File, uri: &str) -> Result<Metadata> {
    let found = file.metadata().map_err(|e| Error::io("examining", uri, e))?;
    if found.is_dir() {
        return Err(Error::io("opening", uri, io::Error::from(io::ErrorKind::IsADirectory)));
    }
    Ok(found)
}

impl ReadAt for FileSource {
    fn uri(&self) -> &str {
        &self.uri
    }

    fn capabilities(&self) -> Capabilities {
        let initial_readers = crate::cpu_count().clamp(MIN_READERS, MAX_FIRST_READERS);
        Capabilities {
            len: Some(self.len),
            max_readers: usize::MAX,
            initial_readers,
            max_auto_readers: (initial_readers * DISK_READERS_FACTOR).min(MAX_DISK_READERS),
            request_len: REQUEST_LEN,
            merge_gap: MERGE_GAP,
            reader_memory: 0,
            of_hub: false,
        }
    }

    fn read_at(
        &self,
        offset: u64,
        buffers: &mut Buffers<'_>,
        cancel: &dyn Cancel,
    ) -> Result<usize> {
        let file = self.open_file()?;
        loop {
            cancel.check()?;
            match crate::sys::read_vectored_at(&file, offset, buffers) {
                Err(e) if e.kind() == io::ErrorKind::Interrupted => {}
                Ok(read) => {
                    buffers.arrived(read as u64);
                    return Ok(read);
                }
                Err(e) => return Err(Error::io("reading", &self.uri, e)),
            }
        }
    }

    fn own_handle(&self) -> Option<Box<dyn ReadAt>> {
        let file = crate::sys::reopen(&*self.open_file().ok()?)?;
        Some(Box::new(FileSource::from_prefix(file, self.uri.clone(), self.len)))
    }

    fn sibling(
        &self,
        name: &str,
        _first: Option<u64>,
        _cancel: &dyn Cancel,
    ) -> Result<Option<Arc<dyn ReadAt>>> {
        let path = match &self.file {
            FileDescriptor::Open(_, Some(path)) => path,
            FileDescriptor::Open(_, None) => return Ok(None),
            FileDescriptor::Shard(shard) => shard.path(),
        };
        let uri = Path::new(&self.uri).with_file_name(name).display().to_string();
        Ok(Some(Arc::new(FileSource::open_shard(&path.with_file_name(name), uri)?)))
    }

    fn file(&self) -> Option<Arc<File>> {
        self.open_file().ok()
    }

    fn is_local(&self) -> bool {
        true
    }
}
