//! Shards: files of a checkpoint in many. Their descriptors are opened when they are read, and the
//! least recently used ones are closed, so a process may use more files than descriptors.

use std::collections::BTreeMap;
use std::fs::File;
use std::path::{Path, PathBuf};
use std::sync::Arc;
use std::sync::atomic::{AtomicU64, Ordering};

use crate::error::{Error, Result};
use crate::io::SourceIdentity;
use crate::sys::FileStamp;
use crate::sys::fork_safe_mutex::ForkSafeMutex;

/// The divisor of the process's limit of descriptors that gives the number for shards, and the
/// minimum number.
const LIMIT_DIVISOR: u64 = 4;
const MIN_OPEN: u64 = 16;

/// The open descriptors of all shards of this process, by the number of their last use.
struct OpenFiles {
    uses: u64,
    files: BTreeMap<u64, Arc<File>>,
    /// The most that may be open, as it was when none was.
    limit: u64,
}

static OPEN_FILES: ForkSafeMutex<OpenFiles> =
    ForkSafeMutex::new(OpenFiles { uses: 0, files: BTreeMap::new(), limit: 0 });

/// A regular file that is opened again when its descriptor was closed.
pub struct Shard {
    path: PathBuf,
    stamp: FileStamp,
    /// The number of its last use; 0 before the first.
    used: AtomicU64,
}

impl Shard {
    /// Takes the open file of a path, and its stamp.
    pub fn new(path: &Path, file: File, stamp: FileStamp) -> Self {
        let shard = Shard { path: path.to_owned(), stamp, used: AtomicU64::new(0) };
        shard.retain(Arc::new(file));
        shard
    }

    /// The open file. It stays open as long as the returned value lives.
    pub fn file(&self, uri: &str) -> Result<Arc<File>> {
        if let Some(file) = self.retained() {
            return Ok(file);
        }
        let failed = |e| Error::io("opening", uri, e);
        let file = crate::sys::open_nonblocking(&self.path).map_err(failed)?;
        let found = FileStamp::of(&file.metadata().map_err(failed)?);
        SourceIdentity::Local(self.stamp).check(&SourceIdentity::Local(found), uri)?;
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

    /// Retains the descriptor, and closes the least recently used one if there are too many.
    fn retain(&self, file: Arc<File>) {
        let mut open = OPEN_FILES.lock();
        if open.files.is_empty() {
            open.limit = max_open();
        }
        // Another thread may have opened it meanwhile.
        let other = open.files.remove(&self.used.load(Ordering::Relaxed));
        self.mark_used(&mut open, file);
        let is_over = open.files.len() as u64 > open.limit;
        let oldest = is_over.then(|| open.files.pop_first());
        drop(open);
        drop((other, oldest));
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

#[cfg(test)]
mod tests {
    use super::*;

    fn shard(path: &Path) -> Shard {
        let file = File::open(path).unwrap();
        let stamp = FileStamp::of(&file.metadata().unwrap());
        Shard::new(path, file, stamp)
    }

    fn close(shard: &Shard) {
        let file = OPEN_FILES.lock().files.remove(&shard.used.load(Ordering::Relaxed));
        assert!(file.is_some());
    }

    #[test]
    fn a_closed_shard_is_reopened_if_it_is_the_same_file() {
        let folder = tempfile::tempdir().unwrap();
        let path = folder.path().join("one");
        std::fs::write(&path, b"some bytes").unwrap();
        let one = shard(&path);
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
        std::fs::write(&path, b"bytes").unwrap();
        let count = usize::try_from(max_open().min(2000)).unwrap() + 3;
        let shards: Vec<Shard> = (0..count).map(|_| shard(&path)).collect();
        assert!(OPEN_FILES.lock().files.len() as u64 <= max_open());
        drop(shards);
    }
}
