//! An entry of the cache: a file with the bytes of a server's file at their own positions, one flag
//! for each chunk of 64 KiB (1 if present), and a line of JSON that describes the file.
//!
//! Bytes are written before their flag, so a process may be killed at any time. A crash of the
//! machine may lose recent writes. Until a complete entry is synced, it is therefore valid only
//! until the next boot.

use std::fs::{self, File, Metadata, OpenOptions};
use std::io::ErrorKind::{PermissionDenied, ReadOnlyFilesystem};
use std::io::{self, IoSlice};
use std::ops::Range;
use std::os::unix::fs::{FileExt as _, MetadataExt as _, OpenOptionsExt as _};
use std::path::{Path, PathBuf};
use std::sync::OnceLock;
use std::sync::atomic::{AtomicBool, Ordering};
use std::thread;
use std::time::SystemTime;

use serde::{Deserialize, Serialize};
use sha2::{Digest as _, Sha256};

use super::cached_file::CachedFile;
use crate::io::{CachedHead, ReadAt};
use crate::mem::DISK_BLOCK;
use crate::sys::{self, RangeLockAttempt};

/// Bytes of a chunk, which is present as a whole or not.
const CHUNK: u64 = 64 << 10;
/// Parts of an entry begin at multiples of this.
const BLOCK: u64 = DISK_BLOCK as u64;
/// Bytes of the description.
const TRAILER_LEN: u64 = 4 * BLOCK;
/// The most flags that are read at once.
const MAX_FLAGS_READ: u64 = 4096;
/// Maximum size of a file; sums of such sizes do not overflow.
const MAX_LEN: u64 = 1 << 60;
const FORMAT: u32 = 1;

/// A version of a file: its address, `ETag` and size.
#[derive(Debug, Clone, Serialize, Deserialize)]
pub struct FileVersion {
    format: u32,
    /// The address without secrets, which identifies server and object.
    name: String,
    /// The address as messages show it.
    uri: String,
    tag: String,
    len: u64,
}

/// The description at the end of an entry.
#[derive(Serialize, Deserialize)]
struct EntryTrailer {
    #[serde(flatten)]
    version: FileVersion,
    boot: String,
    /// True if all of it is on the disk.
    synced: bool,
}

/// One file may have several display addresses, such as a signed URL and the same URL without its
/// signature. Two versions are equal even if these differ.
impl PartialEq for FileVersion {
    fn eq(&self, other: &FileVersion) -> bool {
        let FileVersion { format, name, uri: _, tag, len } = other;
        (self.format, &self.name, &self.tag, self.len) == (*format, name, tag, *len)
    }
}

impl FileVersion {
    /// The version of a source whose server tells versions apart: by a strong `ETag`, and a size.
    pub fn of(source: &dyn ReadAt, name: &str) -> Option<Self> {
        let head = source.response_head()?;
        let tag = head.strong_tag()?.to_owned();
        let CachedHead { uri, len, .. } = head;
        (0 < len && len < MAX_LEN).then(|| FileVersion {
            format: FORMAT,
            name: name.to_owned(),
            uri,
            tag,
            len,
        })
    }

    pub fn len(&self) -> u64 {
        self.len
    }

    /// A digest of the address, and one of the version.
    pub fn file_name(&self) -> String {
        format!("{}-{}", Self::prefix(&self.name), digest(&[&self.tag, &self.len.to_string()]))
    }

    /// The beginning of the file names of all versions of a file.
    pub fn prefix(name: &str) -> String {
        digest(&[name])
    }

    /// True if a path is that of another version of the same file.
    pub fn is_other_version(&self, path: &Path) -> bool {
        let own = self.file_name();
        let of_address = own.split('-').next().unwrap_or(&own);
        let name = path.file_name().and_then(|name| name.to_str()).unwrap_or("");
        name.starts_with(of_address) && !name.starts_with(&own)
    }

    fn chunks(&self) -> u64 {
        self.len.div_ceil(CHUNK)
    }

    /// Position of the flags.
    fn flags_at(&self) -> u64 {
        self.len.next_multiple_of(BLOCK)
    }

    fn trailer_at(&self) -> u64 {
        (self.flags_at() + self.chunks()).next_multiple_of(BLOCK)
    }
}

