//! Fetching the bytes of an entry, in the order of the file. One process at a time does it; several
//! of its threads fetch consecutive segments. Any other process may continue when it ends.

use std::collections::BTreeMap;
use std::io;
use std::ops::Range;
use std::sync::{Condvar, Mutex};
use std::time::{Duration, Instant};

use super::entry::CacheEntry;
use crate::mem::FilledPart;
use crate::sys;
use crate::sys::sync::unpoisoned;

/// Maximum number of bytes next to the wanted ones that one request fetches with them.
const MAX_EXTRA: u64 = 4 << 20;
/// Minimum length of a segment that is fetched because later bytes are wanted.
const MIN_AHEAD: u64 = 1 << 20;
/// Bytes that are written at once while others arrive; fewer if they have taken this time: other
/// processes wait only as long as bytes arrive.
const WRITE_STEP: usize = 4 << 20;
const WRITE_TIME: Duration = Duration::from_secs(1);

/// An entry that this process may be filling.
pub struct FillingEntry {
    pub entry: CacheEntry,
    /// Locked by threads of the process that made it alone: a forked child may inherit it locked.
    fill: Mutex<Fill>,
    /// Notified when bytes of this process's threads have arrived, or when they end.
    arrival: Condvar,
}

/// Its bytes that have arrived, and those that are being fetched.
#[derive(Default)]
struct Fill {
    /// Bytes that have arrived, from the first on.
    arrived: u64,
    /// Segments behind these, by their starts: the ends of their bytes that were written, and their
    /// ends.
    segments: BTreeMap<u64, (u64, u64)>,
    /// Segments that threads of this process are fetching. The lock is held meanwhile.
    fetching: usize,
}

impl Fill {
    /// The first range that no thread has fetched or is fetching.
    fn next(&self, len: u64) -> Range<u64> {
        let mut at = self.arrived;
        for (&start, &(_, end)) in &self.segments {
            if start > at {
                return at..start;
            }
            at = at.max(end);
        }
        at..len
    }

    /// Notes that the bytes of a segment were written up to a position. Returns true if more bytes
    /// have arrived from the first on.
    fn written(&mut self, start: u64, until: u64) -> bool {
        let before = self.arrived;
        if let Some((written, _)) = self.segments.get_mut(&start) {
            *written = until;
        }
        for (&start, &(written, _)) in &self.segments {
            if start <= self.arrived {
                self.arrived = self.arrived.max(written);
            }
        }
        self.arrived > before
    }

    /// Ends the fetch of a segment. What was not written of it can be fetched again.
    fn end(&mut self, start: u64) {
        self.fetching = self.fetching.saturating_sub(1);
        if let Some((written, end)) = self.segments.get_mut(&start) {
            *end = *written;
        }
        let arrived = self.arrived;
        self.segments.retain(|start, (_, end)| *end > arrived && *end > *start);
    }
}

/// The answer to a thread that wants bytes that have not arrived.
pub enum Claim<'e> {
    /// It fetches this segment, which may end before the wanted bytes.
    Fetch(Segment<'e>),
    /// They may have arrived, or other threads of this process are fetching them.
    Wait,
    /// Another process is fetching.
    OtherProcess,
}

/// A segment that this thread fetches.
pub struct Segment<'e> {
    entry: &'e FillingEntry,
    pub range: Range<u64>,
    /// The number of its bytes that were written, and the time of the last write.
    written: Mutex<(usize, Instant)>,
}

impl FillingEntry {
    pub fn new(entry: CacheEntry) -> Self {
        FillingEntry { entry, fill: Mutex::default(), arrival: Condvar::new() }
    }

    /// True if threads of this process are fetching all of these bytes that have not arrived.
    pub fn is_fetching(&self, wanted: &Range<u64>) -> bool {
        let fill = unpoisoned(self.fill.lock());
        fill.fetching > 0 && fill.next(self.entry.version.len).start >= wanted.end
    }

    /// Waits until a thread of this process has fetched more, at most for this time.
    pub fn wait(&self, time: Duration) {
        drop(unpoisoned(self.arrival.wait_timeout(unpoisoned(self.fill.lock()), time)));
    }

    /// The number of bytes that have arrived, from the first on.
    pub fn arrived(&self) -> u64 {
        let mut fill = unpoisoned(self.fill.lock());
        self.update(&mut fill)
    }

    /// Takes over what other processes have fetched; none does while this one holds the lock.
    fn update(&self, fill: &mut Fill) -> u64 {
        if fill.fetching == 0 && fill.arrived < self.entry.version.len {
            fill.arrived = fill.arrived.max(self.entry.arrived());
        }
        fill.arrived
    }

    /// Claims the next segment for a thread that wants these bytes, and has memory for `room` bytes.
    pub fn claim(&self, wanted: &Range<u64>, room: usize) -> io::Result<Claim<'_>> {
        let mut fill = unpoisoned(self.fill.lock());
        if fill.fetching == 0 {
            if !sys::try_lock_fetch(&self.entry.file)? {
                return Ok(Claim::OtherProcess);
            }
            // Another process may have fetched more, and fetches again what was not counted.
            self.update(&mut fill);
            fill.segments.clear();
        }
        let next = fill.next(self.entry.version.len);
        if next.start > wanted.start {
            if fill.fetching == 0 {
                sys::unlock_fetch(&self.entry.file);
            }
            return Ok(Claim::Wait);
        }
        let range = next.start..segment_end(&next, wanted, room as u64, self.entry.version.len);
        fill.segments.insert(range.start, (range.start, range.end));
        fill.fetching += 1;
        let written = Mutex::new((0, Instant::now()));
        Ok(Claim::Fetch(Segment { entry: self, range, written }))
    }
}

/// The end of the next segment: before the wanted bytes if they are far, else behind them.
fn segment_end(next: &Range<u64>, wanted: &Range<u64>, room: u64, len: u64) -> u64 {
    if wanted.start.saturating_sub(next.start) > MAX_EXTRA {
        let end = next.start.saturating_add(room.max(MIN_AHEAD));
        return end.min(wanted.start).min(next.end);
    }
    if next.end == len && len - wanted.end <= MAX_EXTRA { len } else { wanted.end.min(next.end) }
}

impl Segment<'_> {
    /// Writes the new bytes of those that have arrived, if they are many or the last ones.
    pub fn write(&self, filled: &FilledPart<'_>, is_last: bool) -> io::Result<()> {
        let (mut written, count) = (unpoisoned(self.written.lock()), filled.count());
        let (before, at) = *written;
        let min_bytes = if is_last || at.elapsed() >= WRITE_TIME { 1 } else { WRITE_STEP };
        if count.saturating_sub(before) < min_bytes {
            return Ok(());
        }
        self.entry.entry.write(self.range.start + before as u64, filled.bytes(before..count))?;
        *written = (count, Instant::now());
        let mut fill = unpoisoned(self.entry.fill.lock());
        if fill.written(self.range.start, self.range.start + count as u64) {
            self.entry.entry.set_arrived(fill.arrived)?;
            self.entry.arrival.notify_all();
        }
        Ok(())
    }
}

/// Ends the fetch. The last one of this process lets other processes fetch.
impl Drop for Segment<'_> {
    fn drop(&mut self) {
        let mut fill = unpoisoned(self.entry.fill.lock());
        fill.end(self.range.start);
        if fill.fetching == 0 {
            sys::unlock_fetch(&self.entry.entry.file);
        }
        drop(fill);
        self.entry.arrival.notify_all();
    }
}
