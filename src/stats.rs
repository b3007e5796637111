//! Reports of loads and saves, which show the time that each stage took.

use std::cell::RefCell;
use std::collections::VecDeque;
use std::sync::atomic::{AtomicBool, AtomicU64, AtomicUsize, Ordering};
use std::sync::{Arc, Mutex};
use std::time::{Duration, Instant, SystemTime};

use crate::sys::fork_safe_mutex::ForkSafeMutex;
use crate::sys::sync::unpoisoned;
use crate::traffic::{self, Traffic, TrafficCount};

/// A stage of a call, for which the time of its threads is counted.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Stage {
    /// Finds out which bytes to read, and how.
    Plan,
    /// Waits for staging memory; if all of it is in use, that means for the device.
    Memory,
    /// Reads, or waits for the source; includes the first touch of new memory.
    Read,
    /// Decrypts or encrypts.
    Decrypt,
    /// Hashes.
    Hash,
    /// Starts copies, or waits for those from the device.
    Copy,
    /// Writes, or waits for the sink.
    Write,
    /// The part of reading in which the system allocates new memory, if that is timed.
    FirstTouch,
}

impl Stage {
    /// The names of all stages in a report, in the order of their numbers.
    pub const NAMES: [&'static str; 8] =
        ["plan", "memory", "read", "decrypt", "hash", "copy", "write", "first touch"];
}

/// True if loads touch new memory before they read into it, to time that separately.
static TIMES_FIRST_TOUCH: AtomicBool = AtomicBool::new(false);

/// Enables or disables separate timing of the first touch of new memory in the loads of this
/// process. If it is enabled, memory is touched once more, before it is read into.
pub fn time_first_touch(timed: bool) {
    TIMES_FIRST_TOUCH.store(timed, Ordering::Relaxed);
}

/// True if loads time the first touch of new memory.
pub fn times_first_touch() -> bool {
    TIMES_FIRST_TOUCH.load(Ordering::Relaxed)
}

/// The reported fallback if some staging memory is not pinned.
pub const PAGEABLE: &str =
    "pageable staging memory: the system or the driver refused to pin as much memory as needed";

/// Begins the reported fallback for copies that may not be current.
pub const OLDER_COPY: &str = "the copy in the cache";

/// Bytes that may come before the first read: those of the first request.
const HEAD_LEN: u64 = 1 << 20;

/// Counters of one call, shared by its threads.
#[derive(Debug)]
pub struct Counters {
    started: Instant,
    nanos: [AtomicU64; Stage::NAMES.len()],
    bytes: AtomicU64,
    threads: AtomicUsize,
    most_threads: AtomicUsize,
    reading: Mutex<&'static str>,
    in_flight: AtomicU64,
    most_in_flight: AtomicU64,
    fallbacks: Mutex<Vec<String>>,
    arrived: AtomicU64,
    /// True if bytes may come from a local copy of a server's file.
    has_local_copy: AtomicBool,
    is_lazy: bool,
    traffic: Arc<Traffic>,
}

impl Default for Counters {
    fn default() -> Self {
        Counters {
            started: Instant::now(),
            nanos: Default::default(),
            bytes: AtomicU64::new(0),
            threads: AtomicUsize::new(0),
            most_threads: AtomicUsize::new(0),
            reading: Mutex::default(),
            in_flight: AtomicU64::new(0),
            most_in_flight: AtomicU64::new(0),
            fallbacks: Mutex::default(),
            arrived: AtomicU64::new(0),
            has_local_copy: AtomicBool::new(false),
            is_lazy: false,
            traffic: traffic::current(),
        }
    }
}

impl Counters {
    /// Runs work, and counts its time for a stage.
    pub fn time<T>(&self, stage: Stage, work: impl FnOnce() -> T) -> T {
        let started = Instant::now();
        let result = work();
        self.since(stage, started);
        result
    }

    /// Counts the time since `started` for a stage.
    pub fn since(&self, stage: Stage, started: Instant) {
        let nanos = u64::try_from(started.elapsed().as_nanos()).unwrap_or(u64::MAX);
        if let Some(sum) = self.nanos.get(stage as usize) {
            sum.fetch_add(nanos, Ordering::Relaxed);
        }
    }

    /// Counts bytes of tensor data that were moved.
    pub fn bytes(&self, bytes: u64) {
        self.bytes.fetch_add(bytes, Ordering::Relaxed);
    }

    /// Bytes of tensor data that were counted so far.
    pub fn moved(&self) -> u64 {
        self.bytes.load(Ordering::Relaxed)
    }

    /// Counts bytes that have arrived from the source.
    pub fn bytes_arrived(&self, bytes: u64) {
        self.arrived.fetch_add(bytes, Ordering::Relaxed);
    }

    /// The requests of the call.
    pub fn traffic(&self) -> &Traffic {
        &self.traffic
    }

    /// Bytes that have arrived, or tensor data that were counted, if these are more.
    pub fn arrived(&self) -> u64 {
        self.arrived.load(Ordering::Relaxed).max(self.moved())
    }

    /// Records that bytes may come from a local copy of a server's file.
    pub fn local_copy(&self) {
        self.has_local_copy.store(true, Ordering::Relaxed);
    }

    /// The same counters, of a lazy read if that is so.
    pub fn lazy(self, is_lazy: bool) -> Self {
        Counters { is_lazy, ..self }
    }

    /// Sets the number of threads that move bytes, and the maximum number.
    pub fn threads(&self, threads: usize, most: usize) {
        self.threads.store(threads, Ordering::Relaxed);
        self.most_threads.store(most, Ordering::Relaxed);
    }

    /// Sets the read method of the source, if it has several.
    pub fn reading(&self, how: &'static str) {
        *unpoisoned(self.reading.lock()) = how;
    }

