//! The cache: a folder with bytes that servers have sent, for the next load of the same file.
//!
//! Versions of a file are distinguished by `ETag` and size. Each opening asks the server for them;
//! the server responds without a body if the cached version is still current. `entry.rs` describes
//! the files of the folder.

mod cached_file;
mod entry;
mod source;

use std::fs::{self, DirBuilder, File, Metadata};
use std::io::{self, ErrorKind};
use std::os::unix::fs::{DirBuilderExt as _, MetadataExt as _};
use std::path::{Path, PathBuf};
use std::sync::Arc;
use std::sync::atomic::{AtomicU64, Ordering};
use std::time::{Duration, SystemTime};

use crate::cancel::{self, Cancel};
use crate::environment::{CACHE, CACHE_GB};
use crate::error::{Error, Result};
use crate::io::ReadAt;
use crate::sys;
use cached_file::not_cached;
pub use cached_file::{CachedFile, NOT_CACHED};
pub use entry::CacheEntry;
use entry::FileVersion;
use source::CacheOrigin;

/// The ending of file names of entries.
const SUFFIX: &str = ".cached";
/// The beginning of file names of entries that are being made.
const NEW_PREFIX: &str = ".new-";
/// Age after which such a file is a leftover.
const STALE: Duration = Duration::from_secs(60 * 60);
/// The divisor of the disk's size that gives the bytes to leave free, unless a limit is set.
const FREE_DIVISOR: u64 = 20;
/// Attempts of an opening whose entry another process removes.
const MAX_ATTEMPTS: usize = 8;
/// Pause between two attempts.
const PAUSE: Duration = Duration::from_millis(10);
/// Attempts to lock the folder.
const MAX_LOCK_ATTEMPTS: usize = 200;
/// Numbers the files that this process makes.
static NUMBER: AtomicU64 = AtomicU64::new(0);

/// A folder, and its limit.
#[derive(Debug, Clone)]
pub struct Cache {
    folder: Arc<PathBuf>,
    /// Bytes that it may hold; None for all but a part of the disk.
    max_bytes: Option<u64>,
    /// True if the call named the folder: then one that cannot be used is an error.
    is_required: bool,
}

