//! A source that reads from the cache, and fills it with what its server sends.

use std::fs::File;
use std::io::{self, ErrorKind};
use std::ops::Range;
use std::sync::Arc;
use std::time::{Duration, Instant};

use super::entry::{CacheEntry, FileVersion};
use super::fill::{Claim, FillingEntry, Segment};
use super::folder::Cache;
use crate::cancel::{self, Cancel};
use crate::error::{Error, Result};
use crate::io::local::FileSource;
use crate::io::{
    Capabilities, Facts, Fallback, LocalCopy, ReadAt, ServerFile, WantedRead, read_exact_at,
};
use crate::mem::{Buffers, FilledPart};
use crate::sys;
use crate::sys::fork_safe_mutex::ForkSafeMutex;
use crate::sys::process::OwnerProcess;

/// The beginning of the reasons why a file is not cached.
pub const NOT_CACHED: &str = "the cache in ";
/// Poll interval while another thread or process fetches the bytes.
const POLL: Duration = Duration::from_millis(10);

impl Cache {
    /// Puts the cache before a source of a server, if the server distinguishes versions. `latest`
    /// is the result of [`Cache::latest`]. Another process is waited for at most `wait_limit`.
    pub fn wrap(
        &self,
        server: Arc<dyn ReadAt>,
        name: &str,
        latest: Option<CacheEntry>,
        wait_limit: Duration,
    ) -> Result<Arc<dyn ReadAt>> {
        let Some(version) = FileVersion::of(&*server, name) else { return Ok(server) };
        let usable = self.check_folder();
        let found = latest.or_else(|| CacheEntry::open(&self.path(name)).ok()?);
        let found = found.filter(|found| {
            found.version == version && (usable.is_ok() || self.is_readable(found))
        });
        found.iter().for_each(CacheEntry::mark_used);
        let why = usable.err().filter(|_| found.is_none());
        let is_no_mistake = |e: &io::Error| {
            use ErrorKind::{QuotaExceeded, ReadOnlyFilesystem, StorageFull};
            matches!(e.kind(), StorageFull | QuotaExceeded | ReadOnlyFilesystem)
        };
        // The folder was not usable when the call began, but for a full or read-only disk.
        if let Some(e) = why.as_ref().filter(|e| self.is_required && !is_no_mistake(e)) {
            let what = format!("{e}: pass a folder of your own in which you may write, or none");
            return Err(self.error(io::Error::new(e.kind(), what)));
        }
        let disabled =
            why.map(|e| format!("{NOT_CACHED}{} cannot be used: {e}", self.folder.display()));
        let complete = found.as_ref().filter(|entry| entry.is_complete());
        let local = complete.and_then(|entry| {
            // A duplicate keeps the entry in use.
            let file = entry.file.try_clone().ok()?;
            let uri = server.uri().to_owned();
            Some(Arc::new(FileSource::from_prefix(file, uri, version.len)))
        });
        let entry = found.map(|entry| Arc::new(FillingEntry::new(entry)));
        let noted = disabled.clone().or_else(|| server.facts().fallback());
        let fallback = Arc::new(ForkSafeMutex::new(noted));
        let state = Arc::new(CacheState {
            server,
            cache: self.clone(),
            version,
            wait_limit,
            slot: ForkSafeMutex::new(Slot { entry, local, disabled, ..Slot::default() }),
            fallback,
            wanting: Arc::default(),
            owner: OwnerProcess::current(),
        });
        Ok(Arc::new(CachedSource::new(state)))
    }
}

/// A source of a server with the cache before it.
struct CachedSource {
    state: Arc<CacheState>,
    /// The facts while bytes are read past the cache, while its entry is filled, and while its
    /// entry is complete.
    past: Facts,
    filling: Facts,
    complete: Facts,
}

impl CachedSource {
    fn new(state: Arc<CacheState>) -> Self {
        let (announced, discarded) = (Arc::clone(&state), Arc::clone(&state));
        let copy = LocalCopy {
            path: state.cache.path(&state.version.name),
            discard: Some(Arc::new(move |remove| discarded.discard(remove))),
        };
        let facts = state.server.facts().clone();
        let server = ServerFile {
            will_read: Some(Arc::new(move |bytes| announced.will_read(bytes))),
            fallback: Arc::clone(&state.fallback),
            ..facts.server.unwrap_or_else(ServerFile::default)
        };
        let past = Facts { server: Some(server.clone()), ..facts };
        let server = Some(ServerFile { local_copy: Some(copy), ..server });
        let filling = Facts { server, ..past.clone() };
        let complete = Facts { is_local: true, ..filling.clone() };
        CachedSource { state, past, filling, complete }
    }

    fn local(&self) -> Option<Arc<FileSource>> {
        self.state.slot.lock().local.clone()
    }
}