fn digest(parts: &[&str]) -> String {
    let mut sha = Sha256::new();
    for part in parts {
        sha.update(part.len().to_le_bytes());
        sha.update(part);
    }
    sha.finalize().iter().take(16).map(|byte| format!("{byte:02x}")).collect()
}

/// Identifies this boot of the machine.
fn boot() -> String {
    fs::read_to_string("/proc/sys/kernel/random/boot_id")
        .map_or(String::new(), |id| id.trim().to_owned())
}

/// The state of some bytes.
pub enum Presence {
    /// Present up to this position.
    Present(u64),
    /// Missing up to this position.
    Missing(u64),
}

/// An open entry, which is not removed meanwhile.
pub struct CacheEntry {
    file: File,
    path: PathBuf,
    version: FileVersion,
    complete: bool,
    /// The reason why the entry is neither read nor written any more: the disk is full or fails.
    disabled: OnceLock<String>,
    /// True once something was written.
    written: AtomicBool,
}

/// The lock of some chunks, which this process fetches.
pub struct ChunkLock<'e> {
    file: &'e File,
    chunks: Range<u64>,
}

impl Drop for ChunkLock<'_> {
    fn drop(&mut self) {
        sys::unlock_range(self.file, &self.chunks);
    }
}

impl CacheEntry {
    /// Creates an empty entry.
    pub fn create(path: &Path, version: &FileVersion) -> io::Result<()> {
        let mut options = OpenOptions::new();
        let file = options.read(true).write(true).create_new(true).mode(0o600).open(path)?;
        let trailer = EntryTrailer { version: version.clone(), boot: boot(), synced: false };
        let created = file
            .set_len(version.trailer_at() + TRAILER_LEN)
            .and_then(|()| write_trailer(&file, &trailer));
        if created.is_err() {
            let _ = fs::remove_file(path);
        }
        created
    }

    /// Opens the entry of a version; None if it is damaged, or about to be removed.
    pub fn open(path: &Path, version: &FileVersion) -> io::Result<Option<Self>> {
        let entry = Self::open_if(path, |found| found == version)?;
        entry.iter().for_each(Self::mark_used);
        Ok(entry)
    }

    /// Opens an entry of any version of a file, of which the first chunk is present. Does not count
    /// as a use.
    pub fn open_latest(path: &Path, name: &str) -> io::Result<Option<Self>> {
        let Some(entry) = Self::open_if(path, |found| found.name == name)? else { return Ok(None) };
        let first = 0..CHUNK.min(entry.file_len());
        Ok(matches!(entry.presence(&first)?, Presence::Present(_)).then_some(entry))
    }

    /// Counts this opening as a use: entries that were not used for long are removed first. A
    /// read-only file system keeps no times of use.
    pub fn mark_used(&self) {
        let _ = self.file.set_modified(SystemTime::now());
    }

    fn open_if(path: &Path, is_wanted: impl Fn(&FileVersion) -> bool) -> io::Result<Option<Self>> {
        let file = open_no_follow(path)?;
        if !sys::try_lock_shared(&file)? || file.metadata()?.nlink() == 0 {
            return Ok(None);
        }
        let Some(trailer) = read_trailer(&file)?.filter(|trailer| is_wanted(&trailer.version))
        else {
            return Ok(None);
        };
        let now = boot();
        if !trailer.synced && (now.is_empty() || trailer.boot != now) {
            return Ok(None);
        }
        let version = trailer.version;
        let complete = count_present(&file, &version)? == version.chunks();
        let (disabled, written) = (OnceLock::new(), AtomicBool::new(false));
        Ok(Some(CacheEntry { file, path: path.to_owned(), version, complete, disabled, written }))
    }

    /// Describes an entry without using it; None for another file.
    pub fn describe(path: &Path, metadata: &Metadata) -> Option<CachedFile> {
        let file = open_no_follow(path).ok()?;
        let EntryTrailer { version, .. } = read_trailer(&file).ok()??;
        let chunks = count_present(&file, &version).ok()?;
        Some(CachedFile {
            present: chunks.saturating_mul(CHUNK).min(version.len),
            complete: chunks == version.chunks(),
            len: version.len,
            uri: version.uri,
            used: metadata.modified().unwrap_or(SystemTime::UNIX_EPOCH),
            path: PathBuf::from(path),
        })
    }

