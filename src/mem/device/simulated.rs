//! A device in host memory, for the tests of the core. It fails as [`InjectedFaults`] say. `unsafe`
//! is allowed in this file: it copies through raw pointers.
//!
//! A copy is not carried out when it is begun, but some time later, while events are queried or
//! other copies begun. So a buffer that was reused too early shows as wrong bytes. A random
//! generator with a seed decides which copies are late, and the order among streams.
#![allow(unsafe_code)]
#![allow(clippy::unwrap_used, clippy::cast_possible_truncation)]

use std::fs::File;
use std::os::unix::fs::FileExt as _;
use std::ptr;
use std::sync::{Arc, Mutex, MutexGuard};

use super::{Consumer, Device, DeviceFile, Event, HostToDeviceCopy, Stream};
use crate::error::{Error, Result};

/// The faults of the fake device.
#[derive(Debug, Clone, Copy, Default)]
pub struct InjectedFaults {
    /// The number of the copy that cannot be begun.
    pub copy: Option<u64>,
    /// The number of the event that cannot be recorded.
    pub event: Option<u64>,
    /// The number of the event query that finds the device lost.
    pub lost: Option<u64>,
    /// True if host memory cannot be pinned.
    pub pin: bool,
    /// True if the device reads wrong bytes from files.
    pub file: bool,
    /// The NUMA node that it is attached to.
    pub node: Option<usize>,
}

/// The fake of a device.
pub struct FakeDevice(Mutex<FakeState>, InjectedFaults);

#[derive(Default)]
struct FakeState {
    random: u64,
    streams: usize,
    /// Copies that were begun but not carried out yet.
    waiting: Vec<PendingCopy>,
    copies: u64,
    events: u64,
    queries: u64,
    pinned: usize,
}

#[derive(Clone, Copy)]
struct PendingCopy {
    stream: usize,
    number: u64,
    to: usize,
    from: usize,
    len: usize,
}

impl FakeDevice {
    /// Creates a device whose delays follow from the seed.
    pub fn new(seed: u64, faults: InjectedFaults) -> Arc<Self> {
        let state = FakeState { random: seed.max(1), ..FakeState::default() };
        Arc::new(FakeDevice(Mutex::new(state), faults))
    }

    fn state(&self) -> MutexGuard<'_, FakeState> {
        self.0.lock().unwrap()
    }

    /// Returns the number of ranges of host memory that are pinned now.
    pub fn pinned(&self) -> usize {
        self.state().pinned
    }

    /// Returns the number of copies that were begun so far.
    pub fn copies(&self) -> u64 {
        self.state().copies
    }

    /// Returns the number of copies that were begun and have not ended.
    pub fn under_way(&self) -> usize {
        self.state().waiting.len()
    }
}

impl FakeState {
    /// xorshift64 of Marsaglia (2003).
    fn random(&mut self) -> usize {
        self.random ^= self.random << 13;
        self.random ^= self.random >> 7;
        self.random ^= self.random << 17;
        self.random as usize
    }

    /// Lets time pass: one stream completes some copies.
    fn tick(&mut self) {
        let (choice, count) = (self.random() % self.waiting.len().max(1), self.random() % 3);
        let Some(&PendingCopy { stream, .. }) = self.waiting.get(choice) else { return };
        let due = self.waiting.iter().filter(|copy| copy.stream == stream).take(count).last();
        if let Some(last) = due.map(|copy| copy.number) {
            self.complete(stream, last);
        }
    }

    /// Completes the copies of a stream up to a number.
    fn complete(&mut self, stream: usize, last: u64) {
        self.waiting.retain(|&PendingCopy { stream: of, number, to, from, len }| {
            let due = of == stream && number <= last;
            if due {
                let from = ptr::with_exposed_provenance::<u8>(from);
                // SAFETY: both ranges exist and are only ours until this copy was carried out: the
                // promise of the caller that began it.
                unsafe {
                    ptr::with_exposed_provenance_mut::<u8>(to).copy_from_nonoverlapping(from, len);
                }
            }
            !due
        });
    }
}

/// Counts a call, and returns an error if it is the one to fail.
fn count(calls: &mut u64, failing: Option<u64>, what: &str) -> Result<()> {
    *calls += 1;
    if failing != Some(*calls) {
        return Ok(());
    }
    Err(Error::Device { device: "fake".to_owned(), what: what.to_owned() })
}

