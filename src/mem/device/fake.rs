//! A fake device in host memory, for tests. It delays copies, changes their order among streams,
//! and fails as [`InjectedFaults`] say. `unsafe` is allowed in this file: it copies through raw
//! pointers.
//!
//! A copy is not carried out when it is begun, but some time later, while events are queried or
//! other copies begun. So a buffer that was reused too early shows as wrong bytes. A random
//! generator with a seed decides which copies are late.
#![allow(unsafe_code)]

use std::collections::VecDeque;
use std::fs::File;
use std::os::unix::fs::FileExt as _;
use std::sync::{Arc, Mutex, MutexGuard, OnceLock};

use super::{Consumer, Device, DeviceFile, Event, Stream};
use crate::environment::FAKE_DEVICE;
use crate::error::{Error, Result};
use crate::sys::process::PerProcess;
use crate::sys::sync::unpoisoned;
use crate::sys::to_usize;

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

/// Returns the fake device that replaces the CPU, if the environment enables it.
pub fn instead_of_cpu() -> Result<Option<Arc<dyn Device>>> {
    static ONE: PerProcess<OnceLock<Arc<FakeDevice>>> = PerProcess::new();
    let seed = FAKE_DEVICE.value()?;
    let one = || FakeDevice::new(seed, InjectedFaults::default());
    Ok((seed > 0).then(|| Arc::clone(ONE.get().get_or_init(one)) as Arc<dyn Device>))
}

/// The fake of a CUDA device.
pub struct FakeDevice {
    state: Mutex<FakeState>,
    faults: InjectedFaults,
}

#[derive(Default)]
struct FakeState {
    random: u64,
    streams: Vec<StreamQueue>,
    /// Streams that are not lent.
    idle: Vec<usize>,
    copies: u64,
    events: u64,
    queries: u64,
    pinned: usize,
}

/// Copies of one stream that were begun but not carried out yet.
#[derive(Default)]
struct StreamQueue {
    waiting: VecDeque<PendingCopy>,
    begun: u64,
    done: u64,
}

struct PendingCopy {
    to: *mut u8,
    from: *const u8,
    len: usize,
}

// SAFETY: the caller that began the copy keeps both ranges until it was carried out, on whatever
// thread.
unsafe impl Send for PendingCopy {}

impl FakeDevice {
    /// Creates a device whose delays follow from the seed.
    pub fn new(seed: u64, faults: InjectedFaults) -> Arc<Self> {
        let state = FakeState { random: seed.max(1), ..FakeState::default() };
        Arc::new(FakeDevice { state: Mutex::new(state), faults })
    }

    fn state(&self) -> MutexGuard<'_, FakeState> {
        unpoisoned(self.state.lock())
    }

    /// Returns the number of ranges of host memory that are pinned now.
    #[cfg(test)]
    pub fn pinned(&self) -> usize {
        self.state().pinned
    }

    /// Returns the number of copies that were begun so far.
    #[cfg(test)]
    pub fn copies(&self) -> u64 {
        self.state().copies
    }

    /// Returns the number of copies that were begun and have not ended.
    #[cfg(test)]
    pub fn under_way(&self) -> usize {
        self.state().streams.iter().map(|queue| queue.waiting.len()).sum()
    }

    fn failure(what: &str) -> Error {
        Error::Device { device: "fake".to_owned(), what: what.to_owned() }
    }
}

impl FakeState {
    /// xorshift64 of Marsaglia (2003).
    fn random(&mut self) -> u64 {
        self.random ^= self.random << 13;
        self.random ^= self.random >> 7;
        self.random ^= self.random << 17;
        self.random
    }

    /// Lets time pass: one stream completes some copies.
    fn tick(&mut self) {
        let (choice, count) = (self.random(), self.random() % 3);
        let mut busy: Vec<&mut StreamQueue> =
            self.streams.iter_mut().filter(|queue| !queue.waiting.is_empty()).collect();
        let chosen = choice.checked_rem(busy.len() as u64).map(to_usize);
        if let Some(queue) = chosen.and_then(|at| busy.get_mut(at)) {
            queue.complete(count);
        }
    }
}

impl StreamQueue {
    fn complete(&mut self, count: u64) {
        for _ in 0..count {
            let Some(copy) = self.waiting.pop_front() else { return };
            // SAFETY: both ranges exist and are only ours until this copy was carried out: the
            // promise of the caller that began it.
            unsafe { copy.to.copy_from_nonoverlapping(copy.from, copy.len) };
            self.done += 1;
        }
    }
}

fn is_nth(counter: &mut u64, wanted: Option<u64>) -> bool {
    *counter += 1;
    wanted == Some(*counter)
}