    pub fn file(&self) -> &File {
        &self.file
    }

    pub fn path(&self) -> &Path {
        &self.path
    }

    /// Bytes of its file.
    pub fn file_len(&self) -> u64 {
        self.version.len
    }

    /// The `ETag` of its file.
    pub fn tag(&self) -> &str {
        &self.version.tag
    }

    pub fn version(&self) -> &FileVersion {
        &self.version
    }

    /// True if all of it was present when it was opened.
    pub fn is_complete(&self) -> bool {
        self.complete
    }

    /// The reason why it is neither read nor written; None while it is.
    pub fn disabled(&self) -> Option<&String> {
        self.disabled.get()
    }

    /// Neither reads nor writes it any more.
    pub fn disable(&self, why: impl std::fmt::Display) {
        self.disabled.get_or_init(|| why.to_string());
    }

    /// Returns the state of the first byte of a non-empty range, and the end of bytes like it.
    pub fn presence(&self, range: &Range<u64>) -> io::Result<Presence> {
        let chunks = self.chunks_of(range);
        let flags = self.flags(chunks.start..chunks.end.min(chunks.start + MAX_FLAGS_READ))?;
        let first = flags.first().copied().unwrap_or(0);
        let same = flags.iter().take_while(|flag| (**flag == 1) == (first == 1)).count() as u64;
        let until = ((chunks.start + same) * CHUNK).min(range.end);
        Ok(if first == 1 { Presence::Present(until) } else { Presence::Missing(until) })
    }

    /// The range of the chunks that hold some bytes.
    pub fn expand_to_chunks(&self, range: &Range<u64>) -> Range<u64> {
        let chunks = self.chunks_of(range);
        chunks.start * CHUNK..(chunks.end * CHUNK).min(self.version.len)
    }

    /// The number of the first `count` bytes from a position on that are whole chunks.
    pub fn complete_prefix(&self, start: u64, count: usize) -> usize {
        let end = start + count as u64;
        let rest = if end == self.version.len { 0 } else { end % CHUNK };
        usize::try_from((count as u64).saturating_sub(rest)).unwrap_or(0)
    }

    /// Chunks of which some bytes are in a range.
    fn chunks_of(&self, range: &Range<u64>) -> Range<u64> {
        range.start / CHUNK..range.end.div_ceil(CHUNK)
    }

    fn flags(&self, chunks: Range<u64>) -> io::Result<Vec<u8>> {
        let len = usize::try_from(chunks.end - chunks.start).map_err(io::Error::other)?;
        let mut flags = vec![0; len];
        self.file.read_exact_at(&mut flags, self.version.flags_at() + chunks.start)?;
        Ok(flags)
    }

    /// Locks the chunks of a range, from the first on and as far as they are free; None while
    /// another process has the first.
    pub fn lock_chunks(&self, range: &Range<u64>) -> io::Result<Option<(ChunkLock<'_>, u64)>> {
        let mut chunks = self.chunks_of(range);
        loop {
            match sys::try_lock_range(&self.file, &chunks)? {
                RangeLockAttempt::Acquired => {
                    let until = (chunks.end * CHUNK).min(range.end);
                    return Ok(Some((ChunkLock { file: &self.file, chunks }, until)));
                }
                RangeLockAttempt::HeldElsewhere(from) if from > chunks.start => chunks.end = from,
                RangeLockAttempt::HeldElsewhere(_) => return Ok(None),
            }
        }
    }

