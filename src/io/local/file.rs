//! Local regular files, read with positional reads.

use std::fs::{File, Metadata};
use std::io;
use std::os::fd::AsRawFd as _;
use std::path::{Path, PathBuf};
use std::sync::{Arc, OnceLock};

use super::shard::Shard;
use crate::cancel::Cancel;
use crate::error::{Error, Result};
use crate::io::{Capabilities, ReadAt, SourceIdentity};
use crate::mem::Buffers;
use crate::sys::{FileStamp, file_stamp};

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
    /// The stamp with which it was opened; None if only a part of it is used.
    stamp: Option<FileStamp>,
    /// The folder of its siblings without links, once they were examined.
    folder: OnceLock<PathBuf>,
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
        let found = metadata_of_file(&file, &uri)?;
        // Siblings are opened later, when the working directory may be another one.
        let absolute = std::path::absolute(path).unwrap_or_else(|_| path.to_owned());
        Ok(Self::whole(FileDescriptor::Open(Arc::new(file), Some(absolute)), uri, &found))
    }

    /// Opens one of many files, whose descriptor may be closed and opened again.
    fn open_shard(path: &Path, uri: String) -> Result<Self> {
        let file = crate::sys::open_nonblocking(path).map_err(|e| Error::io("opening", &uri, e))?;
        let found = metadata_of_file(&file, &uri)?;
        let shard = Shard::new(path, file, FileStamp::of(&found));
        Ok(Self::whole(FileDescriptor::Shard(shard), uri, &found))
    }

    /// Takes an open file; its own position does not matter.
    pub fn new(file: File, uri: String) -> Result<Self> {
        let found = metadata_of_file(&file, &uri)?;
        Ok(Self::whole(FileDescriptor::Open(Arc::new(file), None), uri, &found))
    }

    fn whole(file: FileDescriptor, uri: String, found: &Metadata) -> Self {
        let (len, stamp) = (found.len(), Some(FileStamp::of(found)));
        FileSource { file, uri, len, stamp, folder: OnceLock::new() }
    }

    /// Takes the first `len` bytes of a regular file, which has at least that many.
    pub fn from_prefix(file: File, uri: String, len: u64) -> Self {
        let file = FileDescriptor::Open(Arc::new(file), None);
        FileSource { file, uri, len, stamp: None, folder: OnceLock::new() }
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
        let path = match self.folder.get() {
            Some(folder) => folder.join(name),
            None => path.with_file_name(name),
        };
        Ok(Some(Arc::new(FileSource::open_shard(&path, uri)?)))
    }

    fn identity(&self) -> Option<SourceIdentity> {
        self.stamp.map(SourceIdentity::Local)
    }

    fn sibling_identities(&self, names: &[String]) -> Result<Vec<Option<SourceIdentity>>> {
        let (FileDescriptor::Open(file, Some(path)), Some(stamp)) = (&self.file, self.stamp) else {
            return Ok(Vec::new());
        };
        let Some((parent, own_name)) = path.parent().zip(path.file_name()) else {
            return Ok(Vec::new());
        };
        // The second folder is the right one if a link in the path has changed since the opening.
        let opened = std::fs::read_link(format!("/proc/self/fd/{}", file.as_raw_fd()));
        let opened = opened.ok().and_then(|path| path.parent().map(Path::to_owned));
        for folder in [std::fs::canonicalize(parent).ok(), opened].into_iter().flatten() {
            let identity = |name| file_stamp(&folder.join(name)).map(SourceIdentity::Local);
            let found = names.iter().map(identity).collect();
            // Last, so that a folder that was exchanged meanwhile is noticed.
            if file_stamp(&folder.join(own_name)) == Some(stamp) {
                self.folder.get_or_init(|| folder);
                return Ok(found);
            }
        }
        let what = "it was replaced while it was opened: open it again";
        Err(Error::io("opening", &self.uri, io::Error::new(io::ErrorKind::InvalidData, what)))
    }

    fn file(&self) -> Option<Arc<File>> {
        self.open_file().ok()
    }

    fn is_local(&self) -> bool {
        true
    }
}

#[cfg(test)]
#[allow(clippy::unwrap_used)]
mod tests {
    use std::fs;
    use std::os::unix::fs::symlink;

    use super::*;
    use crate::cancel::Never;

    /// Two folders with an index and a shard each, and a link to the first one.
    fn two_versions() -> tempfile::TempDir {
        let top = tempfile::tempdir().unwrap();
        for version in ["v1", "v2"] {
            fs::create_dir(top.path().join(version)).unwrap();
            fs::write(top.path().join(version).join("index"), "{}").unwrap();
            fs::write(top.path().join(version).join("shard"), version).unwrap();
        }
        symlink("v1", top.path().join("current")).unwrap();
        top
    }

    fn flip(top: &Path) {
        symlink("v2", top.join("next")).unwrap();
        fs::rename(top.join("next"), top.join("current")).unwrap();
    }

    #[test]
    fn siblings_are_those_beside_the_opened_file() {
        // The link changes before the siblings are examined, or after that.
        for is_early in [true, false] {
            let top = two_versions();
            let index = FileSource::open(&top.path().join("current/index")).unwrap();
            if is_early {
                flip(top.path());
            }
            let names = ["shard".to_owned(), "missing".to_owned()];
            let found = index.sibling_identities(&names).unwrap();
            flip(top.path());
            let shard = index.sibling("shard", None, &Never).unwrap().unwrap();
            let mut bytes = [0; 2];
            shard.read_at(0, &mut Buffers::from_slice(&mut bytes), &Never).unwrap();
            assert_eq!(&bytes, b"v1");
            assert_eq!(found, [shard.identity(), None]);
            assert!(found.first().is_some_and(Option::is_some));
            assert!(shard.uri().ends_with("current/shard"));
        }
    }

    #[test]
    fn replaced_file_has_no_siblings() {
        let top = two_versions();
        let index = FileSource::open(&top.path().join("v1/index")).unwrap();
        fs::rename(top.path().join("v1"), top.path().join("old")).unwrap();
        fs::rename(top.path().join("v2"), top.path().join("v1")).unwrap();
        // The kernel knows the new name of the folder of the open file.
        index.sibling_identities(&["shard".to_owned()]).unwrap();
        fs::write(top.path().join("old/other"), "{}").unwrap();
        fs::rename(top.path().join("old/other"), top.path().join("old/index")).unwrap();
        let error = index.sibling_identities(&["shard".to_owned()]).unwrap_err().to_string();
        assert!(error.contains("it was replaced while it was opened: open it again"), "{error}");
    }
}
