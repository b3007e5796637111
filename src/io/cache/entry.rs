//! A file of the cache: the bytes of a server's file at their own positions, behind them a byte for
//! each 64 KiB that says whether these are here, and a line that says what it all is.
//!
//! Bytes are written before the byte that tells of them, so that a process may be killed at any time.
//! A machine may lose what was written last: before its file was synced as a whole, an entry counts
//! for the boot only in which it was made.

use std::fs::{self, File, Metadata, OpenOptions};
use std::io::{self, IoSlice};
use std::ops::Range;
use std::os::unix::fs::{FileExt as _, MetadataExt as _, OpenOptionsExt as _};
use std::path::{Path, PathBuf};
use std::sync::atomic::{AtomicBool, Ordering};
use std::thread;
use std::time::SystemTime;

use serde::{Deserialize, Serialize};
use sha2::{Digest as _, Sha256};

use crate::io::source::{KnownHead, ReadAt};
use crate::sys::{self, Claimed};

/// Bytes that are here together or not.
const CHUNK: u64 = 64 << 10;
const PAGE: u64 = 4096;
/// Bytes of the line at its end.
const ABOUT: u64 = 4 * PAGE;
/// Chunks that are looked at together.
const LOOK: u64 = 4096;
/// No file is that large; nothing overflows below it.
const LARGEST: u64 = 1 << 60;
const FORMAT: u32 = 1;

/// What a file is known by.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
pub struct Identity {
    format: u32,
    /// Its address without secrets, which tells servers and objects apart.
    name: String,
    /// How messages call it.
    uri: String,
    tag: String,
    len: u64,
}

/// The line at the end of an entry.
#[derive(Serialize, Deserialize)]
struct About {
    #[serde(flatten)]
    identity: Identity,
    boot: String,
    /// Whether all of it is on the disk.
    synced: bool,
}

