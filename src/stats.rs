//! What a load or a save did, for whoever asks why it took so long.

use std::cell::RefCell;
use std::collections::VecDeque;
use std::sync::atomic::{AtomicBool, AtomicU64, AtomicUsize, Ordering};
use std::sync::{Mutex, PoisonError};
use std::time::{Duration, Instant, SystemTime};

use crate::sys::brief::Brief;

/// What a thread does with its time.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Stage {
    /// Finds out what is to be read, and how.
    Plan,
    /// Waits for staging memory: for the device, if all of it is in use.
    Memory,
    /// Reads, or waits for the source; with the first touch.
    Read,
    /// Decrypts or encrypts.
    Decrypt,
    /// Hashes.
    Hash,
    /// Starts copies, or waits for those from the device.
    Copy,
    /// Writes, or waits for the sink.
    Write,
    /// The part of reading in which the system gives new memory, where that is timed.
    FirstTouch,
}

impl Stage {
    /// All of them, in the order of their numbers, with their names in a report.
    pub const ALL: [(Stage, &'static str); 8] = [
        (Stage::Plan, "plan"),
        (Stage::Memory, "memory"),
        (Stage::Read, "read"),
        (Stage::Decrypt, "decrypt"),
        (Stage::Hash, "hash"),
        (Stage::Copy, "copy"),
        (Stage::Write, "write"),
        (Stage::FirstTouch, "first touch"),
    ];
}

/// True if loads touch the memory that they read into before they read, to time that by itself.
static TIMES_FIRST_TOUCH: AtomicBool = AtomicBool::new(false);

/// Has the loads of this process time how long the system takes to give new memory, or not. Each byte
/// is then touched twice.
pub fn time_first_touch(timed: bool) {
    TIMES_FIRST_TOUCH.store(timed, Ordering::Relaxed);
}

/// True if loads do.
pub fn times_first_touch() -> bool {
    TIMES_FIRST_TOUCH.load(Ordering::Relaxed)
}

/// A fallback: what the pool of staging memory says.
pub const PAGEABLE: &str =
    "pageable staging memory: the system or the driver refused to pin as much";

/// What the threads of one call count.
#[derive(Debug)]
pub struct Counters {
    begun: Instant,
    nanos: [AtomicU64; Stage::ALL.len()],
    bytes: AtomicU64,
    threads: AtomicUsize,
    most_threads: AtomicUsize,
    reading: Mutex<&'static str>,
    in_flight: AtomicU64,
    most_in_flight: AtomicU64,
    fallbacks: Mutex<Vec<String>>,
}

impl Default for Counters {
    fn default() -> Self {
        Counters {
            begun: Instant::now(),
            nanos: std::array::from_fn(|_| AtomicU64::new(0)),
            bytes: AtomicU64::new(0),
            threads: AtomicUsize::new(0),
            most_threads: AtomicUsize::new(0),
            reading: Mutex::default(),
            in_flight: AtomicU64::new(0),
            most_in_flight: AtomicU64::new(0),
            fallbacks: Mutex::default(),
        }
    }
}

impl Counters {
    /// Runs something, and counts its time for a stage.
    pub fn time<T>(&self, stage: Stage, work: impl FnOnce() -> T) -> T {
        let begun = Instant::now();
        let result = work();
        self.since(stage, begun);
        result
    }

    /// Counts the time since then for a stage.
    pub fn since(&self, stage: Stage, begun: Instant) {
        let nanos = u64::try_from(begun.elapsed().as_nanos()).unwrap_or(u64::MAX);
        if let Some(sum) = self.nanos.get(stage as usize) {
            sum.fetch_add(nanos, Ordering::Relaxed);
        }
    }

    /// Counts bytes of tensor data that were moved.
    pub fn bytes(&self, bytes: u64) {
        self.bytes.fetch_add(bytes, Ordering::Relaxed);
    }

    /// Bytes that were counted so far.
    pub fn moved(&self) -> u64 {
        self.bytes.load(Ordering::Relaxed)
    }

    /// How many threads move them, and how many might.
    pub fn threads(&self, threads: usize, most: usize) {
        self.threads.store(threads, Ordering::Relaxed);
        self.most_threads.store(most, Ordering::Relaxed);
    }

