//! Local regular files, read with positional reads.

use std::fs::File;
use std::io;
use std::path::{Path, PathBuf};
use std::sync::Arc;

use crate::cancel::Cancel;
use crate::error::{Error, Result};
use crate::io::{Capabilities, ReadAt};
use crate::mem::Buffers;

/// Bytes a read: large enough for a disk to stream, small enough that the hash of a chunk finds
/// it in the cache and that an interrupt is seen at once.
const REQUEST_LEN: u64 = 8 << 20;
/// Reading this much costs less than another system call.
const MERGE_GAP: u64 = 16 << 10;
/// One reader a core to begin with: from a warm cache more of them are no faster.
const MIN_READERS: usize = 2;
const MAX_FIRST_READERS: usize = 16;
/// The factor of readers that wait for a disk, up to a number that no disk needs.
const MORE: usize = 4;
const MAX_READERS: usize = 32;

/// A local regular file.
pub struct FileSource {
    file: File,
    uri: String,
    len: u64,
    /// The path by which it was opened, if it was.
    path: Option<PathBuf>,
}

impl FileSource {
    /// Opens a path, which must name a regular file.
    pub fn open(path: &Path) -> Result<Self> {
        let uri = path.display().to_string();
        let file = crate::sys::open_at_once(path).map_err(|e| Error::io("opening", &uri, e))?;
        Self::at(path, file)
    }

    /// Takes the open file of a path.
    pub fn at(path: &Path, file: File) -> Result<Self> {
        let source = Self::new(file, path.display().to_string())?;
        Ok(FileSource { path: Some(path.to_owned()), ..source })
    }

    /// Takes an open file; its own position does not matter.
    pub fn new(file: File, uri: String) -> Result<Self> {
        let metadata = file.metadata().map_err(|e| Error::io("examining", &uri, e))?;
        if metadata.is_dir() {
            return Err(Error::io("opening", &uri, io::Error::from(io::ErrorKind::IsADirectory)));
        }
        Ok(FileSource { len: metadata.len(), file, uri, path: None })
    }

    /// The first bytes of a regular file, of which it has at least so many.
    pub fn beginning(file: File, uri: String, len: u64) -> Self {
        FileSource { file, uri, len, path: None }
    }
}

impl ReadAt for FileSource {
    fn uri(&self) -> &str {
        &self.uri
    }

    fn capabilities(&self) -> Capabilities {
        let first_readers = crate::cpu_count().clamp(MIN_READERS, MAX_FIRST_READERS);
        Capabilities {
            len: Some(self.len),
            max_readers: usize::MAX,
            first_readers,
            most_readers: (first_readers * MORE).min(MAX_READERS),
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
        loop {
            cancel.check()?;
            match crate::sys::read_vectored_at(&self.file, offset, buffers) {
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
        let file = crate::sys::reopen(&self.file)?;
        Some(Box::new(FileSource { file, uri: self.uri.clone(), len: self.len, path: None }))
    }

    fn sibling(&self, name: &str, _cancel: &dyn Cancel) -> Result<Option<Arc<dyn ReadAt>>> {
        let Some(path) = &self.path else { return Ok(None) };
        Ok(Some(Arc::new(FileSource::open(&path.with_file_name(name))?)))
    }

    fn file(&self) -> Option<&File> {
        Some(&self.file)
    }
}