    /// Records the bytes of direct reads under way: the average, and the maximum that was allowed.
    /// If a call has several parts, the largest values count.
    pub fn in_flight(&self, bytes: u64, most: u64) {
        self.in_flight.fetch_max(bytes, Ordering::Relaxed);
        self.most_in_flight.fetch_max(most, Ordering::Relaxed);
    }

    /// Records that a slower method was used, and the reason.
    pub fn fallback(&self, why: &str) {
        let mut all = unpoisoned(self.fallbacks.lock());
        if !all.iter().any(|recorded| recorded == why) {
            all.push(why.to_owned());
        }
    }

    /// Publishes the counters as the report of the last call of this process and of this thread.
    pub fn publish(&self, what: &'static str, uri: &str, device: &str, tensors: usize) {
        let report = self.report(what, uri, device, tensors);
        THREAD_REPORT.set(Some(Report { call: add(report.clone()), ..report }));
    }

    /// Adds the report of a call that has failed.
    pub fn publish_failure(&self, what: &'static str, uri: &str, error: String) {
        let report = Report { error: Some(error), ..self.report(what, uri, "", 0) };
        add(report);
    }

    fn report(&self, what: &'static str, uri: &str, device: &str, tensors: usize) -> Report {
        let traffic = self.traffic.count(true);
        let reading = *unpoisoned(self.reading.lock());
        let load = |counter: &AtomicU64| counter.load(Ordering::Relaxed);
        let not_of_network = load(&self.arrived).saturating_sub(traffic.network_bytes);
        let has_local_copy = self.has_local_copy.load(Ordering::Relaxed);
        let is_of_disk = !has_local_copy && !reading.is_empty();
        // The beginning of a server's file came when it was opened.
        let is_of_cache = has_local_copy && (!reading.is_empty() || not_of_network > HEAD_LEN);
        Report {
            call: 0,
            ended: SystemTime::now(),
            what,
            uri: uri.to_owned(),
            device: device.to_owned(),
            tensors,
            bytes: load(&self.bytes),
            threads: self.threads.load(Ordering::Relaxed),
            most_threads: self.most_threads.load(Ordering::Relaxed),
            elapsed: self.started.elapsed(),
            stages: self.nanos.each_ref().map(load).map(Duration::from_nanos),
            reading,
            in_flight: load(&self.in_flight),
            most_in_flight: load(&self.most_in_flight),
            fallbacks: unpoisoned(self.fallbacks.lock()).clone(),
            traffic,
            cache_bytes: if is_of_cache { not_of_network } else { 0 },
            disk_bytes: if is_of_disk { not_of_network } else { 0 },
            is_lazy: self.is_lazy && tensors == 1,
            error: None,
        }
    }
}

/// The report of one call.
#[derive(Debug, Clone)]
pub struct Report {
    /// Its number among the calls of this process, from 1 on.
    pub call: u64,
    /// The time at which it ended.
    pub ended: SystemTime,
    /// `load` or `save`.
    pub what: &'static str,
    /// The path or address.
    pub uri: String,
    /// The device to which the tensors went, or from which they came.
    pub device: String,
    /// The number of tensors.
    pub tensors: usize,
    /// Bytes of their data.
    pub bytes: u64,
    /// Threads that moved them.
    pub threads: usize,
    /// Maximum number of threads that the call could have used.
    pub most_threads: usize,
    /// Time from the call to its return.
    pub elapsed: Duration,
    /// Time in each stage, summed over the threads, in the order of [`Stage::NAMES`].
    pub stages: [Duration; Stage::NAMES.len()],
    /// The read method of the source, if it has several; else empty.
    pub reading: &'static str,
    /// Bytes of direct reads that were under way, on average.
    pub in_flight: u64,
    /// Maximum bytes of direct reads that were allowed to be under way.
    pub most_in_flight: u64,
    /// The reasons for slower methods that were used.
    pub fallbacks: Vec<String>,
    /// Requests, and bytes of the network. Those of opening the file count for its first call.
    pub traffic: TrafficCount,
    /// Bytes that were read of local copies of a server's file.
    pub cache_bytes: u64,
    /// Bytes that were read of local files.
    pub disk_bytes: u64,
    /// True for a lazy read of a single tensor.
    pub is_lazy: bool,
    /// The error of a call that has failed.
    pub error: Option<String>,
}

/// The number of reports that are retained.
pub const MAX_REPORTS: usize = 256;

static RECENT: ForkSafeMutex<VecDeque<Report>> = ForkSafeMutex::new(VecDeque::new());

/// Adds a report, and returns its number. Lazy reads of single tensors are many: their reports are
/// removed before those of other calls.
fn add(report: Report) -> u64 {
    let mut recent = RECENT.lock();
    let call = recent.back().map_or(0, |last| last.call) + 1;
    if recent.len() >= MAX_REPORTS {
        let removed = recent.iter().position(|report| report.is_lazy).unwrap_or(0);
        recent.remove(removed);
    }
    recent.push_back(Report { call, ..report });
    call
}

thread_local! {
    static THREAD_REPORT: RefCell<Option<Report>> = const { RefCell::new(None) };
}

/// The report of the last load or save of this process that has succeeded.
pub fn last_report() -> Option<Report> {
    RECENT.lock().iter().rev().find(|report| report.error.is_none()).cloned()
}

/// The reports of the calls after number `call`, in order; at most the last [`MAX_REPORTS`].
pub fn reports_since(call: u64) -> Vec<Report> {
    let recent = RECENT.lock();
    recent.iter().filter(|report| report.call > call).cloned().collect()
}

/// Returns the report of the last call on this thread, and removes it.
pub fn take_thread_report() -> Option<Report> {
    THREAD_REPORT.take()
}
