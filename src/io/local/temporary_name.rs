//! Hidden names of unpublished files, in the same folder as their targets.
//!
//! A killed process leaves such a file. A process that writes to one holds the file's lock until
//! the last process that has it open ends, which may be a forked child. Until then, the file is not
//! removed.

use std::ffi::OsStr;
use std::fs::{self, File, OpenOptions};
use std::io;
use std::os::unix::fs::{MetadataExt as _, OpenOptionsExt as _};
use std::path::{Path, PathBuf};
use std::time::{Duration, SystemTime};

use super::file::{open_no_follow, remove_if_at};
use crate::sys;

/// The suffix of locked files, which are stale once the lock is free.
const LOCKED_SUFFIX: &str = ".tmp";
/// The suffix of files on mounts without locks. Only their own writer removes these.
const UNLOCKED_SUFFIX: &str = ".unlocked";
/// Maximum number of names that are tried.
const MAX_ATTEMPTS: u32 = 100;
/// Some mounts grant locks without asking the other machines, so a free lock there does not prove
/// that the writer has ended. A writer counts as alive if it has written within this time.
const STALE_AFTER: Duration = Duration::from_secs(24 * 60 * 60);

/// The hidden names that belong to a target.
pub(super) struct TemporaryNames {
    folder: PathBuf,
    /// Their common beginning.
    prefix: String,
    mount_id: Option<u32>,
}

impl TemporaryNames {
    /// The hidden names for a name in a folder.
    pub(super) fn of(folder: &Path, name: &OsStr) -> Self {
        let mut name = name.to_string_lossy().into_owned();
        // Leave room for the rest of the name within the usual limit of 255 bytes.
        while name.len() > 200 {
            name.pop();
        }
        let mount_id = mount_id(folder);
        TemporaryNames {
            folder: folder.to_owned(),
            prefix: format!(".{name}.tensorizer-"),
            mount_id,
        }
    }

    /// Creates a file with an unused name.
    pub(super) fn create(&self, mode: u32) -> io::Result<(File, PathBuf)> {
        let mut ending = LOCKED_SUFFIX;
        for attempt in 0..MAX_ATTEMPTS {
            let path = self.name(attempt, ending);
            let mut options = OpenOptions::new();
            let file = match options.read(true).write(true).create_new(true).mode(mode).open(&path)
            {
                Err(e) if e.kind() == io::ErrorKind::AlreadyExists => continue,
                other => other?,
            };
            if ending == UNLOCKED_SUFFIX {
                return Ok((file, path));
            }
            match sys::try_flock(&file) {
                // Before the lock was taken, another writer may have removed the file as stale.
                Ok(true) => match fs::symlink_metadata(&path) {
                    Ok(_) => return Ok((file, path)),
                    Err(e) if e.kind() == io::ErrorKind::NotFound => {}
                    Err(e) => {
                        let _ = fs::remove_file(&path);
                        return Err(e);
                    }
                },
                Ok(false) => {}
                Err(_) => {
                    fs::remove_file(&path)?;
                    ending = UNLOCKED_SUFFIX;
                }
            }
        }
        Err(io::Error::from(io::ErrorKind::AlreadyExists))
    }

    /// Gives a name to a file that has none.
    pub(super) fn link(&self, file: &File) -> io::Result<PathBuf> {
        let ending =
            if matches!(sys::try_flock(file), Ok(true)) { LOCKED_SUFFIX } else { UNLOCKED_SUFFIX };
        for attempt in 0..MAX_ATTEMPTS {
            let path = self.name(attempt, ending);
            match sys::link(file, &path) {
                Err(e) if e.kind() == io::ErrorKind::AlreadyExists => {}
                other => return other.map(|()| path),
            }
        }
        Err(io::Error::from(io::ErrorKind::AlreadyExists))
    }

    /// Removes files that killed writers of the same target have left, if it is certain that these
    /// have ended.
    pub(super) fn remove_stale(&self) {
        // A folder that cannot be listed keeps what is in it.
        for entry in fs::read_dir(&self.folder).into_iter().flatten().flatten() {
            let name = entry.file_name();
            if let Some(mount_id) = name.to_str().and_then(|name| self.mount_id_of(name)) {
                // A file that cannot be removed is left to the next writer.
                let _ = remove_if_stale(&entry.path(), self.mount_id == Some(mount_id));
            }
        }
    }

    fn name(&self, attempt: u32, ending: &str) -> PathBuf {
        let clock = SystemTime::now().duration_since(SystemTime::UNIX_EPOCH);
        let unique = clock.map_or(0, |t| t.subsec_nanos()).wrapping_add(attempt);
        let mount_id = self.mount_id.unwrap_or(0);
        self.folder.join(format!("{}{mount_id:08x}-{unique:08x}{ending}", self.prefix))
    }

    /// The mount id in a hidden name; None for other names, and for names of unlocked files.
    fn mount_id_of(&self, name: &str) -> Option<u32> {
        let numbers = name.strip_prefix(&self.prefix)?.strip_suffix(LOCKED_SUFFIX)?;
        let (mount_id, unique) = numbers.split_once('-')?;
        let is_number = |text: &str| text.len() == 8 && !text.starts_with('+');
        let number = |text| u32::from_str_radix(text, 16).ok().filter(|_| is_number(text));
        number(mount_id).filter(|_| number(unique).is_some())
    }
}

/// Identifies a mount of this running system, on which all writers see each other's locks; None if
/// that is not certain.
fn mount_id(folder: &Path) -> Option<u32> {
    let boot = fs::read("/proc/sys/kernel/random/boot_id").ok()?;
    let mount = fs::metadata(folder).ok()?.dev();
    let mut hasher = crc32fast::Hasher::new();
    hasher.update(&boot);
    hasher.update(&mount.to_le_bytes());
    Some(hasher.finalize()).filter(|mount_id| *mount_id != 0)
}

/// Removes a file that no process writes. `is_same_mount`: it was made on this mount of this
/// system.
fn remove_if_stale(path: &Path, is_same_mount: bool) -> io::Result<()> {
    // Writable, because some servers grant no lock otherwise.
    let file = open_no_follow(path)?;
    let opened = file.metadata()?;
    let idle_time = || opened.modified().ok().and_then(|at| at.elapsed().ok());
    if !opened.is_file() || !(is_same_mount || idle_time().is_some_and(|time| time > STALE_AFTER)) {
        return Ok(());
    }
    if sys::try_flock(&file)? {
        // No writer holds the lock, but the writer may have published the file just before.
        remove_if_at(&file, path)?;
    }
    Ok(())
}
