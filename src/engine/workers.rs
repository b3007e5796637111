//! Worker threads that live as long as one call.
//!
//! They are started for the call and joined before it returns. So no thread is left for a fork to
//! break, and the threads may borrow memory from the caller. The calling thread waits, checks for
//! an interrupt, and starts more workers while that raises the throughput.

use std::time::Duration;

use crate::cancel::{Cancel, POLL};
use crate::engine::concurrency::{ConcurrencyController, Sample};
use crate::error::{Error, Result};
use crate::io::Capabilities;
use crate::sys::sync::atomic::{AtomicBool, AtomicU64, AtomicUsize, Ordering};
use crate::sys::sync::thread::{self, ScopedJoinHandle, Thread};
use crate::sys::sync::{Instant, Mutex, MutexGuard, cpu_time, unpoisoned};

/// Poll interval of the calling thread while more workers may be started.
const TICK: Duration = Duration::from_millis(5);

/// The number of workers of a call: its initial and maximum value.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct WorkerRange {
    /// Workers at the beginning of the call.
    pub initial: usize,
    /// The most workers.
    pub max: usize,
    /// Bytes that the workers move in total, if that is known.
    pub bytes: Option<u64>,
}

impl WorkerRange {
    /// A fixed number of workers.
    pub fn fixed(workers: usize) -> Self {
        WorkerRange { initial: workers, max: workers, bytes: None }
    }

    /// The number that the caller has set, or else the range that suits the source. The source's
    /// `max_readers` limits both.
    pub fn of(capabilities: &Capabilities, requested: Option<usize>) -> Self {
        let allowed = |number: usize| number.clamp(1, capabilities.max_readers.max(1));
        match requested {
            Some(number) => WorkerRange::fixed(allowed(number)),
            None => WorkerRange {
                initial: allowed(capabilities.initial_readers.min(capabilities.max_auto_readers)),
                max: allowed(capabilities.max_auto_readers),
                bytes: None,
            },
        }
    }

    /// Returns the number of shares into which the work is cut, so that all workers are busy to the
    /// end. For an adaptive number it is half of the maximum. The maximum is seldom reached, and
    /// more shares mean shorter requests, which cost more.
    pub fn shares(self) -> usize {
        if self.initial < self.max { self.initial.max(self.max / 2) } else { self.max }
    }

    /// The same range, with no more workers than pieces of work.
    pub fn limited_to(self, work: usize) -> Self {
        WorkerRange { initial: self.initial.min(work), max: self.max.min(work), ..self }
    }
}

/// State that the workers of one call share.
struct WorkerPool<'c> {
    stopped: AtomicBool,
    error: Mutex<Option<Error>>,
    caller: &'c dyn Cancel,
    /// True if the work runs on the calling thread.
    inline: AtomicBool,
    count: Mutex<WorkerCount>,
    /// Running workers that have moved at least one byte.
    receiving: AtomicUsize,
    /// True once a worker has found no more work.
    ending: AtomicBool,
    bytes: AtomicU64,
    arrivals: AtomicU64,
}

/// The running and the wanted number of workers, under one lock. A worker that saw an outdated
/// `wanted` would retire just before another worker is started.
#[derive(Debug, Clone, Copy)]
struct WorkerCount {
    /// Workers that have neither ended nor retired.
    running: usize,
    /// The number of workers that the concurrency controller wants.
    wanted: usize,
}

/// A worker's view of its call. It counts the bytes that the worker has moved, and tells it to
/// stop, or to retire because there are too many workers.
pub struct Control<'c> {
    pool: &'c WorkerPool<'c>,
    receiving: AtomicBool,
    /// Retired; no longer counted as running.
    deregistered: AtomicBool,
}

impl Cancel for Control<'_> {
    fn check(&self) -> Result<()> {
        if self.stopped() { Err(Error::Cancelled) } else { Ok(()) }
    }
}

impl Control<'_> {
    /// Counts bytes that this worker has moved.
    pub fn arrived(&self, bytes: u64) {
        if bytes > 0 {
            self.pool.bytes.fetch_add(bytes, Ordering::Relaxed);
            self.pool.arrivals.fetch_add(1, Ordering::Relaxed);
            if !self.receiving.swap(true, Ordering::Relaxed) {
                self.pool.receiving.fetch_add(1, Ordering::Relaxed);
            }
        }
    }

    /// True if the worker must take no more work.
    pub fn stopped(&self) -> bool {
        self.pool.stopped()
    }

    /// True if the work runs on the calling thread.
    pub fn is_inline(&self) -> bool {
        self.pool.inline.load(Ordering::Relaxed)
    }

    /// True if this worker must end now, between two pieces of work, because more workers did not
    /// help. It is then no longer counted as running. At least one worker is never retired.
    pub fn is_retired(&self) -> bool {
        let mut count = self.pool.count();
        let retired = count.running > count.wanted.max(1);
        if retired {
            count.running -= 1;
            drop(count);
            self.deregister();
        }
        retired
    }

    /// Marks this worker as gone, and no longer counts it among those that have moved bytes.
    fn deregister(&self) {
        self.deregistered.store(true, Ordering::Relaxed);
        if self.receiving.swap(true, Ordering::Relaxed) {
            self.pool.receiving.fetch_sub(1, Ordering::Relaxed);
        }
    }
}

