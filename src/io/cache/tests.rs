//! A cache before a server in memory.

use std::sync::Arc;
use std::sync::atomic::{AtomicU64, Ordering};
use std::thread;
use std::time::Duration;

use super::entry::FileVersion;
use super::*;
use crate::cancel::{Cancel, Never};
use crate::error::Result;
use crate::io::{CachedHead, Capabilities, Facts, MemorySource, ReadAt, ServerFile};
use crate::mem::Buffers;

/// A server in memory, which counts what it sends.
struct Server {
    facts: Facts,
    memory: MemorySource<Vec<u8>>,
    sent: AtomicU64,
    len: u64,
}

impl ReadAt for Server {
    fn facts(&self) -> &Facts {
        &self.facts
    }

    fn capabilities(&self) -> Capabilities {
        self.memory.capabilities()
    }

    fn read_at(&self, offset: u64, into: &mut Buffers<'_>, cancel: &dyn Cancel) -> Result<usize> {
        let read = self.memory.read_at(offset, into, cancel)?;
        into.arrived(read as u64);
        self.sent.fetch_add(read as u64, Ordering::Relaxed);
        Ok(read)
    }
}

struct Twin {
    folder: tempfile::TempDir,
    bytes: Vec<u8>,
    server: Arc<Server>,
}

impl Twin {
    fn new(len: usize) -> Self {
        let bytes: Vec<u8> = (0..len).map(|at| (at / 1000 + at % 251) as u8).collect();
        let memory = MemorySource::new(bytes.clone(), "http://server/f".to_owned());
        let (tag, uri, len) = (Some("\"tag\"".to_owned()), memory.facts().uri.clone(), len as u64);
        let (modified, headers, first) = (None, Vec::new(), Arc::default());
        let head = Some(CachedHead { uri, len, tag, modified, headers, first });
        let facts = memory.facts().clone();
        let facts = Facts { server: Some(ServerFile { head, ..ServerFile::default() }), ..facts };
        let server = Arc::new(Server { facts, memory, sent: AtomicU64::new(0), len });
        let folder = tempfile::tempdir().unwrap();
        Twin { folder, bytes, server }
    }

    fn open(&self) -> Arc<dyn ReadAt> {
        let cache = Cache::at(self.folder.path().join("cache")).unwrap();
        let server = Arc::clone(&self.server) as Arc<dyn ReadAt>;
        cache.wrap(server, "f", None, Duration::from_millis(50)).unwrap()
    }

    /// Opens it as a call that wants all of it does.
    fn open_all(&self) -> Arc<dyn ReadAt> {
        let source = self.open();
        // To the end of the test.
        std::mem::forget(source.facts().will_read(self.server.len));
        source
    }

    fn check(&self, source: &dyn ReadAt, offset: usize, len: usize) {
        let mut read = vec![0; len];
        let mut buffers = Buffers::from_slice(&mut read);
        crate::io::read_exact_at(source, offset as u64, &mut buffers, "a range", &Never).unwrap();
        assert!(read == self.bytes[offset..offset + len], "{len} bytes from {offset}");
    }

    fn sent(&self) -> u64 {
        self.server.sent.load(Ordering::Relaxed)
    }

    fn present(&self) -> Vec<u64> {
        let cache = Cache::at(self.folder.path().join("cache")).unwrap();
        cache.entries().unwrap().iter().map(|cached| cached.present).collect()
    }
}

const MB: usize = 1 << 20;

#[test]
fn readers_in_any_order_fetch_each_byte_once() {
    let twin = Twin::new(24 * MB + 17);
    let sources = [twin.open_all(), twin.open_all()];
    for source in &sources {
        thread::scope(|scope| {
            for offset in [20, 3, 12, 0, 8, 16] {
                let (twin, source) = (&twin, &**source);
                scope.spawn(move || twin.check(source, offset * MB, 4 * MB));
            }
        });
    }
    assert_eq!(twin.sent(), twin.server.len);
    assert_eq!(twin.present(), [twin.server.len]);
    twin.check(&*twin.open(), 5, 24 * MB);
    assert_eq!(twin.sent(), twin.server.len);
}

#[test]
fn a_call_that_wants_less_than_half_reads_past_the_cache() {
    let twin = Twin::new(20 * MB);
    let source = twin.open();
    assert!(source.facts().will_read(10 * MB as u64 - 1).is_none());
    twin.check(&*source, MB, 9 * MB);
    assert!(source.facts().fallback().unwrap().starts_with("read past the cache"));
    assert_eq!((twin.present(), twin.sent()), (Vec::new(), 9 * MB as u64));
    // Half of it is enough. The other half is left to the next call, of any source.
    let wanted = source.facts().will_read(10 * MB as u64);
    twin.check(&*source, MB, 9 * MB);
    assert_eq!((twin.present(), source.facts().fallback()), (vec![10 * MB as u64], None));
    drop(wanted);
    let other = twin.open();
    twin.check(&*other, 0, 12 * MB);
    assert_eq!((twin.present(), twin.sent()), (vec![10 * MB as u64], 21 * MB as u64));
    twin.check(&*twin.open_all(), 0, 20 * MB);
    assert_eq!((twin.present(), twin.sent()), (vec![20 * MB as u64], 31 * MB as u64));
}

#[test]
fn another_one_continues_where_a_fetch_has_ended() {
    let twin = Twin::new(32 * MB);
    let version = FileVersion::of(&*twin.server, "f").unwrap();
    let cache = Cache::at(twin.folder.path().join("cache")).unwrap();
    cache.check_folder().unwrap();
    let opened = cache.open(&version, "http://server/f", &Never).unwrap();
    let entry = fill::FillingEntry::new(opened);
    let claim = |start: usize| {
        let wanted = (start * MB) as u64..((start + 8) * MB) as u64;
        match entry.claim(&wanted, 8 * MB).unwrap() {
            fill::Claim::Fetch(segment) => Some(segment),
            _ => None,
        }
    };
    let (first, second) = (claim(0).unwrap(), claim(8).unwrap());
    assert_eq!((&first.range, &second.range), (&(0..8 << 20), &(8 << 20..16 << 20)));
    assert!(claim(4).is_none(), "both are being fetched");
    // While they are, a source of another process waits, and then reads past the cache.
    let waiting = twin.open_all();
    twin.check(&*waiting, 0, MB);
    assert!(waiting.facts().fallback().unwrap().contains("does not keep all of http://server/f"));
    // A segment that ended early is fetched again, before all that is behind it.
    drop(first);
    assert_eq!(claim(20).unwrap().range, 0..8 << 20);
    drop(second);
    let before = twin.sent();
    twin.check(&*twin.open_all(), 0, 32 * MB);
    assert_eq!((twin.sent() - before, twin.present()), (32 << 20, vec![32 << 20]));
}