    /// How the source is read, where there is more than one way.
    pub fn reading(&self, how: &'static str) {
        *self.reading.lock().unwrap_or_else(PoisonError::into_inner) = how;
    }

    /// Bytes of direct reads that were under way, on average, and that might have been. Of several
    /// parts of a call the one with the most counts.
    pub fn in_flight(&self, bytes: u64, most: u64) {
        self.in_flight.fetch_max(bytes, Ordering::Relaxed);
        self.most_in_flight.fetch_max(most, Ordering::Relaxed);
    }

    /// Says that something went a slower way than it could have.
    pub fn fallback(&self, why: &str) {
        let mut all = self.fallbacks.lock().unwrap_or_else(PoisonError::into_inner);
        if !all.iter().any(|known| known == why) {
            all.push(why.to_owned());
        }
    }

    /// What was counted, as the report of the last call of this process, and of this thread.
    pub fn publish(&self, what: &'static str, uri: &str, device: &str, tensors: usize) {
        let mut recent = RECENT.lock();
        let report = Report {
            call: recent.back().map_or(0, |last| last.call) + 1,
            ended: SystemTime::now(),
            what,
            uri: uri.to_owned(),
            device: device.to_owned(),
            tensors,
            bytes: self.bytes.load(Ordering::Relaxed),
            threads: self.threads.load(Ordering::Relaxed),
            most_threads: self.most_threads.load(Ordering::Relaxed),
            elapsed: self.begun.elapsed(),
            stages: std::array::from_fn(|at| {
                let nanos = self.nanos.get(at).map_or(0, |sum| sum.load(Ordering::Relaxed));
                Duration::from_nanos(nanos)
            }),
            reading: *self.reading.lock().unwrap_or_else(PoisonError::into_inner),
            in_flight: self.in_flight.load(Ordering::Relaxed),
            most_in_flight: self.most_in_flight.load(Ordering::Relaxed),
            fallbacks: self.fallbacks.lock().unwrap_or_else(PoisonError::into_inner).clone(),
        };
        OWN.set(Some(report.clone()));
        if recent.len() >= KEPT {
            recent.pop_front();
        }
        recent.push_back(report);
    }
}

/// What one call did.
#[derive(Debug, Clone)]
pub struct Report {
    /// Its number among the calls of this process, from 1 on.
    pub call: u64,
    /// When it ended.
    pub ended: SystemTime,
    /// `load` or `save`.
    pub what: &'static str,
    /// The path or address.
    pub uri: String,
    /// Where the tensors went or came from.
    pub device: String,
    /// How many.
    pub tensors: usize,
    /// Bytes of their data.
    pub bytes: u64,
    /// Threads that moved them.
    pub threads: usize,
    /// Threads that there might have been, had more of them helped.
    pub most_threads: usize,
    /// From the call to its return.
    pub elapsed: Duration,
    /// Time in each stage, summed over the threads, in the order of [`Stage::ALL`].
    pub stages: [Duration; Stage::ALL.len()],
    /// How the source was read, where there is more than one way; else nothing.
    pub reading: &'static str,
    /// Bytes of direct reads that were under way, on average.
    pub in_flight: u64,
    /// Bytes of direct reads that might have been under way.
    pub most_in_flight: u64,
    /// Slower ways that were taken, and why.
    pub fallbacks: Vec<String>,
}

/// So many reports are kept.
pub const KEPT: usize = 256;

static RECENT: Brief<VecDeque<Report>> = Brief::new(VecDeque::new());

thread_local! {
    static OWN: RefCell<Option<Report>> = const { RefCell::new(None) };
}

/// The report of the last load or save of this process that has ended well.
pub fn last() -> Option<Report> {
    RECENT.lock().back().cloned()
}

/// The reports of the calls after that of a number, in their order; at most the last [`KEPT`].
pub fn since(call: u64) -> Vec<Report> {
    let recent = RECENT.lock();
    recent.iter().filter(|report| report.call > call).cloned().collect()
}

/// The report of the last call on this thread, once.
pub fn take_own() -> Option<Report> {
    OWN.take()
}
