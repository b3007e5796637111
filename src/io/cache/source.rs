//! Sources that read from the cache, and write to it what their server sends.

use std::fs::File;
use std::ops::Range;
use std::os::unix::fs::MetadataExt as _;
use std::path::{Path, PathBuf};
use std::sync::atomic::{AtomicBool, AtomicUsize, Ordering};
use std::sync::{Arc, OnceLock};
use std::time::{Duration, Instant};

use super::cached_file::not_cached;
use super::entry::{CacheEntry, Presence};
use crate::cancel::{self, Cancel};
use crate::error::{Error, Result};
use crate::io::local::FileSource;
use crate::io::{CachedHead, Capabilities, LocalCopy, ReadAt, read_exact_at};
use crate::mem::{Buffers, FilledPart};
use crate::sys;

/// Poll interval while another process fetches the bytes.
const PEER_POLL: Duration = Duration::from_millis(20);

/// A source with a file of which some chunks are cached. Others are fetched and written. If another
/// process is fetching them, reads wait for it.
struct CachedSource {
    origin: CacheOrigin,
    entry: CacheEntry,
    /// True once another process has exceeded the time limit. From then on, this source waits for
    /// no process.
    stopped_waiting: AtomicBool,
    /// The source that replaces the entry once the entry is not trusted.
    replacement: OnceLock<Arc<dyn ReadAt>>,
}

/// The origin of an entry's bytes.
pub struct CacheOrigin {
    pub server: Arc<dyn ReadAt>,
    /// Time limit for another process that fetches the same bytes.
    pub wait_limit: Duration,
    /// Puts a new entry before the server.
    pub fill: Box<FillCache>,
}

/// Returns a source that caches what the server sends.
pub type FillCache = dyn Fn(&Arc<dyn ReadAt>, &dyn Cancel) -> Arc<dyn ReadAt> + Send + Sync;

impl CacheOrigin {
    /// Removes the entry of an open file, and returns a source that fills a new one.
    fn refill(&self, path: &Path, file: &File, cancel: &dyn Cancel) -> Arc<dyn ReadAt> {
        remove_if_same(path, file);
        (self.fill)(&self.server, cancel)
    }
}

/// Removes an entry, if it still is that of an open file. Its readers go on with the removed file.
fn remove_if_same(path: &Path, file: &File) {
    let id = |about: std::fs::Metadata| (about.dev(), about.ino());
    let there = std::fs::symlink_metadata(path).map(id);
    if there.is_ok_and(|there| file.metadata().is_ok_and(|own| id(own) == there)) {
        // If this fails, the next opening finds it again.
        let _ = std::fs::remove_file(path);
    }
}

/// Puts an entry before its server: as a local file if it is complete.
pub fn with_cache(origin: CacheOrigin, entry: CacheEntry) -> Arc<dyn ReadAt> {
    // A duplicate keeps the entry in use.
    if entry.is_complete()
        && let Ok(file) = entry.file().try_clone()
    {
        let local = FileSource::from_prefix(file, origin.server.uri().to_owned(), entry.file_len());
        let shared = Arc::new(CompleteEntry { origin, entry, replacement: OnceLock::new() });
        return Arc::new(CompleteSource { local: Box::new(local), shared });
    }
    let (stopped_waiting, replacement) = (AtomicBool::new(false), OnceLock::new());
    Arc::new(CachedSource { origin, entry, stopped_waiting, replacement })
}

/// A source with a complete file in the cache. Bytes that the disk fails to read come from the
/// server.
struct CompleteSource {
    local: Box<dyn ReadAt>,
    shared: Arc<CompleteEntry>,
}

/// The state that its readers share.
struct CompleteEntry {
    origin: CacheOrigin,
    entry: CacheEntry,
    /// The source that replaces the entry once the entry is not trusted.
    replacement: OnceLock<Arc<dyn ReadAt>>,
}

impl ReadAt for CompleteSource {
    fn uri(&self) -> &str {
        self.shared.origin.server.uri()
    }

    fn capabilities(&self) -> Capabilities {
        self.shared
            .replacement
            .get()
            .map_or_else(|| self.local.capabilities(), |replacement| replacement.capabilities())
    }

