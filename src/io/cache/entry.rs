//! An entry of the cache: a file with the bytes of a server's file at their own positions, then a
//! block with a line of JSON that describes it, and a record of what has arrived.
//!
//! Bytes are recorded after they were written, so a process may be killed at any time. A crash of
//! the machine may lose recent writes, so an entry is valid only until the next boot, unless it is
//! complete and was synced.

use std::fs::{self, File, Metadata, OpenOptions};
use std::io::{self, ErrorKind::NotFound, IoSlice};
use std::os::unix::fs::{FileExt as _, MetadataExt as _, OpenOptionsExt as _};
use std::path::{Path, PathBuf};
use std::thread;
use std::time::SystemTime;

use serde::{Deserialize, Serialize};
use sha2::{Digest as _, Sha256};

use crate::cancel::{Never, retry_interrupted};
use crate::io::ReadAt;
use crate::io::local::{open_no_follow, remove_if_at};
use crate::mem::DISK_BLOCK;
use crate::sys;

/// The ending of file names of entries.
pub const ENDING: &str = "cached";
/// The description begins at a multiple of this.
const BLOCK: u64 = DISK_BLOCK as u64;
/// Bytes of the description and the record.
const TRAILER_LEN: u64 = 4 * BLOCK;
/// Bytes of the record: the number of bytes that have arrived, its complement, and 1 if they were
/// synced. A reader that meets a write half done sees that the numbers do not match.
const RECORD_LEN: usize = 24;
/// Bytes of the description.
const DESCRIPTION_LEN: usize = 4 * DISK_BLOCK - RECORD_LEN;
/// Maximum size of a file; sums of such sizes do not overflow.
const MAX_LEN: u64 = 1 << 60;
const FORMAT: u32 = 2;

/// A file as `tensorizer cache ls` shows it.
#[derive(Debug, Clone)]
pub struct CachedFile {
    /// The address, without secrets.
    pub uri: String,
    /// Bytes of the file.
    pub len: u64,
    /// Bytes that are present.
    pub present: u64,
    /// Time of its last use.
    pub used: SystemTime,
    pub(super) path: PathBuf,
}

/// A version of a file.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
pub struct FileVersion {
    format: u32,
    /// The address without secrets, which identifies server and object.
    pub name: String,
    pub tag: String,
    pub len: u64,
}

/// The description at the end of an entry.
#[derive(Serialize, Deserialize)]
struct Description {
    #[serde(flatten)]
    version: FileVersion,
    /// The address as messages show it. One file may have several, such as a signed URL and the
    /// same URL without its signature.
    uri: String,
    /// The boot in which it was created.
    boot: String,
}

impl FileVersion {
    /// The version of a source whose server tells versions apart: by a strong `ETag`, and a size.
    pub fn of(source: &dyn ReadAt, name: &str) -> Option<Self> {
        let head = source.facts().head()?;
        let (tag, name, len) = (head.strong_tag()?.to_owned(), name.to_owned(), head.len);
        (0 < len && len < MAX_LEN).then_some(FileVersion { format: FORMAT, name, tag, len })
    }

    fn trailer_at(&self) -> u64 {
        self.len.next_multiple_of(BLOCK)
    }

    fn record_at(&self) -> u64 {
        self.trailer_at() + DESCRIPTION_LEN as u64
    }
}

/// The file name of the entry of an address.
pub fn file_name(name: &str) -> String {
    let digest = Sha256::digest(name);
    let hex: String = digest.iter().take(16).map(|byte| format!("{byte:02x}")).collect();
    format!("{hex}.{ENDING}")
}

/// Identifies this boot of the machine.
fn boot() -> String {
    fs::read_to_string("/proc/sys/kernel/random/boot_id")
        .map_or(String::new(), |id| id.trim().to_owned())
}

/// An open entry, which is not removed meanwhile.
pub struct CacheEntry {
    pub file: File,
    path: PathBuf,
    pub version: FileVersion,
}

impl CacheEntry {
    /// Creates an empty entry, which is locked until it has a description. Another process may
    /// remove it before that.
    pub fn create(path: &Path, version: &FileVersion, uri: &str) -> io::Result<()> {
        let mut options = OpenOptions::new();
        let file = options.read(true).write(true).create_new(true).mode(0o600).open(path)?;
        if !sys::try_lock_shared(&file)? {
            return Ok(());
        }
        let created = file
            .set_len(version.trailer_at() + TRAILER_LEN)
            .and_then(|()| write_description(&file, version, uri))
            .and_then(|()| write_record(&file, version, 0, false));
        if created.is_err() {
            let _ = fs::remove_file(path);
        }
        created
    }

    /// Opens an entry; None if it is damaged, of an earlier boot, or about to be removed. Does not
    /// count as a use.
    pub fn open(path: &Path) -> io::Result<Option<Self>> {
        let file = open_no_follow(path)?;
        if !sys::try_lock_shared(&file)? || file.metadata()?.nlink() == 0 {
            return Ok(None);
        }
        let Some(Description { version, boot: created, .. }) = read_description(&file)? else {
            return Ok(None);
        };
        let (now, (arrived, synced)) = (boot(), read_record(&file, &version)?);
        if !synced && (now.is_empty() || created != now) {
            return Ok(None);
        }
        let entry = CacheEntry { file, path: path.to_owned(), version };
        if !synced && arrived == entry.version.len {
            // The process that fetched its last bytes was ended before it could do this.
            entry.sync();
        }
        Ok(Some(entry))
    }