impl<'c> WorkerPool<'c> {
    fn new(range: WorkerRange, caller: &'c dyn Cancel, inline: bool) -> Self {
        WorkerPool {
            stopped: AtomicBool::new(false),
            error: Mutex::new(None),
            caller,
            inline: AtomicBool::new(inline),
            count: Mutex::new(WorkerCount { running: 0, wanted: range.initial }),
            receiving: AtomicUsize::new(0),
            ending: AtomicBool::new(false),
            bytes: AtomicU64::new(0),
            arrivals: AtomicU64::new(0),
        }
    }

    fn count(&self) -> MutexGuard<'_, WorkerCount> {
        unpoisoned(self.count.lock())
    }

    fn stopped(&self) -> bool {
        if self.inline.load(Ordering::Relaxed)
            && !self.stopped.load(Ordering::Relaxed)
            && let Err(error) = self.caller.check()
        {
            self.interrupt(error);
        }
        self.stopped.load(Ordering::Relaxed)
    }

    /// Stores the error of the caller's own check, in place of any other. The check has consumed
    /// its cause, such as a pending signal, so the error must not be lost.
    fn interrupt(&self, error: Error) {
        *unpoisoned(self.error.lock()) = Some(error);
        self.stopped.store(true, Ordering::Relaxed);
    }

    fn fail(&self, error: Error) {
        unpoisoned(self.error.lock()).get_or_insert(error);
        self.stopped.store(true, Ordering::Relaxed);
    }

    fn outcome(self) -> Result<()> {
        unpoisoned(self.error.into_inner()).map_or(Ok(()), Err)
    }

    fn control(&self) -> Control<'_> {
        Control {
            pool: self,
            receiving: AtomicBool::new(false),
            deregistered: AtomicBool::new(false),
        }
    }

    fn sample(&self, started: Instant) -> Sample {
        Sample {
            at: started.elapsed(),
            bytes: self.bytes.load(Ordering::Relaxed),
            arrivals: self.arrivals.load(Ordering::Relaxed),
            cpu: cpu_time(),
            running: self.count().running,
            receiving: self.receiving.load(Ordering::Relaxed),
        }
    }
}

