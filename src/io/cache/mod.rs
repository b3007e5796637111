//! A folder with what servers have sent, so that the next load of the same file finds it here.
//!
//! Files are known by their address, and by what says that they are the same byte for byte: their
//! `ETag` and size, for which each opening asks the server. `entry.rs` says what is in the folder.

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
use crate::io::source::ReadAt;
use crate::sys;
pub use entry::Cached;
use entry::{Entry, Identity};
use source::Origin;

/// What the names of its files end with.
const ENDING: &str = ".cached";
/// What those of files begin with that are being made.
const NEW: &str = ".new-";
/// After so long nobody makes them any more.
const STALE: Duration = Duration::from_secs(60 * 60);
/// Part of the disk that stays free unless a size is named: one in so many.
const FREE: u64 = 20;
/// How often an opening tries again because somebody removes what it has found.
const TRIES: usize = 8;
/// How long it waits in between.
const PAUSE: Duration = Duration::from_millis(10);
/// How often it looks whether it is its turn to make an entry.
const TURNS: usize = 200;
/// Tells files apart that this process makes.
static NUMBER: AtomicU64 = AtomicU64::new(0);

/// A folder, and how much it may hold.
#[derive(Debug, Clone)]
pub struct Cache {
    folder: Arc<PathBuf>,
    /// In bytes; None for all but a part of the disk.
    most: Option<u64>,
}

impl Cache {
    /// The one that the environment names, if it does.
    pub fn from_environment() -> Result<Option<Self>> {
        CACHE.path().map(Self::at).transpose()
    }

    /// One in a folder, which is made when it is first used. How much it may hold is what the
    /// environment says.
    pub fn at(folder: PathBuf) -> Result<Self> {
        let most = Some(CACHE_GB.value()?).filter(|most| *most > 0);
        let most = most.map(|gigabytes| gigabytes.saturating_mul(1_000_000_000));
        Ok(Cache { folder: Arc::new(folder), most })
    }

    /// Puts the cache before a source of a server, if the server says enough of its file.
    pub fn before(
        &self,
        source: Arc<dyn ReadAt>,
        name: &str,
        patience: Duration,
        cancel: &dyn Cancel,
    ) -> Result<Arc<dyn ReadAt>> {
        let Some(identity) = Identity::of(&*source, name) else { return Ok(source) };
        match self.check() {
            Ok(()) => {}
            Err(e) if e.kind() == ErrorKind::PermissionDenied => return Err(self.failed(e)),
            // What is wrong with a disk, an entry or a full disk is no reason not to load.
            Err(_) => return Ok(source),
        }
        let opened = self.open(&identity, cancel);
        cancel.check()?;
        let Ok(Some(entry)) = opened else { return Ok(source) };
        let (cache, name) = (self.clone(), name.to_owned());
        let fill = move |server: &Arc<dyn ReadAt>, cancel: &dyn Cancel| {
            let made = cache.before(Arc::clone(server), &name, patience, cancel);
            made.unwrap_or_else(|_| Arc::clone(server))
        };
        Ok(source::before(Origin { server: source, patience, fill: Box::new(fill) }, entry))
    }

    fn failed(&self, error: io::Error) -> Error {
        Error::io("using the cache in", &self.folder.display().to_string(), error)
    }

    /// Makes the folder, or refuses one in which others could put what we would take for ours.
    fn check(&self) -> io::Result<()> {
        DirBuilder::new().recursive(true).mode(0o700).create(&*self.folder)?;
        let found = fs::metadata(&*self.folder)?;
        let us = sys::user();
        if found.uid() != us || found.mode() & 0o077 != 0 {
            let what = format!(
                "expected a folder of user {us} that nobody else may use (chmod 700), found one of \
                 user {} with mode {:o}",
                found.uid(),
                found.mode() & 0o7777
            );
            return Err(io::Error::new(ErrorKind::PermissionDenied, what));
        }
        Ok(())
    }

    /// The entry of a file, which is made if there is none; None where there is no room for it.
    fn open(&self, identity: &Identity, cancel: &dyn Cancel) -> io::Result<Option<Entry>> {
        let path = self.folder.join(format!("{}{ENDING}", identity.file_name()));
        for _ in 0..TRIES {
            match Entry::open(&path, identity) {
                Ok(Some(entry)) => return Ok(Some(entry)),
                // Damaged, of a boot that has ended, or about to be removed.
                Ok(None) => drop(remove(&path)?),
                Err(e) if e.kind() == ErrorKind::NotFound => {
                    if !self.make(identity, &path, cancel)? {
                        return Ok(None);
                    }
                    continue;
                }
                Err(e) => return Err(e),
            }
            pause(cancel)?;
        }
        Ok(None)
    }

