//! A server's file with the cache before it.

use std::fs::File;
use std::ops::Range;
use std::os::unix::fs::MetadataExt as _;
use std::path::{Path, PathBuf};
use std::sync::atomic::{AtomicBool, AtomicUsize, Ordering};
use std::sync::{Arc, OnceLock};
use std::time::{Duration, Instant};

use super::entry::{Entry, Found};
use crate::cancel::{self, Cancel};
use crate::error::{Error, Result};
use crate::io::source::{FileSource, KnownHead, ReadAt, Traits, read_exact_at};
use crate::mem::Buffers;
use crate::memory_limit::MemoryLimit;
use crate::sys::{self, Filled};

/// How often somebody looks whether another process has brought what it brings.
const LOOK: Duration = Duration::from_millis(20);

/// Bytes that are here are read here. Others are asked for, and kept; or waited for, while another
/// process brings them.
struct CachedSource {
    origin: Origin,
    entry: Entry,
    /// One has taken longer: nobody is waited for any more.
    impatient: AtomicBool,
    /// What is read instead, once the entry is not trusted any more.
    anew: OnceLock<Arc<dyn ReadAt>>,
}

/// Where the bytes of an entry come from.
pub struct Origin {
    pub server: Arc<dyn ReadAt>,
    /// How long another process may take for what is waited for.
    pub patience: Duration,
    /// Puts a new entry before the server.
    pub fill: Box<Fill>,
}

/// Gives a source that keeps what the server sends.
pub type Fill = dyn Fn(&Arc<dyn ReadAt>, &dyn Cancel) -> Arc<dyn ReadAt> + Send + Sync;

impl Origin {
    /// Removes the entry of an open file, and gives a source that fills a new one.
    fn afresh(&self, path: &Path, file: &File, cancel: &dyn Cancel) -> Arc<dyn ReadAt> {
        remove_own(path, file);
        (self.fill)(&self.server, cancel)
    }
}

/// Removes an entry, if it still is that of an open file. Who reads it goes on with what it was.
fn remove_own(path: &Path, file: &File) {
    let id = |about: std::fs::Metadata| (about.dev(), about.ino());
    let there = std::fs::symlink_metadata(path).map(id);
    if there.is_ok_and(|there| file.metadata().is_ok_and(|own| id(own) == there)) {
        // Where that fails, the next opening finds it again.
        let _ = std::fs::remove_file(path);
    }
}

/// Puts an entry before the source that fills it: as a local file if all of it is here.
pub fn before(origin: Origin, entry: Entry) -> Arc<dyn ReadAt> {
    // A duplicate keeps the entry in use.
    if entry.is_complete()
        && let Ok(file) = entry.file().try_clone()
    {
        let here = FileSource::beginning(file, origin.server.uri().to_owned(), entry.len());
        let shared = Arc::new(Whole { origin, entry, anew: OnceLock::new() });
        return Arc::new(WholeSource { here: Box::new(here), shared });
    }
    let (impatient, anew) = (AtomicBool::new(false), OnceLock::new());
    Arc::new(CachedSource { origin, entry, impatient, anew })
}

/// A server's file that is here as a whole. What the disk does not give comes from the server.
struct WholeSource {
    here: Box<dyn ReadAt>,
    shared: Arc<Whole>,
}

/// What its readers share.
struct Whole {
    origin: Origin,
    entry: Entry,
    /// What is read instead, once the entry is not trusted any more.
    anew: OnceLock<Arc<dyn ReadAt>>,
}

impl ReadAt for WholeSource {
    fn uri(&self) -> &str {
        self.shared.origin.server.uri()
    }

    fn traits(&self) -> Traits {
        self.shared.anew.get().map_or_else(|| self.here.traits(), |anew| anew.traits())
    }