/// Runs `work` on `threads` threads at once and returns the first error.
///
/// With `threads` 0 or 1 it runs on the calling thread. A separate thread would not be faster. A
/// signal can also interrupt what the caller supplied, such as a Python file, only on the calling
/// thread.
pub fn run(
    threads: usize,
    cancel: &dyn Cancel,
    work: impl Fn(&Control<'_>) -> Result<()> + Sync,
) -> Result<()> {
    run_while(WorkerRange::fixed(threads), cancel, |control, _| work(control), &mut || Ok(false))
}

/// Does `work` on each item, up to `threads` at once, and returns the results in the order of the
/// items, or the first error.
pub fn map<I: Send, O: Send>(
    threads: usize,
    items: impl IntoIterator<Item = I, IntoIter: ExactSizeIterator + Send>,
    cancel: &dyn Cancel,
    work: impl Fn(I, &Control<'_>) -> Result<O> + Sync,
) -> Result<Vec<O>> {
    let items = items.into_iter();
    let count = items.len();
    let (queue, done) = (Mutex::new(items.enumerate()), Mutex::new(Vec::with_capacity(count)));
    run(threads.min(count), cancel, |control| {
        while !control.stopped() {
            let Some((at, item)) = unpoisoned(queue.lock()).next() else { break };
            let result = work(item, control)?;
            unpoisoned(done.lock()).push((at, result));
        }
        Ok(())
    })?;
    let mut done = unpoisoned(done.into_inner());
    done.sort_unstable_by_key(|(at, _)| *at);
    Ok(done.into_iter().map(|(_, result)| result).collect())
}

/// Runs `work` like [`run`], on a number of threads that a [`ConcurrencyController`] adapts.
/// Workers report the bytes that they have moved, and ask between two pieces of work whether to
/// retire.
///
/// `work` gets the number of workers that were started before it. A worker that returns without
/// being told to end has found no more work. Meanwhile the calling thread calls `meanwhile` until
/// it returns false.
pub fn run_while(
    range: WorkerRange,
    cancel: &dyn Cancel,
    work: impl Fn(&Control<'_>, usize) -> Result<()> + Sync,
    meanwhile: &mut dyn FnMut() -> Result<bool>,
) -> Result<()> {
    let inline = range.max <= 1;
    let pool = WorkerPool::new(range, cancel, inline);
    let run_worker = |control: &Control<'_>, number: usize| {
        work(control, number).unwrap_or_else(|error| pool.fail(error));
    };
    if inline {
        while meanwhile()? {}
        run_worker(&pool.control(), 0);
        return pool.outcome();
    }
    let alive = AtomicUsize::new(0);
    let caller = thread::current();
    let (pool_ref, run_worker, alive, caller) = (&pool, &run_worker, &alive, &caller);
    thread::scope(|scope| {
        let start = |number: usize| {
            let control = pool_ref.control();
            pool_ref.count().running += 1;
            alive.fetch_add(1, Ordering::Relaxed);
            let worker = move || {
                // Dropped also when the work panics, so that the counts stay right.
                let worker = Worker { control, alive, caller };
                run_worker(&worker.control, number);
            };
            let named = thread::Builder::new().name("tensorizer".to_owned());
            let started = named.spawn_scoped(scope, worker).ok();
            if started.is_none() {
                pool.count().running -= 1;
                alive.fetch_sub(1, Ordering::Relaxed);
            }
            started
        };
        let mut handles: Vec<_> = (0..range.initial.max(1)).map_while(start).collect();
        let (mut supervisor, mut more) = (Supervisor::new(range, &pool), true);
        // If no thread could be started, the calling thread does the work.
        if handles.is_empty() {
            pool.inline.store(true, Ordering::Relaxed);
            while run_meanwhile(meanwhile, &pool) {}
            run_worker(&pool.control(), 0);
        }
        while alive.load(Ordering::Acquire) > 0 {
            more = more && run_meanwhile(meanwhile, &pool);
            if !more {
                thread::park_timeout(if supervisor.controller.is_some() { TICK } else { POLL });
            }
            let wanted = handles.len() + supervisor.workers_to_start();
            handles.extend((handles.len()..wanted).map_while(start));
            let all_started = handles.len() >= wanted;
            supervisor.controller = supervisor.controller.filter(|_| all_started);
        }
        handles.into_iter().for_each(join);
        while more && run_meanwhile(meanwhile, &pool) {}
    });
    pool.outcome()
}

/// Calls `meanwhile` once. Returns true if it has more to do; false also after an error.
fn run_meanwhile(meanwhile: &mut dyn FnMut() -> Result<bool>, pool: &WorkerPool<'_>) -> bool {
    if pool.stopped() {
        return false;
    }
    meanwhile().unwrap_or_else(|error| {
        pool.fail(error);
        false
    })
}

/// Joins a thread, and passes its panic on. The scope alone waits only for the end of the work; a
/// joined thread is also gone from the process.
fn join(handle: ScopedJoinHandle<'_, ()>) {
    handle.join().unwrap_or_else(|panic| std::panic::resume_unwind(panic));
}

/// The registration of one thread in the call. Its drop updates the counts and wakes the calling
/// thread.
struct Worker<'w, 'c> {
    control: Control<'c>,
    alive: &'w AtomicUsize,
    caller: &'w Thread,
}

impl Drop for Worker<'_, '_> {
    fn drop(&mut self) {
        let pool = self.control.pool;
        // After a panic, other workers must not wait for the work that this one has left undone.
        if thread::panicking() {
            pool.stopped.store(true, Ordering::Relaxed);
        }
        if !self.control.deregistered.load(Ordering::Relaxed) {
            pool.ending.store(true, Ordering::Relaxed);
            pool.count().running -= 1;
            self.control.deregister();
        }
        self.alive.fetch_sub(1, Ordering::Release);
        self.caller.unpark();
    }
}

/// State of the calling thread while it waits for the workers.
struct Supervisor<'s, 'c> {
    pool: &'s WorkerPool<'c>,
    started: Instant,
    last_check: Instant,
    /// None if the number of workers is fixed.
    controller: Option<ConcurrencyController>,
}

impl<'s, 'c> Supervisor<'s, 'c> {
    fn new(range: WorkerRange, pool: &'s WorkerPool<'c>) -> Self {
        let now = Instant::now();
        let new = || ConcurrencyController::new(range.initial, range.max, crate::cpu_count());
        let controller = (range.initial < range.max).then(|| new().with_total_bytes(range.bytes));
        Supervisor { pool, started: now, last_check: now, controller }
    }

    /// Checks for an interrupt, and returns the number of workers to start.
    fn workers_to_start(&mut self) -> usize {
        if self.pool.stopped() {
            return 0;
        }
        if self.last_check.elapsed() >= POLL {
            self.last_check = Instant::now();
            if let Err(error) = self.pool.caller.check() {
                self.pool.interrupt(error);
                return 0;
            }
        }
        // A worker that found no work shows that there is none for a new worker either.
        let ending = self.pool.ending.load(Ordering::Relaxed);
        let Some(controller) = self.controller.as_mut().filter(|_| !ending) else { return 0 };
        let sample = self.pool.sample(self.started);
        let wanted = controller.update(&sample);
        let mut count = self.pool.count();
        count.wanted = wanted;
        wanted.saturating_sub(count.running)
    }
}

#[cfg(all(test, feature = "models"))]
mod models;

#[cfg(all(test, not(feature = "models")))]
#[allow(clippy::unwrap_used)]
mod tests;