/// A source with the cache before it, or the reason why there is no cache.
pub enum Wrapped {
    /// The source with the cache before it.
    Cached(Arc<dyn ReadAt>),
    /// The reason, if the caller is to be told.
    NotCached(Option<String>),
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
        Ok(Cache { folder: Arc::new(folder), max_bytes, is_required: true })
    }

    /// The latest entry of a file, of any version. The server can then be asked whether it still
    /// has this version. None if there is no usable entry.
    pub fn latest(&self, name: &str) -> Option<CacheEntry> {
        let is_usable = self.check_folder().is_ok();
        let prefix = format!("{}-", FileVersion::prefix(name));
        let names = fs::read_dir(&*self.folder).ok()?.filter_map(|file| Some(file.ok()?.path()));
        let is_version = |path: &PathBuf| {
            let name = path.file_name().and_then(|name| name.to_str()).unwrap_or("");
            name.starts_with(&prefix) && name.ends_with(SUFFIX)
        };
        let used = |path: &PathBuf| fs::metadata(path).and_then(|found| found.modified()).ok();
        let latest = names.filter(is_version).max_by_key(used)?;
        let found = CacheEntry::open_latest(&latest, name).ok()??;
        (is_usable || self.is_readable(&found)).then_some(found)
    }

    /// True if an entry can be read even though the folder cannot be used: it is complete, and not
    /// every user could have put it there.
    fn is_readable(&self, entry: &CacheEntry) -> bool {
        let is_protected = |found: Metadata| found.mode() & libc::S_IWOTH == 0;
        entry.is_complete()
            && fs::metadata(&*self.folder).is_ok_and(is_protected)
            && entry.file().metadata().is_ok_and(is_protected)
    }

    /// Puts the cache before a source of a server, if the server distinguishes versions. `latest`
    /// is the result of [`Cache::latest`]. Another process is waited for at most `wait_limit`.
    pub fn wrap(
        &self,
        source: Arc<dyn ReadAt>,
        name: &str,
        latest: Option<CacheEntry>,
        wait_limit: Duration,
        cancel: &dyn Cancel,
    ) -> Result<Wrapped> {
        let Some(version) = FileVersion::of(&*source, name) else {
            return Ok(Wrapped::NotCached(None));
        };
        let usable = self.check_folder();
        // An entry of another version is dropped here, so that it can be removed.
        let latest = latest.filter(|latest| *latest.version() == version);
        let opened = match (latest, &usable) {
            (Some(latest), _) => {
                latest.mark_used();
                Ok(latest)
            }
            (None, Ok(())) => self.open(&version, cancel),
            (None, Err(_)) => self.open_complete(&version),
        };
        cancel.check()?;
        let entry = match (opened, usable) {
            (Ok(entry), _) => entry,
            // The folder was not usable when the call began, but for a full disk.
            (Err(_), Err(e)) if self.is_required && !is_full(&e) => {
                let what =
                    format!("{e}: pass a folder of your own in which you may write, or none");
                return Err(self.error(io::Error::new(e.kind(), what)));
            }
            (Err(_), Err(e)) => {
                let why = format!("{NOT_CACHED}{} cannot be used: {e}", self.folder.display());
                return Ok(Wrapped::NotCached(Some(why)));
            }
            (Err(e), Ok(())) => {
                let why = not_cached(&self.folder.display(), source.uri(), &e);
                return Ok(Wrapped::NotCached(Some(why)));
            }
        };
        let (cache, name) = (self.clone(), name.to_owned());
        let fill = move |server: &Arc<dyn ReadAt>, cancel: &dyn Cancel| {
            // In a folder that cannot be used the damaged entry is still there.
            let made = cache
                .check_folder()
                .map(|()| cache.wrap(Arc::clone(server), &name, None, wait_limit, cancel));
            match made {
                Ok(Ok(Wrapped::Cached(made))) => made,
                _ => Arc::clone(server),
            }
        };
        let origin = CacheOrigin { server: source, wait_limit, fill: Box::new(fill) };
        Ok(Wrapped::Cached(source::with_cache(origin, entry)))
    }

    /// Opens the complete entry of a version in a folder that cannot be used otherwise.
    fn open_complete(&self, version: &FileVersion) -> io::Result<CacheEntry> {
        let path = self.folder.join(format!("{}{SUFFIX}", version.file_name()));
        let entry = CacheEntry::open(&path, version)?.filter(|entry| self.is_readable(entry));
        entry.ok_or_else(|| io::Error::from(ErrorKind::NotFound))
    }

    fn error(&self, error: io::Error) -> Error {
        Error::io("using the cache in", &self.folder.display().to_string(), error)
    }

    /// Makes the folder; refuses one into which other users could put files, or this user cannot.
    fn check_folder(&self) -> io::Result<()> {
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
    fn open(&self, version: &FileVersion, cancel: &dyn Cancel) -> io::Result<CacheEntry> {
        let path = self.folder.join(format!("{}{SUFFIX}", version.file_name()));
        for _ in 0..MAX_ATTEMPTS {
            match CacheEntry::open(&path, version) {
                Ok(Some(entry)) => return Ok(entry),
                // Damaged, invalid since the last boot, or about to be removed.
                Ok(None) => drop(remove(&path)?),
                Err(e) if e.kind() == ErrorKind::NotFound => {
                    self.create_entry(version, &path, cancel)?;
                    continue;
                }
                Err(e) => return Err(e),
            }
            pause(cancel)?;
        }
        Err(io::Error::other("other processes are removing its entry"))
    }

    /// Creates an entry, unless another process just has.
    fn create_entry(
        &self,
        version: &FileVersion,
        path: &Path,
        cancel: &dyn Cancel,
    ) -> io::Result<()> {
        let folder = File::open(&*self.folder)?;
        // One process at a time, or several would count on the same free space; the wait is
        // bounded.
        for _ in 0..MAX_LOCK_ATTEMPTS {
            if sys::try_flock(&folder)? {
                break;
            }
            pause(cancel)?;
        }
        if !self.make_room(version, &folder)? {
            let limit = match self.max_bytes {
                Some(max_bytes) => format!("at most {max_bytes} bytes"),
                None => format!("all but 1/{FREE_DIVISOR} of its disk"),
            };
            let what = format!(
                "no room for its {} bytes beside files in use: the cache may take {limit} \
                 (TENSORIZER_CACHE_GB)",
                version.len()
            );
            return Err(io::Error::new(ErrorKind::StorageFull, what));
        }
        let now = SystemTime::now().duration_since(SystemTime::UNIX_EPOCH);
        let nanos = now.map_or(0, |now| now.as_nanos());
        let number = NUMBER.fetch_add(1, Ordering::Relaxed);
        let new = self
            .folder
            .join(format!("{NEW_PREFIX}{nanos:x}-{}-{number}{SUFFIX}", std::process::id()));
        CacheEntry::create(&new, version)?;
        match sys::rename_to_free_name(&new, path) {
            Ok(()) => Ok(()),
            Err(e) => {
                let _ = fs::remove_file(&new);
                if e.kind() == ErrorKind::AlreadyExists { Ok(()) } else { Err(e) }
            }
        }
    }

    /// Removes the least recently used entries until a file fits; none, and false, if it cannot
    /// fit.
    fn make_room(&self, version: &FileVersion, folder: &File) -> io::Result<bool> {
        let mut entries = self.list()?;
        // The older versions of the file are useless.
        let is_other_version = |cached: &CachedFile| version.is_other_version(&cached.path);
        entries.retain(|cached| {
            !(is_other_version(cached) && remove(&cached.path).is_ok_and(|is_gone| is_gone))
        });
        entries.sort_by_key(|cached| cached.used);
        let (all, free) = sys::disk_space(folder)?;
        let sum = |of: fn(&CachedFile) -> u64| entries.iter().map(of).fold(0, u64::saturating_add);
        let (present, missing_bytes) =
            (sum(|cached| cached.present), sum(CachedFile::missing_bytes));
        let needed = missing_bytes.saturating_add(version.len());
        // Bytes over the limit.
        let mut excess = match self.max_bytes {
            Some(max_bytes) => present.saturating_add(needed).saturating_sub(max_bytes),
            None => needed.saturating_add(all / FREE_DIVISOR).saturating_sub(free),
        };
        if excess > present.saturating_add(missing_bytes) {
            return Ok(false);
        }
        for cached in &entries {
            if excess == 0 {
                break;
            }
            if remove(&cached.path)? {
                excess =
                    excess.saturating_sub(cached.present.saturating_add(cached.missing_bytes()));
            }
        }
        Ok(excess == 0)
    }

    fn list(&self) -> io::Result<Vec<CachedFile>> {
        let mut found = Vec::new();
        for file in fs::read_dir(&*self.folder)? {
            let path = file?.path();
            let Some(name) = path.file_name().and_then(|name| name.to_str()) else { continue };
            let Ok(metadata) = fs::symlink_metadata(&path) else { continue };
            if !name.ends_with(SUFFIX) || !metadata.is_file() {
                continue;
            }
            if !name.starts_with(NEW_PREFIX) {
                found.extend(CacheEntry::describe(&path, &metadata));
            } else if is_stale(&metadata) {
                let _ = fs::remove_file(&path);
            }
        }
        Ok(found)
    }

    /// All entries, the least recently used first; none if there is no such folder.
    pub fn entries(&self) -> Result<Vec<CachedFile>> {
        match self.list() {
            Ok(mut found) => {
                found.sort_by_key(|cached| cached.used);
                Ok(found)
            }
            Err(e) if e.kind() == ErrorKind::NotFound => Ok(Vec::new()),
            Err(e) => Err(self.error(e)),
        }
    }

    /// Removes all entries that are not in use, and returns them.
    pub fn clear(&self) -> Result<Vec<CachedFile>> {
        let mut removed = self.entries()?;
        let mut failed = None;
        removed.retain(|cached| match remove(&cached.path) {
            Ok(is_gone) => is_gone,
            Err(e) => {
                failed = Some(e);
                false
            }
        });
        failed.map_or(Ok(removed), |e| Err(self.error(e)))
    }
}