    fn read_at(
        &self,
        offset: u64,
        buffers: &mut Buffers<'_>,
        cancel: &dyn Cancel,
    ) -> Result<usize> {
        if let Some(replacement) = self.shared.replacement.get() {
            return replacement.read_at(offset, buffers, cancel);
        }
        match self.local.read_at(offset, buffers, cancel) {
            Err(Error::Io { .. }) | Ok(0) => {
                self.shared.origin.server.read_at(offset, buffers, cancel)
            }
            read => read,
        }
    }

    fn own_handle(&self) -> Option<Box<dyn ReadAt>> {
        if let Some(replacement) = self.shared.replacement.get() {
            return replacement.own_handle();
        }
        let local = self.local.own_handle()?;
        Some(Box::new(CompleteSource { local, shared: Arc::clone(&self.shared) }))
    }

    fn sibling(
        &self,
        name: &str,
        first: Option<u64>,
        cancel: &dyn Cancel,
    ) -> Result<Option<Arc<dyn ReadAt>>> {
        self.shared.origin.server.sibling(name, first, cancel)
    }

    fn response_head(&self) -> Option<CachedHead> {
        self.shared.origin.server.response_head()
    }

    fn local_copy(&self) -> Option<&dyn LocalCopy> {
        Some(self)
    }

    fn file(&self) -> Option<Arc<File>> {
        self.local.file().filter(|_| self.shared.replacement.get().is_none())
    }
}

impl LocalCopy for CompleteSource {
    fn path(&self) -> Option<PathBuf> {
        self.shared.replacement.get().is_none().then(|| self.shared.entry.path().to_owned())
    }

    fn discard(&self, remove: bool, cancel: &dyn Cancel) -> Option<PathBuf> {
        let CompleteEntry { origin, entry, replacement } = &*self.shared;
        replace_entry(origin, entry, replacement, remove, cancel)
    }
}

impl CachedSource {
    /// Reads bytes of the entry. An error, or 0 bytes, means that they are not present.
    fn read_cached(&self, range: &Range<u64>, buffers: &mut Buffers<'_>) -> std::io::Result<usize> {
        let read = buffers.tee(
            len(range),
            (&mut [], &mut []),
            |_, _| {},
            |part| sys::read_vectored_at(self.entry.file(), range.start, part).map(drop),
        )?;
        buffers.arrived(read as u64);
        Ok(read)
    }

    /// Reads the chunks that contain these bytes from the server, and writes them to the entry, so
    /// that no byte is fetched twice. Writes run while further bytes arrive.
    fn fetch(
        &self,
        range: &Range<u64>,
        buffers: &mut Buffers<'_>,
        cancel: &dyn Cancel,
    ) -> Result<usize> {
        let chunks = self.entry.expand_to_chunks(range);
        let mut before = vec![0; len(&(chunks.start..range.start))];
        let mut after = vec![0; len(&(range.end..chunks.end))];
        let written = AtomicUsize::new(0);
        let write = |filled: &FilledPart<'_>, last| {
            self.write_arrived(chunks.start, filled, &written, if last { 1 } else { WRITE_STEP });
        };
        buffers.tee(len(range), (&mut before, &mut after), write, |part| {
            let what = || "tensors".to_owned();
            read_exact_at(&*self.origin.server, chunks.start, part, &what, cancel)
        })
    }

    /// Writes the new bytes, which arrived from `start` on, to the entry if they are at least
    /// `min_bytes`.
    fn write_arrived(
        &self,
        start: u64,
        filled: &FilledPart<'_>,
        written: &AtomicUsize,
        min_bytes: usize,
    ) {
        let (before, count) = (written.load(Ordering::Relaxed), filled.count());
        let end = self.entry.complete_prefix(start, count);
        if end.saturating_sub(before) < min_bytes || self.entry.disabled().is_some() {
            return;
        }
        if let Err(e) = self.entry.write(start + before as u64, &filled.bytes(before..end)) {
            // The disk may be full. Chunks with a flag stay valid, and the others are not needed.
            self.entry.disable(e);
        }
        written.store(end, Ordering::Relaxed);
    }
}