    fn read_at(
        &self,
        offset: u64,
        buffers: &mut Buffers<'_>,
        cancel: &dyn Cancel,
    ) -> Result<usize> {
        if let Some(anew) = self.shared.anew.get() {
            return anew.read_at(offset, buffers, cancel);
        }
        match self.here.read_at(offset, buffers, cancel) {
            Err(Error::Io { .. }) | Ok(0) => {
                self.shared.origin.server.read_at(offset, buffers, cancel)
            }
            read => read,
        }
    }

    fn for_one_reader(&self) -> Option<Box<dyn ReadAt>> {
        if let Some(anew) = self.shared.anew.get() {
            return anew.for_one_reader();
        }
        let here = self.here.for_one_reader()?;
        Some(Box::new(WholeSource { here, shared: Arc::clone(&self.shared) }))
    }

    fn beside(&self, name: &str, cancel: &dyn Cancel) -> Result<Option<Arc<dyn ReadAt>>> {
        self.shared.origin.server.beside(name, cancel)
    }

    fn headers(&self) -> &[(String, String)] {
        self.shared.origin.server.headers()
    }

    fn known_head(&self) -> Option<KnownHead> {
        self.shared.origin.server.known_head()
    }

    fn copy(&self) -> Option<PathBuf> {
        self.shared.anew.get().is_none().then(|| self.shared.entry.path().to_owned())
    }

    fn distrust_copy(&self, remove: bool, cancel: &dyn Cancel) -> Option<PathBuf> {
        let Whole { origin, entry, anew } = &*self.shared;
        distrust(origin, entry, anew, remove, cancel)
    }

    fn file(&self) -> Option<&File> {
        self.here.file().filter(|_| self.shared.anew.get().is_none())
    }
}

impl CachedSource {
    /// Reads bytes that are here; an error or none says that they are not.
    fn read_here(
        &self,
        range: &Range<u64>,
        buffers: &mut Buffers<'_>,
        cancel: &dyn Cancel,
    ) -> std::io::Result<usize> {
        let read = buffers.tee(len(range), &mut [], &mut [], |part, _| {
            sys::read_vectored_at(self.entry.file(), range.start, part).map(drop)
        })?;
        cancel.moved(read as u64);
        Ok(read)
    }

    /// Reads bytes from the server, and keeps them: with others of the same chunks, so that none is
    /// asked for again.
    fn bring(
        &self,
        range: &Range<u64>,
        buffers: &mut Buffers<'_>,
        cancel: &dyn Cancel,
    ) -> Result<usize> {
        let whole = self.entry.whole_chunks(range);
        let mut before = vec![0; len(&(whole.start..range.start))];
        let mut behind = vec![0; len(&(range.end..whole.end))];
        buffers.tee(len(range), &mut before, &mut behind, |part, filled| {
            let keeping = Keeping {
                entry: &self.entry,
                start: whole.start,
                filled,
                kept: AtomicUsize::new(0),
                cancel,
            };
            let what = || "tensors".to_owned();
            let read = read_exact_at(&*self.origin.server, whole.start, part, &what, &keeping);
            keeping.keep(1);
            read
        })
    }
}

/// Has an entry read no more; gives its path the first time.
fn distrust(
    origin: &Origin,
    entry: &Entry,
    anew: &OnceLock<Arc<dyn ReadAt>>,
    remove: bool,
    cancel: &dyn Cancel,
) -> Option<PathBuf> {
    let mut first = false;
    anew.get_or_init(|| {
        first = true;
        if remove {
            origin.afresh(entry.path(), entry.file(), cancel)
        } else {
            Arc::clone(&origin.server)
        }
    });
    if remove && !first {
        remove_own(entry.path(), entry.file());
    }
    first.then(|| entry.path().to_owned())
}

/// Bytes are kept while they arrive: the connection goes on meanwhile.
const KEPT_AT_ONCE: usize = 4 << 20;

/// Keeps what a request has brought, as it is told of bytes.
struct Keeping<'k> {
    entry: &'k Entry,
    /// Position of the first byte.
    start: u64,
    filled: &'k Filled<'k>,
    kept: AtomicUsize,
    cancel: &'k dyn Cancel,
}

