//! The folder of the cache: its limit, and the files in it.

use std::fs::{self, DirBuilder, File, Metadata};
use std::io::{self, ErrorKind};
use std::os::unix::fs::{DirBuilderExt as _, MetadataExt as _};
use std::path::PathBuf;
use std::sync::Arc;
use std::time::Duration;

use super::entry::{self, CacheEntry, CachedFile, ENDING, FileVersion, remove};
use crate::cancel::{self, Cancel};
use crate::environment::{CACHE, CACHE_GB, CACHE_OFFLINE};
use crate::error::{Error, Result};
use crate::io::ReadAt;
use crate::sys;

/// The ending of the files of [`Cache::note`].
const NOTE: &str = "note";
/// The divisor of the disk's size that gives the bytes to leave free, unless a limit is set.
const FREE_DIVISOR: u64 = 20;
/// Bytes that an entry needs to be opened without its server: the beginning of the file.
const MIN_HEAD: u64 = 64 << 10;
/// Attempts of an opening whose entry another process removes.
const MAX_ATTEMPTS: usize = 8;
/// Pause between two attempts.
const PAUSE: Duration = Duration::from_millis(10);
/// Attempts to lock the folder.
const MAX_LOCK_ATTEMPTS: usize = 200;

/// A folder, and its limit.
#[derive(Debug, Clone)]
pub struct Cache {
    pub(super) folder: Arc<PathBuf>,
    /// Bytes that it may hold; None for all but a part of the disk.
    max_bytes: Option<u64>,
    /// True if the call named the folder: then one that cannot be used is an error.
    pub(super) is_required: bool,
    /// True if no server is asked whether it has another version than a complete copy.
    pub is_offline: bool,
    /// True if a complete copy is used when its server cannot be reached, or fails.
    pub stale_if_error: bool,
}

impl Cache {
    /// The cache that the environment names.
    pub fn from_environment() -> Result<Option<Self>> {
        let found = CACHE.path().map(Self::at).transpose()?;
        Ok(found.map(|cache| Cache { is_required: false, ..cache }))
    }

    /// True if the server of a file states a strong `ETag` and a size, which the cache needs. False
    /// for local files.
    pub fn accepts(source: &dyn ReadAt) -> bool {
        FileVersion::of(source, "").is_some()
    }

    /// The cache in a folder that a call names, which is made at its first use, with the limit of the
    /// environment.
    pub fn at(folder: PathBuf) -> Result<Self> {
        let max_bytes = Some(CACHE_GB.value()?).filter(|max_bytes| *max_bytes > 0);
        let max_bytes = max_bytes.map(|gigabytes| gigabytes.saturating_mul(1_000_000_000));
        let (is_offline, folder) = (CACHE_OFFLINE.is_true(), Arc::new(folder));
        Ok(Cache { folder, max_bytes, is_required: true, is_offline, stale_if_error: false })
    }

    /// The entry of a file, of any version. The server can then be asked whether it still has this
    /// version. None if there is no usable entry.
    pub fn latest(&self, name: &str) -> Option<CacheEntry> {
        let is_usable = self.check_folder().is_ok();
        let found = CacheEntry::open(&self.path(name)).ok()??;
        let has_head = found.arrived() >= MIN_HEAD.min(found.version.len);
        let is_same = found.version.name == name;
        (has_head && is_same && (is_usable || self.is_readable(&found))).then_some(found)
    }

    /// True if an entry can be read even though the folder cannot be used: it is complete, and not
    /// every user could have put it there.
    pub(super) fn is_readable(&self, entry: &CacheEntry) -> bool {
        let is_protected = |found: Metadata| found.mode() & libc::S_IWOTH == 0;
        entry.is_complete()
            && fs::metadata(&*self.folder).is_ok_and(is_protected)
            && entry.file.metadata().is_ok_and(is_protected)
    }

    /// Keeps a short text under a name, such as the commit that a branch of a hub points to.
    pub fn note(&self, name: &str, text: &str) {
        if self.noted(name).as_deref() != Some(text) && self.check_folder().is_ok() {
            // Without it, the copies of the branch are not found while the hub is down.
            let _ = fs::write(self.path(name).with_extension(NOTE), text);
        }
    }

    /// The text that was kept under a name.
    pub fn noted(&self, name: &str) -> Option<String> {
        fs::read_to_string(self.path(name).with_extension(NOTE)).ok()
    }

    pub(super) fn path(&self, name: &str) -> PathBuf {
        self.folder.join(entry::file_name(name))
    }

    pub(super) fn error(&self, error: io::Error) -> Error {
        Error::io("using the cache in", &self.folder.display().to_string(), error)
    }

    /// Makes the folder; refuses one into which other users could put files, or this user cannot.
    pub(super) fn check_folder(&self) -> io::Result<()> {
        DirBuilder::new().recursive(true).mode(0o700).create(&*self.folder)?;
        let found = fs::metadata(&*self.folder)?;
        let own_user = sys::effective_user_id();
        if found.uid() != own_user || found.mode() & 0o077 != 0 {
            let what = format!(
                "expected a folder that belongs to user {own_user} and that no other user may access \
                 (chmod 700), found one of user {} with mode {:o}",
                found.uid(),
                found.mode() & 0o7777
            );
            return Err(io::Error::new(ErrorKind::PermissionDenied, what));
        }
        sys::check_writable(&self.folder)
    }