/// Replaces the source of a damaged entry. Returns the entry's path; None on later calls.
fn replace_entry(
    origin: &CacheOrigin,
    entry: &CacheEntry,
    replacement: &OnceLock<Arc<dyn ReadAt>>,
    remove: bool,
    cancel: &dyn Cancel,
) -> Option<PathBuf> {
    let mut first = false;
    replacement.get_or_init(|| {
        first = true;
        if remove {
            origin.refill(entry.path(), entry.file(), cancel)
        } else {
            Arc::clone(&origin.server)
        }
    });
    if remove && !first {
        remove_if_same(entry.path(), entry.file());
    }
    first.then(|| entry.path().to_owned())
}

/// Bytes that are written at once while others arrive.
const WRITE_STEP: usize = 4 << 20;

fn len(range: &Range<u64>) -> usize {
    usize::try_from(range.end - range.start).unwrap_or(usize::MAX)
}

impl ReadAt for CachedSource {
    fn uri(&self) -> &str {
        self.origin.server.uri()
    }

    fn capabilities(&self) -> Capabilities {
        self.origin.server.capabilities()
    }

    fn limit_connection(&self, bytes: u64) {
        self.origin.server.limit_connection(bytes);
    }

    fn read_at(
        &self,
        offset: u64,
        buffers: &mut Buffers<'_>,
        cancel: &dyn Cancel,
    ) -> Result<usize> {
        let end = offset.saturating_add(buffers.remaining() as u64).min(self.entry.file_len());
        if end <= offset {
            return Ok(0);
        }
        if let Some(replacement) = self.replacement.get() {
            return replacement.read_at(offset, buffers, cancel);
        }
        let start = Instant::now();
        while self.entry.disabled().is_none() {
            let found = match self.entry.presence(&(offset..end)) {
                Ok(found) => found,
                Err(e) => {
                    self.entry.disable(e);
                    break;
                }
            };
            let missing = match found {
                Presence::Present(until) => match self.read_cached(&(offset..until), buffers) {
                    Ok(read) if read > 0 => return Ok(read),
                    Err(e) if e.kind() == std::io::ErrorKind::Interrupted => continue,
                    _ => break,
                },
                Presence::Missing(until) => offset..until,
            };
            // If the range lock fails or times out, fetch anyway.
            let locked = match self.entry.lock_chunks(&missing) {
                Ok(None) if !self.stopped_waiting.load(Ordering::Relaxed) => {
                    let late = start.elapsed() >= self.origin.wait_limit;
                    self.stopped_waiting.fetch_or(late, Ordering::Relaxed);
                    cancel::sleep(PEER_POLL, cancel)?;
                    continue;
                }
                Ok(locked) => locked,
                Err(_) => None,
            };
            let Some((lock, until)) = locked else {
                return self.fetch(&missing, buffers, cancel);
            };
            // Another process may have fetched it just before the lock.
            if let Ok(Presence::Present(_)) = self.entry.presence(&missing) {
                continue;
            }
            let read = self.fetch(&(offset..until), buffers, cancel);
            drop(lock);
            return read;
        }
        self.entry.disable("cached bytes cannot be read");
        self.origin.server.read_at(offset, buffers, cancel)
    }

    fn sibling(
        &self,
        name: &str,
        first: Option<u64>,
        cancel: &dyn Cancel,
    ) -> Result<Option<Arc<dyn ReadAt>>> {
        self.origin.server.sibling(name, first, cancel)
    }

    fn response_head(&self) -> Option<CachedHead> {
        self.origin.server.response_head()
    }

    fn fallback(&self) -> Option<String> {
        self.entry.disabled().map(|why| {
            let folder = self.entry.path().parent().unwrap_or(self.entry.path()).display();
            not_cached(&folder, self.uri(), why)
        })
    }

    fn local_copy(&self) -> Option<&dyn LocalCopy> {
        Some(self)
    }
}

impl LocalCopy for CachedSource {
    fn path(&self) -> Option<PathBuf> {
        let is_read = self.entry.disabled().is_none() && self.replacement.get().is_none();
        is_read.then(|| self.entry.path().to_owned())
    }

    fn discard(&self, remove: bool, cancel: &dyn Cancel) -> Option<PathBuf> {
        replace_entry(&self.origin, &self.entry, &self.replacement, remove, cancel)
    }
}
