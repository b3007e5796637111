//! Local regular files, read with positional reads.

use std::fs::{self, File, Metadata, OpenOptions};
use std::io::{self, ErrorKind};
use std::os::unix::fs::{MetadataExt as _, OpenOptionsExt as _};
use std::path::Path;
use std::sync::Arc;

use super::shard::Shard;
use crate::cancel::{Cancel, retry_interrupted};
use crate::error::{Error, Result};
use crate::io::{Capabilities, Facts, ReadAt, ServerFile, SourceIdentity};
use crate::mem::Buffers;
use crate::mem::mapped::identity;
use crate::sys::FileStamp;

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
    facts: Facts,
}

/// The descriptor of a file.
enum FileDescriptor {
    /// A descriptor that stays open.
    Open(Arc<File>),
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
        let mut source = Self::new(file, path.display().to_string())?;
        // Siblings are opened later, when the working directory may be another one.
        source.facts.path = Some(std::path::absolute(path).unwrap_or_else(|_| path.to_owned()));
        Ok(source)
    }

    /// Opens one of many files, whose descriptor may be closed and opened again.
    pub(super) fn open_shard(path: &Path, uri: String) -> Result<Self> {
        let file = crate::sys::open_nonblocking(path).map_err(|e| Error::io("opening", &uri, e))?;
        let found = metadata_of_file(&file, &uri)?;
        let shard = Shard::new(path, file, FileStamp::of(&found));
        Ok(Self::whole(FileDescriptor::Shard(shard), uri, &found))
    }

    /// Takes an open file; its own position does not matter.
    pub fn new(file: File, uri: String) -> Result<Self> {
        let found = metadata_of_file(&file, &uri)?;
        Ok(Self::whole(FileDescriptor::Open(Arc::new(file)), uri, &found))
    }

    /// Makes it the local copy of a server's file.
    pub fn of_server(mut self, server: ServerFile) -> Self {
        self.facts.server = Some(server);
        self
    }

    fn whole(file: FileDescriptor, uri: String, found: &Metadata) -> Self {
        let identity = Some(SourceIdentity::Local(FileStamp::of(found)));
        let len = Some(found.len());
        FileSource { file, facts: Facts { uri, len, identity, is_local: true, ..Facts::default() } }
    }

    /// Takes the first `len` bytes of a regular file, which has at least that many.
    pub fn from_prefix(file: File, uri: String, len: u64) -> Self {
        let facts = Facts { uri, len: Some(len), is_local: true, ..Facts::default() };
        FileSource { file: FileDescriptor::Open(Arc::new(file)), facts }
    }

    fn open_file(&self) -> Result<Arc<File>> {
        match &self.file {
            FileDescriptor::Open(file) => Ok(Arc::clone(file)),
            FileDescriptor::Shard(shard) => shard.file(&self.facts.uri),
        }
    }
}

/// Opens a file of a folder; follows no link, and does not wait for a pipe. A file that cannot be
/// written is opened for reading.
pub fn open_no_follow(path: &Path) -> io::Result<File> {
    let flags = libc::O_NOFOLLOW | libc::O_NONBLOCK;
    let mut options = OpenOptions::new();
    match options.read(true).write(true).custom_flags(flags).open(path) {
        Err(e)
            if matches!(e.kind(), ErrorKind::PermissionDenied | ErrorKind::ReadOnlyFilesystem) =>
        {
            options.write(false).open(path)
        }
        opened => opened,
    }
}

/// True if an open file is the one at a path.
pub(super) fn is_at(file: &File, path: &Path) -> bool {
    let at_path = fs::symlink_metadata(path).map(|found| (found.dev(), found.ino()));
    at_path.is_ok_and(|at_path| identity(file).is_ok_and(|own| own == at_path))
}