impl Device for FakeDevice {
    fn name(&self) -> &str {
        "fake"
    }

    fn numa_node(&self) -> Option<usize> {
        self.faults.node
    }

    unsafe fn pin(&self, _: *mut u8, _: usize) -> bool {
        let pinned = !self.faults.pin;
        self.state().pinned += usize::from(pinned);
        pinned
    }

    unsafe fn unpin(&self, _: *mut u8) {
        self.state().pinned -= 1;
    }

    fn file(self: Arc<Self>, file: &File) -> Option<Box<dyn DeviceFile>> {
        Some(Box::new(FakeFile { file: file.try_clone().ok()?, wrong: self.faults.file }))
    }

    fn stream(self: Arc<Self>, _: Consumer) -> Result<Arc<dyn Stream>> {
        let number = {
            let mut state = self.state();
            state.idle.pop().unwrap_or_else(|| {
                state.streams.push(StreamQueue::default());
                state.streams.len() - 1
            })
        };
        Ok(Arc::new(FakeStream { device: self, number }))
    }

    /// Returns an event that has passed: the consumer is the CPU, which has ended what it has
    /// begun.
    fn record_event(self: Arc<Self>, _: Consumer) -> Result<Arc<dyn Event>> {
        Ok(Arc::new(FakeEvent { device: self, stream: usize::MAX, after: 0 }))
    }
}

/// A file that the fake device reads itself, some bytes at a time.
struct FakeFile {
    file: File,
    wrong: bool,
}

impl DeviceFile for FakeFile {
    unsafe fn read(&self, to: usize, len: usize, offset: u64) -> std::io::Result<usize> {
        let to = std::ptr::with_exposed_provenance_mut::<u8>(to);
        // SAFETY: the caller's promise; the memory of the fake device is host memory.
        let to = unsafe { std::slice::from_raw_parts_mut(to, len.min(100_000)) };
        let read = self.file.read_at(to, offset)?;
        if let Some(byte) = to.last_mut().filter(|_| self.wrong) {
            *byte ^= 1;
        }
        Ok(read)
    }
}

struct FakeStream {
    device: Arc<FakeDevice>,
    number: usize,
}

impl Drop for FakeStream {
    fn drop(&mut self) {
        self.device.state().idle.push(self.number);
    }
}

impl FakeStream {
    fn begin(&self, copy: PendingCopy) -> Result<()> {
        let mut state = self.device.state();
        if is_nth(&mut state.copies, self.device.faults.copy) {
            return Err(FakeDevice::failure("a copy could not be begun"));
        }
        state.tick();
        if let Some(queue) = state.streams.get_mut(self.number) {
            queue.begun += 1;
            queue.waiting.push_back(copy);
        }
        Ok(())
    }
}

impl Stream for FakeStream {
    fn handle(&self) -> usize {
        self.number
    }

    unsafe fn upload(&self, to: usize, from: *const u8, len: usize) -> Result<()> {
        self.begin(PendingCopy { to: std::ptr::with_exposed_provenance_mut(to), from, len })
    }

    unsafe fn download(&self, to: *mut u8, from: usize, len: usize) -> Result<()> {
        self.begin(PendingCopy { to, from: std::ptr::with_exposed_provenance(from), len })
    }

    fn record(&self) -> Result<Arc<dyn Event>> {
        let mut state = self.device.state();
        if is_nth(&mut state.events, self.device.faults.event) {
            return Err(FakeDevice::failure("an event could not be recorded"));
        }
        let after = state.streams.get(self.number).map_or(0, |queue| queue.begun);
        Ok(Arc::new(FakeEvent { device: Arc::clone(&self.device), stream: self.number, after }))
    }

    /// Waits: the consumer is the CPU, which cannot be made to wait later.
    fn hand_over(&self) -> Result<()> {
        self.finish()
    }

    fn finish(&self) -> Result<()> {
        if let Some(queue) = self.device.state().streams.get_mut(self.number) {
            queue.complete(u64::MAX);
        }
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
        if is_nth(&mut state.queries, self.device.faults.lost) {
            return Err(FakeDevice::failure("the device is lost"));
        }
        state.tick();
        Ok(state.streams.get(self.stream).is_none_or(|queue| queue.done >= self.after))
    }

    /// Carries the copies out now: the consumer is the CPU, which cannot be made to wait later.
    fn delay_stream(&self, _: usize) -> Result<()> {
        let mut state = self.device.state();
        if let Some(queue) = state.streams.get_mut(self.stream) {
            queue.complete(self.after.saturating_sub(queue.done));
        }
        Ok(())
    }
}