/// True for the errors of a full disk, which end no load.
fn is_full(error: &io::Error) -> bool {
    matches!(error.kind(), ErrorKind::StorageFull | ErrorKind::QuotaExceeded)
}

/// Pauses. A cancelled call is an interruption here; the caller checks for its error.
fn pause(cancel: &dyn Cancel) -> io::Result<()> {
    cancel::sleep(PAUSE, cancel).map_err(|_| io::Error::from(ErrorKind::Interrupted))
}

fn is_stale(metadata: &Metadata) -> bool {
    let age = metadata.modified().map(|then| SystemTime::now().duration_since(then));
    age.is_ok_and(|age| age.is_ok_and(|age| age > STALE))
}

/// Removes an entry unless it is in use; true if it is gone.
fn remove(path: &Path) -> io::Result<bool> {
    let file = match entry::open_no_follow(path) {
        Ok(file) => file,
        Err(e) if e.kind() == ErrorKind::NotFound => return Ok(true),
        Err(e) => return Err(e),
    };
    if !sys::try_lock_exclusive(&file)? {
        return Ok(false);
    }
    let id = |metadata: &Metadata| (metadata.dev(), metadata.ino());
    let own = file.metadata()?;
    if fs::symlink_metadata(path).is_ok_and(|there| id(&there) != id(&own)) {
        // Another process has removed it, and there is a new one.
        return Ok(true);
    }
    match fs::remove_file(path) {
        Err(e) if e.kind() != ErrorKind::NotFound => Err(e),
        _ => Ok(true),
    }
}