impl Keeping<'_> {
    /// Keeps what is new, if it is that much.
    fn keep(&self, least: usize) {
        let kept = self.kept.load(Ordering::Relaxed);
        let end = self.entry.whole_until(self.start, self.filled.count());
        if end.saturating_sub(kept) < least || self.entry.is_given_up() {
            return;
        }
        if self.entry.keep(self.start + kept as u64, &self.filled.bytes(kept..end)).is_err() {
            // Such as a full disk: what was told of is here, and the rest is not needed.
            self.entry.give_up();
        }
        self.kept.store(end, Ordering::Relaxed);
    }
}

impl Cancel for Keeping<'_> {
    fn check(&self) -> Result<()> {
        self.cancel.check()
    }

    fn moved(&self, bytes: u64) {
        self.cancel.moved(bytes);
        self.keep(KEPT_AT_ONCE);
    }
}

fn len(range: &Range<u64>) -> usize {
    usize::try_from(range.end - range.start).unwrap_or(usize::MAX)
}

impl ReadAt for CachedSource {
    fn uri(&self) -> &str {
        self.origin.server.uri()
    }

    fn traits(&self) -> Traits {
        self.origin.server.traits()
    }

    fn limit_memory(&self, limit: MemoryLimit) {
        self.origin.server.limit_memory(limit);
    }

    fn read_at(
        &self,
        offset: u64,
        buffers: &mut Buffers<'_>,
        cancel: &dyn Cancel,
    ) -> Result<usize> {
        let end = offset.saturating_add(buffers.left() as u64).min(self.entry.len());
        if end <= offset {
            return Ok(0);
        }
        if let Some(anew) = self.anew.get() {
            return anew.read_at(offset, buffers, cancel);
        }
        let begun = Instant::now();
        while !self.entry.is_given_up() {
            let Ok(found) = self.entry.look(&(offset..end)) else { break };
            let missing = match found {
                Found::Here(until) => match self.read_here(&(offset..until), buffers, cancel) {
                    Ok(read) if read > 0 => return Ok(read),
                    Err(e) if e.kind() == std::io::ErrorKind::Interrupted => continue,
                    _ => break,
                },
                Found::Missing(until) => offset..until,
            };
            // Who cannot claim, or has waited for long, asks for it although others may.
            let claimed = match self.entry.claim(&missing) {
                Ok(None) if !self.impatient.load(Ordering::Relaxed) => {
                    let late = begun.elapsed() >= self.origin.patience;
                    self.impatient.fetch_or(late, Ordering::Relaxed);
                    cancel::sleep(LOOK, cancel)?;
                    continue;
                }
                Ok(claimed) => claimed,
                Err(_) => None,
            };
            let Some((claim, until)) = claimed else {
                return self.bring(&missing, buffers, cancel);
            };
            // It may have come since it was looked for.
            if let Ok(Found::Here(_)) = self.entry.look(&missing) {
                continue;
            }
            let read = self.bring(&(offset..until), buffers, cancel);
            drop(claim);
            return read;
        }
        self.entry.give_up();
        self.origin.server.read_at(offset, buffers, cancel)
    }

    fn beside(&self, name: &str, cancel: &dyn Cancel) -> Result<Option<Arc<dyn ReadAt>>> {
        self.origin.server.beside(name, cancel)
    }

    fn headers(&self) -> &[(String, String)] {
        self.origin.server.headers()
    }

    fn known_head(&self) -> Option<KnownHead> {
        self.origin.server.known_head()
    }

    fn copy(&self) -> Option<PathBuf> {
        let read = !self.entry.is_given_up() && self.anew.get().is_none();
        read.then(|| self.entry.path().to_owned())
    }

    fn distrust_copy(&self, remove: bool, cancel: &dyn Cancel) -> Option<PathBuf> {
        distrust(&self.origin, &self.entry, &self.anew, remove, cancel)
    }
}