    /// Counts this opening as a use: entries that were not used for long are removed first. A
    /// read-only file system keeps no times of use.
    pub fn mark_used(&self) {
        let _ = self.file.set_modified(SystemTime::now());
    }

    /// Describes an entry without using it; None for another file.
    pub fn describe(path: &Path) -> Option<CachedFile> {
        let file = open_no_follow(path).ok()?;
        let about = file.metadata().ok().filter(Metadata::is_file)?;
        let Description { version, uri, .. } = read_description(&file).ok()??;
        Some(CachedFile {
            present: read_record(&file, &version).ok()?.0,
            len: version.len,
            uri,
            used: about.modified().unwrap_or(SystemTime::UNIX_EPOCH),
            path: PathBuf::from(path),
        })
    }

    /// True if all of it has arrived.
    pub fn is_complete(&self) -> bool {
        self.arrived() == self.version.len
    }

    /// The number of bytes that have arrived, from the first on. Another process may be fetching
    /// them.
    pub fn arrived(&self) -> u64 {
        read_record(&self.file, &self.version).map_or(0, |(arrived, _)| arrived)
    }

    /// Writes bytes that have arrived.
    pub fn write(&self, mut at: u64, mut pieces: Vec<IoSlice<'_>>) -> io::Result<()> {
        let mut unwritten: &mut [IoSlice<'_>] = &mut pieces;
        while !unwritten.is_empty() {
            let write = || sys::write_vectored_at(&self.file, at, unwritten);
            let written = retry_interrupted(&Never, write)?;
            if written == 0 {
                return Err(io::Error::from(io::ErrorKind::WriteZero));
            }
            IoSlice::advance_slices(&mut unwritten, written);
            at += written as u64;
        }
        Ok(())
    }

    /// Records the number of bytes that have arrived. After the last ones, the entry is synced.
    pub fn set_arrived(&self, arrived: u64) -> io::Result<()> {
        write_record(&self.file, &self.version, arrived, false)?;
        if arrived == self.version.len {
            self.sync();
        }
        Ok(())
    }

    /// Syncs a complete entry on another thread, because a sync may take long. One that could not
    /// be synced is removed, because later readers would not notice the failure.
    fn sync(&self) {
        let Ok(file) = self.file.try_clone() else { return };
        let (path, version) = (self.path.clone(), self.version.clone());
        let sync = move || match file.sync_data() {
            Err(_) => drop(remove_if_at(&file, &path)),
            // Without the record, which a file that is open for reading cannot get, the entry is
            // not used after the next start of the machine.
            Ok(()) => {
                let used = file.metadata().and_then(|found| found.modified());
                let _ = write_record(&file, &version, version.len, true);
                // This was no use.
                let _ = used.and_then(|used| file.set_modified(used));
            }
        };
        // Without a thread, it stays unsynced too.
        drop(thread::Builder::new().name("tensorizer-cache".to_owned()).spawn(sync));
    }

    /// Removes it, unless there is another one of its name. Its readers go on with the removed file.
    pub fn remove(&self) {
        // If this fails, the next opening finds it again.
        let _ = remove_if_at(&self.file, &self.path);
    }
}

/// Removes an entry unless it is in use; true if it is gone.
pub fn remove(path: &Path) -> io::Result<bool> {
    let file = match open_no_follow(path) {
        Ok(file) => file,
        Err(e) if e.kind() == NotFound => return Ok(true),
        Err(e) => return Err(e),
    };
    if !sys::try_lock_exclusive(&file)? {
        return Ok(false);
    }
    // Another process may have removed it, and there may be a new one.
    remove_if_at(&file, path)?;
    Ok(true)
}

fn write_description(file: &File, version: &FileVersion, uri: &str) -> io::Result<()> {
    let (version, uri) = (version.clone(), uri.to_owned());
    let description = Description { version, uri, boot: boot() };
    let mut line = serde_json::to_vec(&description).map_err(io::Error::other)?;
    if line.len() >= DESCRIPTION_LEN {
        return Err(io::Error::other("the address or ETag is too long for a cache entry"));
    }
    line.resize(DESCRIPTION_LEN, b' ');
    file.write_all_at(&line, description.version.trailer_at())
}

/// Reads the description of an entry; None for another file.
fn read_description(file: &File) -> io::Result<Option<Description>> {
    let size = file.metadata()?.len();
    let Some(at) = size.checked_sub(TRAILER_LEN) else { return Ok(None) };
    let mut line = vec![0; DESCRIPTION_LEN];
    file.read_exact_at(&mut line, at)?;
    let found = serde_json::from_slice::<Description>(&line).ok();
    Ok(found.filter(|Description { version, .. }| {
        version.format == FORMAT && version.len < MAX_LEN && version.trailer_at() == at
    }))
}

fn write_record(file: &File, version: &FileVersion, arrived: u64, synced: bool) -> io::Result<()> {
    let numbers = [arrived, !arrived, u64::from(synced)].map(u64::to_le_bytes);
    file.write_all_at(numbers.as_flattened(), version.record_at())
}

/// Reads the number of bytes that have arrived, 0 if it is being written; and true if they were
/// synced.
fn read_record(file: &File, version: &FileVersion) -> io::Result<(u64, bool)> {
    let mut numbers = [[0; 8]; RECORD_LEN / 8];
    file.read_exact_at(numbers.as_flattened_mut(), version.record_at())?;
    let [arrived, complement, synced] = numbers.map(u64::from_le_bytes);
    let arrived = if arrived == !complement { arrived.min(version.len) } else { 0 };
    Ok((arrived, synced == 1 && arrived == version.len))
}