impl Device for FakeDevice {
    fn name(&self) -> &str {
        "fake"
    }

    fn numa_node(&self) -> Option<usize> {
        self.1.node
    }

    unsafe fn pin(&self, _: *mut u8, _: usize) -> bool {
        self.state().pinned += usize::from(!self.1.pin);
        !self.1.pin
    }

    unsafe fn unpin(&self, _: *mut u8) {
        self.state().pinned -= 1;
    }

    fn file(self: Arc<Self>, file: &File) -> Option<Box<dyn DeviceFile>> {
        Some(Box::new(FakeFile(file.try_clone().unwrap(), self.1.file)))
    }

    fn stream(self: Arc<Self>, _: Consumer) -> Result<Arc<dyn Stream>> {
        self.state().streams += 1;
        let number = self.state().streams;
        Ok(Arc::new(FakeStream(self, number)))
    }

    /// Returns an event that has passed: the consumer is the CPU, which has ended what it has
    /// begun.
    fn record_event(self: Arc<Self>, _: Consumer) -> Result<Arc<dyn Event>> {
        Ok(Arc::new(FakeEvent { device: self, stream: 0, after: 0 }))
    }
}

/// A file that the fake device reads itself, some bytes at a time; true if they are wrong.
struct FakeFile(File, bool);

impl DeviceFile for FakeFile {
    unsafe fn read(&self, to: usize, len: usize, offset: u64) -> std::io::Result<usize> {
        let to = ptr::with_exposed_provenance_mut::<u8>(to);
        // SAFETY: the caller's promise; the memory of the fake device is host memory.
        let to = unsafe { std::slice::from_raw_parts_mut(to, len.min(100_000)) };
        let read = self.0.read_at(to, offset)?;
        if let Some(byte) = to.last_mut().filter(|_| self.1) {
            *byte ^= 1;
        }
        Ok(read)
    }
}

struct FakeStream(Arc<FakeDevice>, usize);

impl FakeStream {
    fn begin(&self, to: usize, from: usize, len: usize) -> Result<()> {
        let mut state = self.0.state();
        count(&mut state.copies, self.0.1.copy, "a copy could not be begun")?;
        state.tick();
        let number = state.copies;
        state.waiting.push(PendingCopy { stream: self.1, number, to, from, len });
        Ok(())
    }
}

impl Stream for FakeStream {
    fn handle(&self) -> usize {
        self.1
    }

    unsafe fn upload_batch(&self, copies: &[HostToDeviceCopy]) -> Result<()> {
        let mut copies = copies.iter();
        copies.try_for_each(|copy| self.begin(copy.to, copy.from.expose_provenance(), copy.len))
    }

    unsafe fn download(&self, to: *mut u8, from: usize, len: usize) -> Result<()> {
        self.begin(to.expose_provenance(), from, len)
    }

    fn record(&self) -> Result<Arc<dyn Event>> {
        let mut state = self.0.state();
        count(&mut state.events, self.0.1.event, "an event could not be recorded")?;
        let after = state.copies;
        Ok(Arc::new(FakeEvent { device: Arc::clone(&self.0), stream: self.1, after }))
    }

    /// Waits: the consumer is the CPU, which cannot be made to wait later.
    fn hand_over(&self) -> Result<()> {
        self.finish()
    }

    fn finish(&self) -> Result<()> {
        self.0.state().complete(self.1, u64::MAX);
        Ok(())
    }
}

struct FakeEvent {
    device: Arc<FakeDevice>,
    stream: usize,
    after: u64,
}

impl Event for FakeEvent {
    fn passed(&self) -> Result<bool> {
        let mut state = self.device.state();
        count(&mut state.queries, self.device.1.lost, "the device is lost")?;
        state.tick();
        Ok(!state
            .waiting
            .iter()
            .any(|copy| copy.stream == self.stream && copy.number <= self.after))
    }

    /// Carries the copies out now: the consumer is the CPU, which cannot be made to wait later.
    fn delay_stream(&self, _: usize) -> Result<()> {
        self.device.state().complete(self.stream, self.after);
        Ok(())
    }
}
