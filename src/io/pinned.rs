//! Sources whose bytes are compared with the SHA-256 of their whole file while they are read.
//!
//! Bytes are hashed in the order of the file, whatever the order in which they are read: a reader
//! that is ahead waits until those before it are hashed, and reads bytes that no other one does.
//! Bytes that are read again are compared by the states of the hash around their chunks.

use std::sync::atomic::{AtomicBool, Ordering};
use std::sync::{Arc, Mutex};
use std::time::Duration;

use super::pin::{CHUNK, Pin, Range};
use super::{Capabilities, Facts, ReadAt, read_exact_at};
use crate::cancel::{Cancel, POLL};
use crate::error::{Error, Result};
use crate::fallible::try_zeroed;
use crate::mem::{Buffers, FilledPart};
use crate::sys::sync::unpoisoned;
use crate::sys::to_usize;

/// Bytes that a reader reads at once for others.
const PIECE: u64 = 8 << 20;
/// Bytes before its own that a reader reads at once, such as padding and headers, as no other reader
/// will. Before more, it waits for this time, as another reader may be about to read them.
const SMALL: u64 = 1 << 20;
const PATIENCE: Duration = POLL;

/// The error of a file that has another hash, which the next load hashes anew.
fn mismatch(pin: &Pin, facts: &Facts, found: String) -> Error {
    pin.reset();
    Error::FileHashMismatch {
        uri: facts.uri.clone(),
        expected: pin.expected().into(),
        found: found.into(),
        kept: facts.local_copy().map_or_else(Box::default, |copy| {
            let path = copy.path.display();
            let what = "remove that file to have it downloaded again";
            format!("; they were read from the local copy `{path}`: {what}").into()
        }),
    }
}

fn compare(pin: &Pin, facts: &Facts) -> Result<()> {
    pin.disagrees().map_or(Ok(()), |found| Err(mismatch(pin, facts, found)))
}

/// Compares all bytes of a file.
pub fn compare_all(pin: &Pin, bytes: &[u8], facts: &Facts) -> Result<()> {
    pin.advance(bytes);
    compare(pin, facts)
}

/// Hands out the bytes of a pinned file. It cannot be mapped, because the bytes of a mapping may
/// change later.
pub struct PinnedSource {
    facts: Facts,
    source: Arc<dyn ReadAt>,
    pin: Arc<Pin>,
}

impl PinnedSource {
    pub fn new(source: Arc<dyn ReadAt>, pin: Arc<Pin>) -> Self {
        let pinned = Some(Arc::clone(&pin));
        let facts = Facts { is_local: false, pin: pinned, ..source.facts().clone() };
        PinnedSource { facts, source, pin }
    }

    fn len(&self) -> u64 {
        self.facts.len.unwrap_or(u64::MAX)
    }

    /// Waits until the bytes before a position are hashed. Reads those that no other reader reads;
    /// if they are many, when no reader has begun with them for this time.
    fn reach(&self, target: u64, mut patience: Duration, cancel: &dyn Cancel) -> Result<()> {
        let (pin, mut hashed) = (&*self.pin, self.pin.hashed());
        while hashed.position < target {
            let start = hashed.position;
            let next = hashed.reading.keys().next().copied().unwrap_or(u64::MAX);
            let waits = target - start > SMALL && hashed.moved.elapsed() < patience;
            if next <= start || waits {
                drop(hashed);
                cancel.check()?;
                pin.wait();
                hashed = pin.hashed();
                continue;
            }
            let end = target.min(next).min(start + PIECE);
            hashed.reading.insert(start, end);
            drop(hashed);
            let range = Range { pin, start };
            let mut bytes = try_zeroed(to_usize(end - start), "bytes that are hashed")?;
            let read = self.source.read_at(start, &mut Buffers::from_slice(&mut bytes), cancel)?;
            if read == 0 {
                return Ok(());
            }
            pin.advance(bytes.get(..read).unwrap_or(&[]));
            drop(range);
            // No other reader has begun with the rest.
            patience = Duration::ZERO;
            hashed = pin.hashed();
        }
        Ok(())
    }