/// Removes an open file, unless there is another one at its path.
pub fn remove_if_at(file: &File, path: &Path) -> io::Result<()> {
    if is_at(file, path) { fs::remove_file(path) } else { Ok(()) }
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
    fn facts(&self) -> &Facts {
        &self.facts
    }

    fn capabilities(&self) -> Capabilities {
        let initial_readers = crate::cpu_count().clamp(MIN_READERS, MAX_FIRST_READERS);
        Capabilities {
            max_readers: usize::MAX,
            initial_readers,
            max_auto_readers: (initial_readers * DISK_READERS_FACTOR).min(MAX_DISK_READERS),
            request_len: REQUEST_LEN,
            merge_gap: MERGE_GAP,
            ..Capabilities::SEQUENTIAL
        }
    }

    fn read_at(&self, offset: u64, into: &mut Buffers<'_>, cancel: &dyn Cancel) -> Result<usize> {
        let file = self.open_file()?;
        let read = || crate::sys::read_vectored_at(&file, offset, into);
        let read = retry_interrupted(cancel, read)
            .map_err(|e| Error::of_io("reading", &self.facts.uri, e))?;
        into.arrived(read as u64);
        Ok(read)
    }

    fn file(&self) -> Option<Arc<File>> {
        self.open_file().ok()
    }
}

/// A handle of one reader to the file of a source: of neighbouring ranges, the kernel then reads
/// ahead for each reader. Bytes that it fails to read come from the source.
pub struct OwnHandle<'s> {
    own: FileSource,
    shared: &'s dyn ReadAt,
}

impl<'s> OwnHandle<'s> {
    /// Opens the file again; None if the source is no file that can be mapped.
    pub fn open(shared: &'s dyn ReadAt) -> Option<Self> {
        let (file, facts) = (crate::sys::reopen(&*shared.file()?)?, shared.facts());
        Some(OwnHandle {
            own: FileSource::from_prefix(file, facts.uri.clone(), facts.len?),
            shared,
        })
    }
}

impl ReadAt for OwnHandle<'_> {
    fn facts(&self) -> &Facts {
        self.shared.facts()
    }

    fn capabilities(&self) -> Capabilities {
        self.own.capabilities()
    }

    fn read_at(&self, offset: u64, into: &mut Buffers<'_>, cancel: &dyn Cancel) -> Result<usize> {
        match self.own.read_at(offset, into, cancel) {
            Err(Error::Io { .. }) | Ok(0) => self.shared.read_at(offset, into, cancel),
            read => read,
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::cancel::Never;
    use crate::io::MemorySource;

    /// A source in memory, with a copy on the disk.
    struct CopiedSource(MemorySource<&'static [u8]>, Arc<File>);

    impl ReadAt for CopiedSource {
        fn facts(&self) -> &Facts {
            self.0.facts()
        }

        fn capabilities(&self) -> Capabilities {
            self.0.capabilities()
        }

        fn read_at(
            &self,
            offset: u64,
            into: &mut Buffers<'_>,
            cancel: &dyn Cancel,
        ) -> Result<usize> {
            self.0.read_at(offset, into, cancel)
        }

        fn file(&self) -> Option<Arc<File>> {
            Some(Arc::clone(&self.1))
        }
    }

    #[test]
    fn source_gives_what_an_own_handle_cannot_read() {
        let copy = tempfile::NamedTempFile::new().unwrap();
        std::fs::write(copy.path(), b"01").unwrap();
        let file = Arc::new(File::open(copy.path()).unwrap());
        let source = CopiedSource(MemorySource::new(b"ABCD", "memory"), file);
        let (own, mut found) = (OwnHandle::open(&source).unwrap(), [0; 2]);
        for (offset, expected) in [(0, b"01"), (2, b"CD")] {
            let read = own.read_at(offset, &mut Buffers::from_slice(&mut found), &Never);
            assert_eq!((read.unwrap(), &found), (2, expected));
        }
        assert!(OwnHandle::open(&source.0).is_none());
    }
}