/// The state that the readers of a source share.
struct CacheState {
    server: Arc<dyn ReadAt>,
    cache: Cache,
    version: FileVersion,
    /// Time limit for another process that fetches the file without progress.
    wait_limit: Duration,
    slot: ForkSafeMutex<Slot>,
    /// The reason why the cache does not keep the file.
    fallback: Fallback,
    /// Shared with each call under way that wants so much of the file that the cache is to keep it.
    wanting: WantedRead,
    /// The process whose threads fetch; a forked child has none of them.
    owner: OwnerProcess,
}

#[derive(Default)]
struct Slot {
    /// The entry, once there is one.
    entry: Option<Arc<FillingEntry>>,
    /// The same as a local file, if it was complete when the source was opened.
    local: Option<Arc<FileSource>>,
    /// The entry that was found to be damaged.
    discarded: Option<Arc<FillingEntry>>,
    /// True while the damage is not proven, or if the folder cannot be used: bytes are read past it.
    is_kept: bool,
    /// The reason why the entry is neither read nor written any more: the disk is full or fails.
    disabled: Option<String>,
    /// Bytes that were read before a call announced what it reads: the index of the file.
    index_len: u64,
    is_announced: bool,
}

impl CacheState {
    /// Reads some bytes of a file that was not complete when it was opened.
    fn read(
        &self,
        wanted: &Range<u64>,
        buffers: &mut Buffers<'_>,
        cancel: &dyn Cancel,
    ) -> Result<usize> {
        let mut progress = (0, Instant::now());
        let is_owner = self.owner.is_current();
        while let Some(entry) = self.entry(is_owner, cancel)? {
            // A forked child has none of the threads that note what they fetch.
            let arrived = if is_owner { entry.arrived() } else { entry.entry.arrived() };
            let is_coming = is_owner && arrived < wanted.end && entry.is_fetching(wanted);
            if arrived > wanted.start && !is_coming {
                let present = wanted.start..wanted.end.min(arrived);
                match read_cached(&entry.entry.file, &present, buffers) {
                    Ok(read) if read > 0 => return Ok(read),
                    Err(e) if e.kind() == ErrorKind::Interrupted => {}
                    _ => self.disable(&"cached bytes cannot be read"),
                }
                continue;
            }
            if !(is_owner && self.is_wanted()) {
                break;
            }
            match entry.claim(wanted, buffers.remaining()) {
                Ok(Claim::Fetch(segment)) => {
                    let read = self.fetch(&segment, wanted, buffers, cancel)?;
                    if read > 0 {
                        return Ok(read);
                    }
                    continue;
                }
                Ok(Claim::OtherProcess) if progress.0 < arrived => {
                    progress = (arrived, Instant::now());
                }
                Ok(Claim::OtherProcess) if progress.1.elapsed() >= self.wait_limit => {
                    let limit = self.wait_limit;
                    self.disable(&format!(
                        "the process that fetches it stands still for {limit:?}"
                    ));
                }
                Ok(Claim::OtherProcess) => {}
                Ok(Claim::Wait) => {
                    cancel.check()?;
                    entry.wait(POLL);
                    continue;
                }
                Err(e) => self.disable(&e),
            }
            cancel::sleep(POLL, cancel)?;
        }
        self.note_passed();
        self.server.read_at(wanted.start, buffers, cancel)
    }

    /// The entry; None if bytes are read past it. Creates it if a call wants the file.
    fn entry(&self, is_owner: bool, cancel: &dyn Cancel) -> Result<Option<Arc<FillingEntry>>> {
        let slot = self.slot.lock();
        let is_unused = slot.disabled.is_some() || slot.is_kept;
        if is_unused || slot.entry.is_some() || !(is_owner && self.is_wanted()) {
            return Ok(slot.entry.clone().filter(|_| !is_unused));
        }
        drop(slot);
        let opened = self.cache.open(&self.version, self.server.uri(), cancel);
        cancel.check()?;
        match opened {
            Ok(opened) => Ok(Some(Arc::clone(
                self.slot.lock().entry.get_or_insert_with(|| Arc::new(FillingEntry::new(opened))),
            ))),
            Err(e) => {
                self.disable(&e);
                Ok(None)
            }
        }
    }

    /// Neither reads nor writes the entry any more.
    fn disable(&self, why: &dyn std::fmt::Display) {
        let (folder, uri) = (self.cache.folder.display(), self.server.uri());
        let why = format!("{NOT_CACHED}{folder} does not keep all of {uri}: {why}");
        let mut slot = self.slot.lock();
        *self.fallback.lock() = Some(slot.disabled.get_or_insert(why).clone());
    }

    /// Notes that bytes were read past the cache.
    fn note_passed(&self) {
        if !self.is_wanted() {
            self.fallback.lock().get_or_insert_with(|| {
                format!(
                    "read past the cache, which keeps whole files: the call wants less than half \
                     of {}",
                    self.server.uri()
                )
            });
        }
    }

