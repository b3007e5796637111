//! Shards: files of a checkpoint in many. Their descriptors are opened when they are read, and the
//! least recently used ones are closed, so a process may use more files than descriptors.

use std::collections::BTreeMap;
use std::fs::{File, Metadata};
use std::io;
use std::os::unix::fs::MetadataExt as _;
use std::path::{Path, PathBuf};
use std::sync::Arc;
use std::sync::atomic::{AtomicU64, Ordering};

use crate::error::{Error, Result};
use crate::sys::fork_safe_mutex::ForkSafeMutex;

/// The divisor of the process's limit of descriptors that gives the number for shards, and the
/// minimum number.
const LIMIT_DIVISOR: u64 = 4;
const MIN_OPEN: u64 = 16;

/// The open descriptors of all shards of this process, by the number of their last use.
struct OpenFiles {
    uses: u64,
    files: BTreeMap<u64, Arc<File>>,
}

static OPEN_FILES: ForkSafeMutex<OpenFiles> =
    ForkSafeMutex::new(OpenFiles { uses: 0, files: BTreeMap::new() });

/// Distinguishes a file from another one with its name, and from its own later content.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
struct FileIdentity {
    device: u64,
    inode: u64,
    len: u64,
    modified: (i64, i64),
}

impl FileIdentity {
    fn of(found: &Metadata) -> Self {
        let modified = (found.mtime(), found.mtime_nsec());
        FileIdentity { device: found.dev(), inode: found.ino(), len: found.len(), modified }
    }
}

/// A regular file that is opened again when its descriptor was closed.
pub struct Shard {
    path: PathBuf,
    identity: FileIdentity,
    /// The number of its last use; 0 before the first.
    used: AtomicU64,
}

impl Shard {
    /// Takes the open file of a path, and what was found of it.
    pub fn new(path: &Path, file: File, found: &Metadata) -> Self {
        let (path, identity) = (path.to_owned(), FileIdentity::of(found));
        let shard = Shard { path, identity, used: AtomicU64::new(0) };
        shard.retain(Arc::new(file));
        shard
    }

    /// The path.
    pub fn path(&self) -> &Path {
        &self.path
    }

    /// The open file. It stays open as long as the returned value lives.
    pub fn file(&self, uri: &str) -> Result<Arc<File>> {
        if let Some(file) = self.retained() {
            return Ok(file);
        }
        let failed = |e| Error::io("opening", uri, e);
        let file = crate::sys::open_nonblocking(&self.path).map_err(failed)?;
        let found = FileIdentity::of(&file.metadata().map_err(failed)?);
        if found != self.identity {
            let what = format!(
                "it has changed since it was opened: expected {}, found {}",
                describe(&self.identity),
                describe(&found)
            );
            return Err(failed(io::Error::new(io::ErrorKind::InvalidData, what)));
        }
        let file = Arc::new(file);
        self.retain(Arc::clone(&file));
        Ok(file)
    }

    fn retained(&self) -> Option<Arc<File>> {
        let mut open = OPEN_FILES.lock();
        let file = open.files.remove(&self.used.load(Ordering::Relaxed))?;
        self.mark_used(&mut open, Arc::clone(&file));
        Some(file)
    }

    fn mark_used(&self, open: &mut OpenFiles, file: Arc<File>) {
        open.uses = open.uses.saturating_add(1);
        self.used.store(open.uses, Ordering::Relaxed);
        open.files.insert(open.uses, file);
    }

    /// Retains the descriptor, and closes the least recently used ones.
    fn retain(&self, file: Arc<File>) {
        let limit = max_open();
        let mut closed = Vec::new();
        let mut open = OPEN_FILES.lock();
        // Another thread may have opened it meanwhile.
        closed.extend(open.files.remove(&self.used.load(Ordering::Relaxed)));
        self.mark_used(&mut open, file);
        while open.files.len() as u64 > limit {
            let Some((_, file)) = open.files.pop_first() else { break };
            closed.push(file);
        }
        drop(open);
        drop(closed);
    }
}

impl Drop for Shard {
    fn drop(&mut self) {
        let file = OPEN_FILES.lock().files.remove(&self.used.load(Ordering::Relaxed));
        drop(file);
    }
}

/// Maximum number of descriptors for shards.
fn max_open() -> u64 {
    (crate::sys::process::descriptor_limit() / LIMIT_DIVISOR).max(MIN_OPEN)
}

fn describe(file: &FileIdentity) -> String {
    let (seconds, nanoseconds) = file.modified;
    format!("{} bytes of inode {}, modified at {seconds}.{nanoseconds:09}", file.len, file.inode)
}

#[cfg(test)]
#[allow(clippy::unwrap_used)]
mod tests {
    use super::*;

    fn shard(path: &Path, bytes: &[u8]) -> Shard {
        std::fs::write(path, bytes).unwrap();
        let file = File::open(path).unwrap();
        let found = file.metadata().unwrap();
        Shard::new(path, file, &found)
    }

    fn close(shard: &Shard) {
        let file = OPEN_FILES.lock().files.remove(&shard.used.load(Ordering::Relaxed));
        assert!(file.is_some());
    }

    #[test]
    fn a_closed_shard_is_reopened_if_it_is_the_same_file() {
        let folder = tempfile::tempdir().unwrap();
        let path = folder.path().join("one");
        let one = shard(&path, b"some bytes");
        let first = one.file("one").unwrap();
        assert!(Arc::ptr_eq(&first, &one.file("one").unwrap()));
        close(&one);
        assert!(!Arc::ptr_eq(&first, &one.file("one").unwrap()));
        close(&one);
        std::fs::rename(&path, folder.path().join("other")).unwrap();
        assert!(matches!(one.file("one"), Err(Error::Io { action: "opening", .. })));
        std::fs::write(&path, b"other bytes").unwrap();
        let error = one.file("one").unwrap_err().to_string();
        assert!(error.contains("expected 10 bytes"), "{error}");
        assert!(error.contains("found 11 bytes"), "{error}");
    }

    #[test]
    fn open_descriptors_are_limited() {
        let folder = tempfile::tempdir().unwrap();
        let path = folder.path().join("one");
        let count = usize::try_from(max_open().min(2000)).unwrap() + 3;
        let shards: Vec<Shard> = (0..count).map(|_| shard(&path, b"bytes")).collect();
        assert!(OPEN_FILES.lock().files.len() as u64 <= max_open());
        drop(shards);
    }
}