impl Identity {
    /// Of a source whose server says which bytes it has: by a strong `ETag`, and their number.
    pub fn of(source: &dyn ReadAt, name: &str) -> Option<Self> {
        let KnownHead { uri, len, tag, .. } = source.known_head()?;
        let tag = tag.filter(|tag| !tag.starts_with("W/") && !tag.trim_matches('"').is_empty())?;
        (0 < len && len < LARGEST).then(|| Identity {
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

    /// One name for an address, and one for its content.
    pub fn file_name(&self) -> String {
        format!("{}-{}", digest(&[&self.name]), digest(&[&self.tag, &self.len.to_string()]))
    }

    /// Whether a path is that of another content of the same address.
    pub fn is_older(&self, path: &Path) -> bool {
        let own = self.file_name();
        let of_address = own.split('-').next().unwrap_or(&own);
        let name = path.file_name().and_then(|name| name.to_str()).unwrap_or("");
        name.starts_with(of_address) && !name.starts_with(&own)
    }

    fn chunks(&self) -> u64 {
        self.len.div_ceil(CHUNK)
    }

    /// Where the bytes begin that tell of chunks.
    fn flags_at(&self) -> u64 {
        self.len.next_multiple_of(PAGE)
    }

    fn about_at(&self) -> u64 {
        (self.flags_at() + self.chunks()).next_multiple_of(PAGE)
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

/// What says whether the machine was started again since.
fn boot() -> String {
    fs::read_to_string("/proc/sys/kernel/random/boot_id")
        .map_or(String::new(), |id| id.trim().to_owned())
}

/// What is in the cache of some bytes.
pub enum Found {
    /// All of them up to here.
    Here(u64),
    /// None of them up to here.
    Missing(u64),
}

/// An open entry, which nobody removes meanwhile.
pub struct Entry {
    file: File,
    path: PathBuf,
    identity: Identity,
    complete: bool,
    /// Nothing more is written: the disk is full or broken.
    given_up: AtomicBool,
    /// Something was written.
    written: AtomicBool,
}

/// What `tensorizer cache ls` shows of a file.
#[derive(Debug, Clone)]
pub struct Cached {
    /// Where it is from, without secrets.
    pub uri: String,
    /// Bytes of the file.
    pub len: u64,
    /// How many of them are here.
    pub here: u64,
    /// When it was opened last.
    pub used: SystemTime,
    pub(super) path: PathBuf,
    complete: bool,
}

impl Cached {
    /// Bytes that are still to come.
    pub(super) fn promised(&self) -> u64 {
        if self.complete { 0 } else { self.len.saturating_sub(self.here) }
    }
}

/// The right to bring some chunks, which other openings wait for.
pub struct Claim<'e> {
    file: &'e File,
    chunks: Range<u64>,
}

impl Drop for Claim<'_> {
    fn drop(&mut self) {
        sys::release(self.file, &self.chunks);
    }
}

impl Entry {
    /// Makes an empty one.
    pub fn create(path: &Path, identity: &Identity) -> io::Result<()> {
        let mut options = OpenOptions::new();
        let file = options.read(true).write(true).create_new(true).mode(0o600).open(path)?;
        let about = About { identity: identity.clone(), boot: boot(), synced: false };
        let made =
            file.set_len(identity.about_at() + ABOUT).and_then(|()| write_about(&file, &about));
        if made.is_err() {
            let _ = fs::remove_file(path);
        }
        made
    }

    /// Opens one; None if it is not to be used, or about to be removed.
    pub fn open(path: &Path, identity: &Identity) -> io::Result<Option<Self>> {
        let file = open_alone(path)?;
        if !sys::share(&file)? || file.metadata()?.nlink() == 0 {
            return Ok(None);
        }
        let Some(about) = read_about(&file)?.filter(|about| about.identity == *identity) else {
            return Ok(None);
        };
        let now = boot();
        if !about.synced && (now.is_empty() || about.boot != now) {
            return Ok(None);
        }
        file.set_modified(SystemTime::now())?;
        let complete = count(&file, identity)? == identity.chunks();
        let (given_up, written) = (AtomicBool::new(false), AtomicBool::new(false));
        let (path, identity) = (path.to_owned(), identity.clone());
        Ok(Some(Entry { file, path, identity, complete, given_up, written }))
    }

    /// What one is, without using it; None for what is none.
    pub fn about(path: &Path, metadata: &Metadata) -> Option<Cached> {
        let file = open_alone(path).ok()?;
        let About { identity, .. } = read_about(&file).ok()??;
        let chunks = count(&file, &identity).ok()?;
        Some(Cached {
            here: chunks.saturating_mul(CHUNK).min(identity.len),
            complete: chunks == identity.chunks(),
            len: identity.len,
            uri: identity.uri,
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

    pub fn len(&self) -> u64 {
        self.identity.len
    }

    /// Whether all of it was here when it was opened.
    pub fn is_complete(&self) -> bool {
        self.complete
    }

    /// Whether it is of no use any more.
    pub fn is_given_up(&self) -> bool {
        self.given_up.load(Ordering::Relaxed)
    }

    /// Neither reads nor writes any more.
    pub fn give_up(&self) {
        self.given_up.store(true, Ordering::Relaxed);
    }

    /// Whether the first of some bytes are here, and up to where that holds. The range is not empty.
    pub fn look(&self, range: &Range<u64>) -> io::Result<Found> {
        let chunks = self.touched(range);
        let flags = self.flags(chunks.start..chunks.end.min(chunks.start + LOOK))?;
        let first = flags.first().copied().unwrap_or(0);
        let same = flags.iter().take_while(|flag| (**flag == 1) == (first == 1)).count() as u64;
        let until = ((chunks.start + same) * CHUNK).min(range.end);
        Ok(if first == 1 { Found::Here(until) } else { Found::Missing(until) })
    }

    /// The chunks that some bytes are in, as bytes.
    pub fn whole_chunks(&self, range: &Range<u64>) -> Range<u64> {
        let chunks = self.touched(range);
        chunks.start * CHUNK..(chunks.end * CHUNK).min(self.identity.len)
    }

    /// How many of the first `count` bytes from a position on are whole chunks.
    pub fn whole_until(&self, start: u64, count: usize) -> usize {
        let end = start + count as u64;
        let rest = if end == self.identity.len { 0 } else { end % CHUNK };
        usize::try_from((count as u64).saturating_sub(rest)).unwrap_or(0)
    }

    /// Chunks of which some bytes are in a range.
    fn touched(&self, range: &Range<u64>) -> Range<u64> {
        range.start / CHUNK..range.end.div_ceil(CHUNK)
    }

    fn flags(&self, chunks: Range<u64>) -> io::Result<Vec<u8>> {
        let len = usize::try_from(chunks.end - chunks.start).map_err(io::Error::other)?;
        let mut flags = vec![0; len];
        self.file.read_exact_at(&mut flags, self.identity.flags_at() + chunks.start)?;
        Ok(flags)
    }

    /// Takes the right to bring bytes, from the first on and as far as it is free; None while another
    /// opening has it.
    pub fn claim(&self, range: &Range<u64>) -> io::Result<Option<(Claim<'_>, u64)>> {
        let mut chunks = self.touched(range);
        loop {
            match sys::claim(&self.file, &chunks)? {
                Claimed::Ours => {
                    let until = (chunks.end * CHUNK).min(range.end);
                    return Ok(Some((Claim { file: &self.file, chunks }, until)));
                }
                Claimed::Theirs(from) if from > chunks.start => chunks.end = from,
                Claimed::Theirs(_) => return Ok(None),
            }
        }
    }

    /// Keeps bytes that have arrived.
    pub fn keep(&self, offset: u64, pieces: &[IoSlice<'_>]) -> io::Result<()> {
        self.written.store(true, Ordering::Relaxed);
        let mut pieces = pieces.to_vec();
        let mut left: &mut [IoSlice<'_>] = &mut pieces;
        let mut at = offset;
        while !left.is_empty() {
            match sys::write_vectored_at(&self.file, at, left) {
                Err(e) if e.kind() == io::ErrorKind::Interrupted => {}
                Err(e) => return Err(e),
                Ok(0) => return Err(io::Error::from(io::ErrorKind::WriteZero)),
                Ok(written) => {
                    IoSlice::advance_slices(&mut left, written);
                    at += written as u64;
                }
            }
        }
        self.tell(offset..at)
    }

    /// Tells that bytes are here, of all chunks that are among them.
    fn tell(&self, range: Range<u64>) -> io::Result<()> {
        let end =
            if range.end == self.identity.len { self.identity.chunks() } else { range.end / CHUNK };
        let whole = range.start.div_ceil(CHUNK)..end;
        if whole.is_empty() {
            return Ok(());
        }
        let count = usize::try_from(whole.end - whole.start).map_err(io::Error::other)?;
        self.file.write_all_at(&vec![1; count], self.identity.flags_at() + whole.start)
    }
}

/// What was written is synced when it is let go. A whole entry outlives the boot then, and one of which
/// the disk has lost something is not used again: who opened it later would not be told.
impl Drop for Entry {
    fn drop(&mut self) {
        if !self.written.load(Ordering::Relaxed) {
            return;
        }
        let Ok(file) = self.file.try_clone() else { return };
        let identity = self.identity.clone();
        // Nobody waits for a disk that takes its time.
        let sync = move || {
            let about = |boot, synced| About { identity: identity.clone(), boot, synced };
            let synced = file.sync_data().and_then(|()| {
                if count(&file, &identity)? == identity.chunks() {
                    // That is no use of it.
                    let used = file.metadata()?.modified()?;
                    write_about(&file, &about(boot(), true))?;
                    file.set_modified(used)?;
                    file.sync_data()?;
                }
                Ok(())
            });
            if synced.is_err() {
                // Of no boot.
                let _ = write_about(&file, &about(String::new(), false));
            }
        };
        let _ = thread::Builder::new().name("tensorizer-cache".to_owned()).spawn(sync);
    }
}

/// Opens a file of the folder, and nothing that it may lead to, or that waits.
pub fn open_alone(path: &Path) -> io::Result<File> {
    let flags = libc::O_NOFOLLOW | libc::O_NONBLOCK;
    OpenOptions::new().read(true).write(true).custom_flags(flags).open(path)
}

fn write_about(file: &File, about: &About) -> io::Result<()> {
    let mut line = serde_json::to_vec(about).map_err(io::Error::other)?;
    let room = usize::try_from(ABOUT).map_err(io::Error::other)?;
    if line.len() >= room {
        return Err(io::Error::other("an address that is too long"));
    }
    line.resize(room, b' ');
    file.write_all_at(&line, about.identity.about_at())
}

/// What an entry says of itself; None for a file that is none.
fn read_about(file: &File) -> io::Result<Option<About>> {
    let size = file.metadata()?.len();
    let Some(at) = size.checked_sub(ABOUT) else { return Ok(None) };
    let mut line = vec![0; usize::try_from(ABOUT).map_err(io::Error::other)?];
    file.read_exact_at(&mut line, at)?;
    let Ok(about) = serde_json::from_slice::<About>(&line) else { return Ok(None) };
    let right = about.identity.format == FORMAT
        && about.identity.len < LARGEST
        && about.identity.about_at() == at;
    Ok(right.then_some(about))
}

/// How many chunks are here.
fn count(file: &File, identity: &Identity) -> io::Result<u64> {
    const STEP: u64 = 1 << 20;
    let (mut at, end) = (identity.flags_at(), identity.flags_at() + identity.chunks());
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