    /// Reads bytes that were hashed before, and compares their chunks.
    fn read_again(
        &self,
        offset: u64,
        into: &mut Buffers<'_>,
        cancel: &dyn Cancel,
    ) -> Result<usize> {
        let start = offset - offset % CHUNK;
        self.reach(self.len().min(start + CHUNK), Duration::ZERO, cancel)?;
        let position = self.pin.position();
        let complete = if position == self.len() { position } else { position - position % CHUNK };
        if complete <= offset {
            return Ok(0);
        }
        let end = offset.saturating_add(into.remaining() as u64).min(complete);
        let stop = end.next_multiple_of(CHUNK).min(complete);
        let zeroed = |bytes: u64| try_zeroed(to_usize(bytes), "a chunk");
        let (mut before, mut after) = (zeroed(offset - start)?, zeroed(stop - end)?);
        let difference = Mutex::new(None);
        let compare = |filled: &FilledPart<'_>, last: bool| {
            // A read that has failed reports its own error.
            if last && filled.count() as u64 == stop - start {
                *unpoisoned(difference.lock()) = self.pin.difference(start, stop, filled);
            }
        };
        let read =
            into.tee(to_usize(end - offset), (&mut before, &mut after), compare, |part| {
                let what = "bytes that were compared with a checksum";
                read_exact_at(&*self.source, start, part, what, cancel)
            })?;
        match unpoisoned(difference.into_inner()) {
            None => Ok(read),
            Some(at) => {
                let end = stop.min(at + CHUNK);
                let what = format!(
                    "changed since they were compared with it: those from {at} to {end} differ"
                );
                Err(mismatch(&self.pin, &self.facts, what))
            }
        }
    }

    /// Takes a range that nothing has hashed or reads; None if its first byte was hashed.
    fn take(&self, offset: u64, len: u64, cancel: &dyn Cancel) -> Result<Option<(Range<'_>, u64)>> {
        let pin = &*self.pin;
        let mut hashed = pin.hashed();
        while offset >= hashed.position {
            let (before, next) = (hashed.reading.range(..=offset), hashed.reading.range(offset..));
            if before.last().is_none_or(|(_, end)| *end <= offset) {
                let next = next.map(|(start, _)| *start).next().unwrap_or(u64::MAX);
                let end = offset.saturating_add(len).min(next).min(self.len());
                hashed.reading.insert(offset, end);
                return Ok(Some((Range { pin, start: offset }, end)));
            }
            drop(hashed);
            cancel.check()?;
            pin.wait();
            hashed = pin.hashed();
        }
        Ok(None)
    }
}

impl ReadAt for PinnedSource {
    fn facts(&self) -> &Facts {
        &self.facts
    }

    fn capabilities(&self) -> Capabilities {
        self.source.capabilities()
    }

    fn read_at(&self, offset: u64, into: &mut Buffers<'_>, cancel: &dyn Cancel) -> Result<usize> {
        let (pin, len) = (&*self.pin, into.remaining() as u64);
        if len == 0 || offset >= self.len() {
            return Ok(0);
        }
        let Some((range, end)) = self.take(offset, len, cancel)? else {
            return self.read_again(offset, into, cancel);
        };
        if self.source.capabilities().max_readers == 1 {
            self.reach(offset, Duration::ZERO, cancel)?;
        }
        let (is_read, outcome) = (AtomicBool::new(false), Mutex::new(Ok(())));
        let hash = |filled: &FilledPart<'_>, last: bool| {
            if last && is_read.load(Ordering::Relaxed) {
                let reached = self.reach(offset, PATIENCE, cancel);
                if reached.is_ok() {
                    filled.bytes(0..filled.count()).iter().for_each(|part| pin.advance(part));
                }
                *unpoisoned(outcome.lock()) = reached;
            }
        };
        let read = into.tee(to_usize(end - offset), (&mut [], &mut []), hash, |part| {
            self.source.read_at(offset, part, cancel)?;
            is_read.store(true, Ordering::Relaxed);
            Ok::<_, Error>(())
        })?;
        drop(range);
        unpoisoned(outcome.into_inner()).map(|()| read)
    }
}