    /// Makes later reads use the server, and deletes the entry if `remove` is true. True in the
    /// first call.
    fn discard(&self, remove: bool) -> bool {
        let mut slot = self.slot.lock();
        let is_first = slot.discarded.is_none();
        if is_first {
            slot.discarded = slot.entry.take();
            slot.local = None;
        }
        let Some(discarded) = slot.discarded.clone() else { return false };
        slot.is_kept = !remove || self.cache.check_folder().is_err();
        if remove {
            discarded.entry.remove();
        }
        is_first
    }

    fn is_wanted(&self) -> bool {
        Arc::strong_count(&self.wanting) > 1
    }

    /// See [`ServerFile::will_read`].
    fn will_read(&self, bytes: u64) -> Option<WantedRead> {
        let mut slot = self.slot.lock();
        let bytes = bytes.saturating_add(slot.index_len);
        slot.is_announced = true;
        *self.fallback.lock() = slot.disabled.clone().or_else(|| self.server.facts().fallback());
        let is_wanted = bytes.saturating_mul(2) >= self.version.len;
        is_wanted.then(|| Arc::clone(&self.wanting))
    }

    /// Reads a segment from the server and writes it to the entry. Returns the number of wanted
    /// bytes that it has read: 0 if the segment ends before them.
    fn fetch(
        &self,
        segment: &Segment<'_>,
        wanted: &Range<u64>,
        buffers: &mut Buffers<'_>,
        cancel: &dyn Cancel,
    ) -> Result<usize> {
        let Range { start, end } = segment.range;
        let write = |filled: &FilledPart<'_>, is_last| {
            // The disk may be full. Bytes that were counted stay valid.
            if self.slot.lock().disabled.is_none()
                && let Err(e) = segment.write(filled, is_last)
            {
                self.disable(&e);
            }
        };
        let read =
            |part: &mut Buffers<'_>| read_exact_at(&*self.server, start, part, "tensors", cancel);
        if end > wanted.start {
            let mut before = vec![0; len(&(start..wanted.start))];
            let mut after = vec![0; len(&(wanted.end..end))];
            let wanted = len(&(wanted.start.max(start)..wanted.end.min(end)));
            return buffers.tee(wanted, (&mut before, &mut after), write, read);
        }
        let len = len(&segment.range);
        if len <= buffers.remaining() {
            // Their memory is written again when the wanted bytes have arrived.
            buffers.lend(len, (&mut [], &mut []), write, read)?;
        } else {
            let mut memory = vec![0; len];
            Buffers::from_slice(&mut memory).tee(len, (&mut [], &mut []), write, read)?;
        }
        Ok(0)
    }
}

/// Reads bytes of an entry. An error, or 0 bytes, means that they cannot be read.
fn read_cached(file: &File, range: &Range<u64>, buffers: &mut Buffers<'_>) -> io::Result<usize> {
    let read = |part: &mut Buffers<'_>| sys::read_vectored_at(file, range.start, part).map(drop);
    let read = buffers.tee(len(range), (&mut [], &mut []), |_, _| {}, read)?;
    buffers.arrived(read as u64);
    Ok(read)
}

/// Bytes of a range; 0 if it ends before it begins.
fn len(range: &Range<u64>) -> usize {
    sys::to_usize(range.end.saturating_sub(range.start))
}

impl ReadAt for CachedSource {
    fn facts(&self) -> &Facts {
        let slot = self.state.slot.lock();
        match (&slot.local, &slot.entry) {
            (Some(_), _) => &self.complete,
            (None, Some(_)) if slot.disabled.is_none() => &self.filling,
            (None, _) => &self.past,
        }
    }

    fn capabilities(&self) -> Capabilities {
        self.local().map_or_else(|| self.state.server.capabilities(), |local| local.capabilities())
    }

    fn read_at(&self, offset: u64, into: &mut Buffers<'_>, cancel: &dyn Cancel) -> Result<usize> {
        if let Some(local) = self.local() {
            // Bytes that the disk fails to read come from the server.
            return match local.read_at(offset, into, cancel) {
                Err(Error::Io { .. }) | Ok(0) => self.state.server.read_at(offset, into, cancel),
                read => read,
            };
        }
        let end = offset.saturating_add(into.remaining() as u64);
        let end = end.min(self.state.version.len);
        if end <= offset {
            return Ok(0);
        }
        let read = self.state.read(&(offset..end), into, cancel)?;
        let mut slot = self.state.slot.lock();
        if !slot.is_announced {
            slot.index_len = slot.index_len.saturating_add(read as u64);
        }
        Ok(read)
    }

    fn file(&self) -> Option<Arc<File>> {
        self.local()?.file()
    }
}