    /// Makes an entry, unless somebody has just made it; false where there is no room for it.
    fn make(&self, identity: &Identity, path: &Path, cancel: &dyn Cancel) -> io::Result<bool> {
        let folder = File::open(&*self.folder)?;
        // One at a time, or each would see the same room. Who takes long for it is not waited for.
        for _ in 0..TURNS {
            if sys::try_lock(&folder)? {
                break;
            }
            pause(cancel)?;
        }
        if !self.make_room(identity, &folder)? {
            return Ok(false);
        }
        let now = SystemTime::now().duration_since(SystemTime::UNIX_EPOCH);
        let nanos = now.map_or(0, |now| now.as_nanos());
        let number = NUMBER.fetch_add(1, Ordering::Relaxed);
        let new =
            self.folder.join(format!("{NEW}{nanos:x}-{}-{number}{ENDING}", std::process::id()));
        Entry::create(&new, identity)?;
        match sys::rename_to_free_name(&new, path) {
            Ok(()) => Ok(true),
            Err(e) => {
                let _ = fs::remove_file(&new);
                if e.kind() == ErrorKind::AlreadyExists { Ok(true) } else { Err(e) }
            }
        }
    }

    /// Removes what was used least recently until a file fits; nothing, and false, if it cannot fit.
    fn make_room(&self, identity: &Identity, folder: &File) -> io::Result<bool> {
        let mut entries = self.list()?;
        // Another version of the file is of no use any more.
        let is_older = |cached: &Cached| identity.is_older(&cached.path);
        entries.retain(|cached| !(is_older(cached) && remove(&cached.path).is_ok_and(|gone| gone)));
        entries.sort_by_key(|cached| cached.used);
        let (all, free) = sys::space(folder)?;
        let sum = |of: fn(&Cached) -> u64| entries.iter().map(of).fold(0, u64::saturating_add);
        let (held, promised) = (sum(|cached| cached.here), sum(Cached::promised));
        let needed = promised.saturating_add(identity.len());
        // How much is too much.
        let mut over = match self.most {
            Some(most) => held.saturating_add(needed).saturating_sub(most),
            None => needed.saturating_add(all / FREE).saturating_sub(free),
        };
        if over > held.saturating_add(promised) {
            return Ok(false);
        }
        for cached in &entries {
            if over == 0 {
                break;
            }
            if remove(&cached.path)? {
                over = over.saturating_sub(cached.here.saturating_add(cached.promised()));
            }
        }
        Ok(over == 0)
    }

    fn list(&self) -> io::Result<Vec<Cached>> {
        let mut found = Vec::new();
        for file in fs::read_dir(&*self.folder)? {
            let path = file?.path();
            let Some(name) = path.file_name().and_then(|name| name.to_str()) else { continue };
            let Ok(about) = fs::symlink_metadata(&path) else { continue };
            if !name.ends_with(ENDING) || !about.is_file() {
                continue;
            }
            if !name.starts_with(NEW) {
                found.extend(Entry::about(&path, &about));
            } else if is_stale(&about) {
                let _ = fs::remove_file(&path);
            }
        }
        Ok(found)
    }

    /// What is in it, the least recently used first; nothing if there is no such folder.
    pub fn entries(&self) -> Result<Vec<Cached>> {
        match self.list() {
            Ok(mut found) => {
                found.sort_by_key(|cached| cached.used);
                Ok(found)
            }
            Err(e) if e.kind() == ErrorKind::NotFound => Ok(Vec::new()),
            Err(e) => Err(self.failed(e)),
        }
    }

    /// Removes all that nobody is using; gives what it has removed.
    pub fn clear(&self) -> Result<Vec<Cached>> {
        let mut removed = self.entries()?;
        let mut failed = None;
        removed.retain(|cached| match remove(&cached.path) {
            Ok(gone) => gone,
            Err(e) => {
                failed = Some(e);
                false
            }
        });
        failed.map_or(Ok(removed), |e| Err(self.failed(e)))
    }
}

/// Waits a little; whoever ends the call asks once more why.
fn pause(cancel: &dyn Cancel) -> io::Result<()> {
    cancel::sleep(PAUSE, cancel).map_err(|_| io::Error::from(ErrorKind::Interrupted))
}

fn is_stale(about: &Metadata) -> bool {
    let age = about.modified().map(|then| SystemTime::now().duration_since(then));
    age.is_ok_and(|age| age.is_ok_and(|age| age > STALE))
}

/// Removes an entry unless somebody is using it; says whether it is gone.
fn remove(path: &Path) -> io::Result<bool> {
    let file = match entry::open_alone(path) {
        Ok(file) => file,
        Err(e) if e.kind() == ErrorKind::NotFound => return Ok(true),
        Err(e) => return Err(e),
    };
    if !sys::take(&file)? {
        return Ok(false);
    }
    let id = |about: &Metadata| (about.dev(), about.ino());
    let own = file.metadata()?;
    if fs::symlink_metadata(path).is_ok_and(|there| id(&there) != id(&own)) {
        // Somebody has removed it before, and another is there now.
        return Ok(true);
    }
    match fs::remove_file(path) {
        Err(e) if e.kind() != ErrorKind::NotFound => Err(e),
        _ => Ok(true),
    }
}