/// Reads the rest of a pinned file, and compares its hash, unless that was done before.
pub fn agree(source: &dyn ReadAt, cancel: &dyn Cancel) -> Result<()> {
    let Some(pin) = source.facts().pin.as_ref().filter(|pin| !pin.has_agreed()) else {
        return Ok(());
    };
    let mut bytes = try_zeroed(to_usize(PIECE), "bytes that are hashed")?;
    while source.read_at(pin.position(), &mut Buffers::from_slice(&mut bytes), cancel)? > 0 {}
    compare(pin, source.facts())
}

#[cfg(test)]
#[allow(clippy::cast_possible_truncation)]
mod tests {
    use super::*;
    use crate::cancel::Never;
    use crate::codec::sha256::Sha256;
    use crate::io::MemorySource;

    fn bytes() -> Vec<u8> {
        (0..1_000_000u32).map(|number| (number % 251) as u8).collect()
    }

    fn pinned(bytes: &[u8], expected: &[u8]) -> PinnedSource {
        let mut sha = Sha256::default();
        sha.update(expected);
        let source = Arc::new(MemorySource::new(bytes.to_vec(), "f".to_owned()));
        PinnedSource::new(source, Pin::new(sha.finish(), "the test expects"))
    }

    fn read(source: &PinnedSource, offset: usize, len: usize) -> Vec<u8> {
        let mut into = vec![0; len];
        let mut buffers = Buffers::from_slice(&mut into);
        read_exact_at(source, offset as u64, &mut buffers, "bytes", &Never).unwrap();
        into
    }

    #[test]
    fn bytes_are_hashed_once_in_any_order_of_reads() {
        let bytes = bytes();
        let source = pinned(&bytes, &bytes);
        std::thread::scope(|scope| {
            for offset in [700_000, 0, 300_000, 299_999, 5] {
                let (source, bytes) = (&source, &bytes);
                scope.spawn(move || {
                    assert_eq!(
                        Some(&*read(source, offset, 300_000)),
                        bytes.get(offset..offset + 300_000)
                    );
                });
            }
        });
        assert_eq!(source.pin.position(), 1_000_000);
        agree(&source, &Never).unwrap();
        assert_eq!(Some(&*read(&source, 131_000, 200)), bytes.get(131_000..131_200));
        assert_eq!(Some(&*read(&source, 999_990, 10)), bytes.get(999_990..));
    }

    #[test]
    fn other_bytes_do_not_agree() {
        let bytes = bytes();
        let mut other = bytes.clone();
        other.swap(999_998, 999_999);
        let error = agree(&pinned(&other, &bytes), &Never).unwrap_err().to_string();
        assert!(error.contains("`f` failed SHA256 verification: the test expects "), "{error}");
    }

    #[test]
    fn bytes_that_change_after_they_were_hashed_are_not_handed_out() {
        let bytes = bytes();
        for at in [0, 131_072, 999_999] {
            let source = pinned(&bytes, &bytes);
            agree(&source, &Never).unwrap();
            let mut other = bytes.clone();
            if let Some(byte) = other.get_mut(at) {
                *byte ^= 1;
            }
            let changed = Arc::new(MemorySource::new(other, "f".to_owned()));
            let changed = PinnedSource::new(changed, Arc::clone(&source.pin));
            let mut into = [0; 1];
            let read = changed.read_at(at as u64, &mut Buffers::from_slice(&mut into), &Never);
            let error = read.unwrap_err().to_string();
            assert!(error.contains(&format!("those from {} to ", at - at % 131_072)), "{error}");
        }
    }
}