    /// Writes bytes that have arrived.
    pub fn write(&self, offset: u64, pieces: &[IoSlice<'_>]) -> io::Result<()> {
        self.written.store(true, Ordering::Relaxed);
        let mut pieces = pieces.to_vec();
        let mut unwritten: &mut [IoSlice<'_>] = &mut pieces;
        let mut at = offset;
        while !unwritten.is_empty() {
            match sys::write_vectored_at(&self.file, at, unwritten) {
                Err(e) if e.kind() == io::ErrorKind::Interrupted => {}
                Err(e) => return Err(e),
                Ok(0) => return Err(io::Error::from(io::ErrorKind::WriteZero)),
                Ok(written) => {
                    IoSlice::advance_slices(&mut unwritten, written);
                    at += written as u64;
                }
            }
        }
        self.set_flags(offset..at)
    }

    /// Sets the flags of the whole chunks in a range.
    fn set_flags(&self, range: Range<u64>) -> io::Result<()> {
        let end =
            if range.end == self.version.len { self.version.chunks() } else { range.end / CHUNK };
        let chunks = range.start.div_ceil(CHUNK)..end;
        if chunks.is_empty() {
            return Ok(());
        }
        let count = usize::try_from(chunks.end - chunks.start).map_err(io::Error::other)?;
        self.file.write_all_at(&vec![1; count], self.version.flags_at() + chunks.start)
    }
}

/// Syncs what was written. A complete entry is then valid after later boots. An entry that could
/// not be synced is not used again, because later readers would not notice the failure.
impl Drop for CacheEntry {
    fn drop(&mut self) {
        if !self.written.load(Ordering::Relaxed) {
            return;
        }
        let (Ok(file), version) = (self.file.try_clone(), self.version.clone()) else { return };
        // On another thread, because a sync may take long.
        let sync = move || {
            let trailer = |boot, synced| EntryTrailer { version: version.clone(), boot, synced };
            // Counted before: another process may write more while this one syncs.
            let synced = count_present(&file, &version).and_then(|present| {
                file.sync_data()?;
                if present == version.chunks() {
                    // A sync does not count as a use of the entry.
                    let used = file.metadata()?.modified()?;
                    write_trailer(&file, &trailer(boot(), true))?;
                    file.set_modified(used)?;
                    file.sync_data()?;
                }
                Ok(())
            });
            if synced.is_err() {
                // Invalid in every boot.
                let _ = write_trailer(&file, &trailer(String::new(), false));
            }
        };
        let _ = thread::Builder::new().name("tensorizer-cache".to_owned()).spawn(sync);
    }
}

/// Opens a file of the folder; follows no link, and does not wait for a pipe. A file that cannot be
/// written is opened for reading.
pub fn open_no_follow(path: &Path) -> io::Result<File> {
    let flags = libc::O_NOFOLLOW | libc::O_NONBLOCK;
    let mut options = OpenOptions::new();
    let opened = options.read(true).write(true).custom_flags(flags).open(path);
    match opened {
        Err(e) if matches!(e.kind(), PermissionDenied | ReadOnlyFilesystem) => {
            options.write(false).open(path)
        }
        opened => opened,
    }
}

fn write_trailer(file: &File, trailer: &EntryTrailer) -> io::Result<()> {
    let mut line = serde_json::to_vec(trailer).map_err(io::Error::other)?;
    let room = usize::try_from(TRAILER_LEN).map_err(io::Error::other)?;
    if line.len() >= room {
        return Err(io::Error::other("the address or ETag is too long for a cache entry"));
    }
    line.resize(room, b' ');
    file.write_all_at(&line, trailer.version.trailer_at())
}

/// Reads the description of an entry; None for another file.
fn read_trailer(file: &File) -> io::Result<Option<EntryTrailer>> {
    let size = file.metadata()?.len();
    let Some(at) = size.checked_sub(TRAILER_LEN) else { return Ok(None) };
    let mut line = vec![0; usize::try_from(TRAILER_LEN).map_err(io::Error::other)?];
    file.read_exact_at(&mut line, at)?;
    let Ok(trailer) = serde_json::from_slice::<EntryTrailer>(&line) else { return Ok(None) };
    let is_valid = trailer.version.format == FORMAT
        && trailer.version.len < MAX_LEN
        && trailer.version.trailer_at() == at;
    Ok(is_valid.then_some(trailer))
}

/// The number of chunks that are present.
fn count_present(file: &File, version: &FileVersion) -> io::Result<u64> {
    const STEP: u64 = 1 << 20;
    let (mut at, end) = (version.flags_at(), version.flags_at() + version.chunks());
    let mut found = 0;
    while at < end {
        let len = STEP.min(end - at);
        let mut flags = vec![0; usize::try_from(len).map_err(io::Error::other)?];
        file.read_exact_at(&mut flags, at)?;
        found += flags.iter().filter(|flag| **flag == 1).count() as u64;
        at += len;
    }
    Ok(found)
}