    /// Opens the entry of a version, and creates it if there is none.
    pub(super) fn open(
        &self,
        version: &FileVersion,
        uri: &str,
        cancel: &dyn Cancel,
    ) -> io::Result<CacheEntry> {
        let path = self.path(&version.name);
        for _ in 0..MAX_ATTEMPTS {
            match CacheEntry::open(&path) {
                Ok(Some(entry)) if entry.version == *version => {
                    entry.mark_used();
                    return Ok(entry);
                }
                // An older version. Its readers go on with the removed file.
                Ok(Some(other)) => other.remove(),
                // Damaged, invalid since the last boot, or about to be removed.
                Ok(None) => {
                    if !remove(&path)? {
                        pause(cancel)?;
                    }
                }
                Err(e) if e.kind() == ErrorKind::NotFound => {
                    self.create(version, uri, cancel)?;
                }
                Err(e) => return Err(e),
            }
        }
        Err(io::Error::other("other processes are removing its entry"))
    }

    /// Creates an entry, unless another process just has.
    fn create(&self, version: &FileVersion, uri: &str, cancel: &dyn Cancel) -> io::Result<()> {
        let folder = File::open(&*self.folder)?;
        // One process at a time, or several would count on the same free space; the wait is
        // bounded.
        for _ in 0..MAX_LOCK_ATTEMPTS {
            if sys::try_flock(&folder)? {
                break;
            }
            pause(cancel)?;
        }
        let path = self.path(&version.name);
        if fs::symlink_metadata(&path).is_ok() {
            return Ok(());
        }
        if !self.make_room(version.len, &folder)? {
            let limit = match self.max_bytes {
                Some(max_bytes) => format!("at most {max_bytes} bytes"),
                None => format!("all but 1/{FREE_DIVISOR} of its disk"),
            };
            let what = format!(
                "no room for its {} bytes beside files in use: the cache may take {limit} \
                 (TENSORIZER_CACHE_GB)",
                version.len
            );
            return Err(io::Error::new(ErrorKind::StorageFull, what));
        }
        match CacheEntry::create(&path, version, uri) {
            Err(e) if e.kind() == ErrorKind::AlreadyExists => Ok(()),
            created => created,
        }
    }

    /// Removes the least recently used entries until a file fits; none, and false, if it cannot
    /// fit.
    fn make_room(&self, len: u64, folder: &File) -> io::Result<bool> {
        let entries = self.list()?;
        let (all, free) = sys::disk_space(folder)?;
        let sum = |of: fn(&CachedFile) -> u64| entries.iter().map(of).fold(0, u64::saturating_add);
        let (present, total) = (sum(|cached| cached.present), sum(|cached| cached.len));
        let needed = total.saturating_sub(present).saturating_add(len);
        // Bytes over the limit.
        let mut excess = match self.max_bytes {
            Some(max_bytes) => total.saturating_add(len).saturating_sub(max_bytes),
            None => needed.saturating_add(all / FREE_DIVISOR).saturating_sub(free),
        };
        if excess > total {
            return Ok(false);
        }
        for cached in &entries {
            if excess == 0 {
                break;
            }
            if remove(&cached.path)? {
                excess = excess.saturating_sub(cached.len);
            }
        }
        Ok(excess == 0)
    }

    /// All entries, the least recently used first; none if there is no such folder.
    fn list(&self) -> io::Result<Vec<CachedFile>> {
        let mut found = Vec::new();
        let files = match fs::read_dir(&*self.folder) {
            Err(e) if e.kind() == ErrorKind::NotFound => return Ok(found),
            files => files?,
        };
        for file in files {
            let path = file?.path();
            if path.extension().is_some_and(|ending| ending == ENDING) {
                found.extend(CacheEntry::describe(&path));
            }
        }
        found.sort_by_key(|cached| cached.used);
        Ok(found)
    }

    /// The same for a report.
    pub fn entries(&self) -> Result<Vec<CachedFile>> {
        self.list().map_err(|e| self.error(e))
    }

    /// Removes all entries that are not in use, and returns them.
    pub fn clear(&self) -> Result<Vec<CachedFile>> {
        let mut removed = self.entries()?;
        let mut failed = None;
        removed.retain(|cached| {
            let is_gone = remove(&cached.path).map_err(|e| failed = Some(e));
            is_gone.unwrap_or(false)
        });
        for file in fs::read_dir(&*self.folder).into_iter().flatten().flatten() {
            if file.path().extension().is_some_and(|ending| ending == NOTE) {
                let _ = remove(&file.path());
            }
        }
        failed.map_or(Ok(removed), |e| Err(self.error(e)))
    }
}

/// Pauses. A cancelled call is an interruption here; the caller checks for its error.
fn pause(cancel: &dyn Cancel) -> io::Result<()> {
    cancel::sleep(PAUSE, cancel).map_err(|_| io::Error::from(ErrorKind::Interrupted))
}
