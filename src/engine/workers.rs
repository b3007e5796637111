//! Threads for the length of one call.
//!
//! They are started for the call and joined before it returns: nothing is left that a fork could
//! break, and memory can be lent to them. The calling thread waits, looks for an interrupt, and
//! starts more of them while that helps.

use std::sync::PoisonError;
use std::time::Duration;

use crate::cancel::{Cancel, POLL};
use crate::engine::concurrency::{ConcurrencyController, Sample};
use crate::error::{Error, Result};
use crate::io::Capabilities;
use crate::mem::Progress;
use crate::sys::sync::atomic::{AtomicBool, AtomicU64, AtomicUsize, Ordering};
use crate::sys::sync::thread::{self, ScopedJoinHandle, Thread};
use crate::sys::sync::{Instant, Mutex, MutexGuard, cpu_time};

/// How often the calling thread looks whether more workers help.
const TICK: Duration = Duration::from_millis(5);

/// How many workers a call has.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct WorkerRange {
    /// At its beginning.
    pub first: usize,
    /// At most.
    pub most: usize,
    /// Bytes that they are to move, if that is known.
    pub bytes: Option<u64>,
}

impl WorkerRange {
    /// Always the same number.
    pub fn fixed(workers: usize) -> Self {
        WorkerRange { first: workers, most: workers, bytes: None }
    }

    /// As many as the caller has asked for, or as suits the source.
    pub fn of(traits: &Capabilities, asked: Option<usize>) -> Self {
        let allowed = |number: usize| number.clamp(1, traits.max_readers.max(1));
        match asked {
            Some(number) => WorkerRange::fixed(allowed(number)),
            None => WorkerRange {
                first: allowed(traits.first_readers.min(traits.most_readers)),
                most: allowed(traits.most_readers),
                bytes: None,
            },
        }
    }

    /// Into how many shares its work is to be cut, so that all have some to the end. Half of the
    /// most where the number is found: the most are seldom reached, and short requests cost more.
    pub fn shares(self) -> usize {
        if self.first < self.most { self.first.max(self.most / 2) } else { self.most }
    }

    /// The same, but no more than there is work for.
    pub fn at_most(self, work: usize) -> Self {
        WorkerRange { first: self.first.min(work), most: self.most.min(work), ..self }
    }
}

/// What the workers of one call share.
struct Shared<'c> {
    stopped: AtomicBool,
    error: Mutex<Option<Error>>,
    caller: &'c dyn Cancel,
    /// Whether the work is done on the caller's thread.
    inline: AtomicBool,
    count: Mutex<Count>,
    /// Of those that take work, how many have moved something.
    heard: AtomicUsize,
    /// A worker has found no more work.
    ending: AtomicBool,
    bytes: AtomicU64,
    arrivals: AtomicU64,
}

/// Looked at together: a worker that knew an old `wanted` would leave before another one is started.
#[derive(Debug, Clone, Copy)]
struct Count {
    /// Workers that take work.
    running: usize,
    /// How many there should be.
    wanted: usize,
}

/// What one worker knows of its call: the first error, that it is time to stop, or that there are
/// more workers than help.
pub struct Control<'c> {
    shared: &'c Shared<'c>,
    heard: AtomicBool,
    /// It has been told that it is one too many, and counts no more.
    left: AtomicBool,
}

impl Cancel for Control<'_> {
    fn check(&self) -> Result<()> {
        if self.stopped() { Err(Error::Cancelled) } else { Ok(()) }
    }
}

impl Progress for Control<'_> {
    fn arrived(&self, bytes: u64) {
        if bytes > 0 {
            self.shared.bytes.fetch_add(bytes, Ordering::Relaxed);
            self.shared.arrivals.fetch_add(1, Ordering::Relaxed);
            if !self.heard.swap(true, Ordering::Relaxed) {
                self.shared.heard.fetch_add(1, Ordering::Relaxed);
            }
        }
    }
}

impl Control<'_> {
    /// Whether to take no more work.
    pub fn stopped(&self) -> bool {
        self.shared.stopped()
    }

    /// True on the caller's thread.
    pub fn is_inline(&self) -> bool {
        self.shared.inline.load(Ordering::Relaxed)
    }

    /// Whether this worker is to end, between two pieces of work, because more workers did not
    /// help. It must end if so; at least one never hears it.
    pub fn is_retired(&self) -> bool {
        let mut count = self.shared.count();
        let left = count.running > count.wanted.max(1);
        if left {
            count.running -= 1;
            drop(count);
            self.leave();
        }
        left
    }

    /// Counts this worker no more.
    fn leave(&self) {
        self.left.store(true, Ordering::Relaxed);
        if self.heard.swap(true, Ordering::Relaxed) {
            self.shared.heard.fetch_sub(1, Ordering::Relaxed);
        }
    }
}

impl<'c> Shared<'c> {
    fn new(range: WorkerRange, caller: &'c dyn Cancel, inline: bool) -> Self {
        Shared {
            stopped: AtomicBool::new(false),
            error: Mutex::new(None),
            caller,
            inline: AtomicBool::new(inline),
            count: Mutex::new(Count { running: 0, wanted: range.first }),
            heard: AtomicUsize::new(0),
            ending: AtomicBool::new(false),
            bytes: AtomicU64::new(0),
            arrivals: AtomicU64::new(0),
        }
    }

    fn count(&self) -> MutexGuard<'_, Count> {
        self.count.lock().unwrap_or_else(PoisonError::into_inner)
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

    /// The caller's own error is told before any other: it was taken from where it came from.
    fn interrupt(&self, error: Error) {
        *self.error.lock().unwrap_or_else(PoisonError::into_inner) = Some(error);
        self.stopped.store(true, Ordering::Relaxed);
    }

    fn fail(&self, error: Error) {
        self.error.lock().unwrap_or_else(PoisonError::into_inner).get_or_insert(error);
        self.stopped.store(true, Ordering::Relaxed);
    }

    fn outcome(self) -> Result<()> {
        match self.error.into_inner().unwrap_or_else(PoisonError::into_inner) {
            Some(error) => Err(error),
            None => Ok(()),
        }
    }

    fn control(&self) -> Control<'_> {
        Control { shared: self, heard: AtomicBool::new(false), left: AtomicBool::new(false) }
    }

    fn sample(&self, begun: Instant) -> Sample {
        Sample {
            at: begun.elapsed(),
            bytes: self.bytes.load(Ordering::Relaxed),
            arrivals: self.arrivals.load(Ordering::Relaxed),
            cpu: cpu_time(),
            running: self.count().running,
            heard: self.heard.load(Ordering::Relaxed),
        }
    }
}

/// Runs `work` on `threads` threads at once and returns the first error.
///
/// With `threads` 0 or 1 it runs on the calling thread: a thread of its own would not be faster, and
/// what the caller supplied, such as a Python file, sees the signals that end it.
pub fn run(
    threads: usize,
    cancel: &dyn Cancel,
    work: impl Fn(&Control<'_>) -> Result<()> + Sync,
) -> Result<()> {
    run_adapting(WorkerRange::fixed(threads), cancel, |control, _| work(control))
}

/// The same with as many threads as help, see [`ConcurrencyController`]: they tell what they have moved, and ask
/// between two pieces of work whether to go on. `work` is told how many were started before. One
/// that returns without having been told to has found no more work.
pub fn run_adapting(
    range: WorkerRange,
    cancel: &dyn Cancel,
    work: impl Fn(&Control<'_>, usize) -> Result<()> + Sync,
) -> Result<()> {
    run_while(range, cancel, work, &mut || Ok(false))
}

/// The same. Meanwhile the calling thread calls `meanwhile`, until that says that there is no more to
/// do.
pub fn run_while(
    range: WorkerRange,
    cancel: &dyn Cancel,
    work: impl Fn(&Control<'_>, usize) -> Result<()> + Sync,
    meanwhile: &mut dyn FnMut() -> Result<bool>,
) -> Result<()> {
    let inline = range.most <= 1;
    let shared = Shared::new(range, cancel, inline);
    let attempt = |control: &Control<'_>, number: usize| {
        work(control, number).unwrap_or_else(|error| shared.fail(error));
    };
    if inline {
        while meanwhile()? {}
        attempt(&shared.control(), 0);
        return shared.outcome();
    }
    let alive = AtomicUsize::new(0);
    let caller = thread::current();
    let (of_all, attempt, alive, caller) = (&shared, &attempt, &alive, &caller);
    thread::scope(|scope| {
        let start = |number: usize| {
            let control = of_all.control();
            of_all.count().running += 1;
            alive.fetch_add(1, Ordering::Relaxed);
            let worker = move || {
                // What counts it no more runs when the work panics too.
                let worker = Worker { control, alive, caller };
                attempt(&worker.control, number);
            };
            let named = thread::Builder::new().name("tensorizer".to_owned());
            let started = named.spawn_scoped(scope, worker).ok();
            if started.is_none() {
                shared.count().running -= 1;
                alive.fetch_sub(1, Ordering::Relaxed);
            }
            started
        };
        let mut handles: Vec<_> = (0..range.first.max(1)).map_while(start).collect();
        let (mut watch, mut more) = (Watch::new(range, &shared), true);
        // A process that may not have more threads goes on with those that it has.
        if handles.is_empty() {
            shared.inline.store(true, Ordering::Relaxed);
            while one_step(meanwhile, &shared) {}
            attempt(&shared.control(), 0);
        }
        while alive.load(Ordering::Acquire) > 0 {
            more = more && one_step(meanwhile, &shared);
            if !more {
                thread::park_timeout(watch.tick());
            }
            let missing = watch.missing();
            let begun = handles.len();
            handles.extend((begun..begun + missing).map_while(start));
            watch.controller = watch.controller.filter(|_| handles.len() >= begun + missing);
        }
        handles.into_iter().for_each(join);
        while more && one_step(meanwhile, &shared) {}
    });
    shared.outcome()
}

/// Does a step of what the calling thread does; true if there is more to do.
fn one_step(meanwhile: &mut dyn FnMut() -> Result<bool>, shared: &Shared<'_>) -> bool {
    if shared.stopped() {
        return false;
    }
    meanwhile().unwrap_or_else(|error| {
        shared.fail(error);
        false
    })
}

/// The scope would only wait for the work; joined threads are gone from the process.
fn join(handle: ScopedJoinHandle<'_, ()>) {
    if let Err(panic) = handle.join() {
        std::panic::resume_unwind(panic);
    }
}

/// One thread's part in the call, until it ends.
struct Worker<'w, 'c> {
    control: Control<'c>,
    alive: &'w AtomicUsize,
    caller: &'w Thread,
}

impl Drop for Worker<'_, '_> {
    fn drop(&mut self) {
        let shared = self.control.shared;
        // A panic must not leave the others waiting for what it would have done.
        if thread::panicking() {
            shared.stopped.store(true, Ordering::Relaxed);
        }
        if !self.control.left.load(Ordering::Relaxed) {
            shared.ending.store(true, Ordering::Relaxed);
            shared.count().running -= 1;
            self.control.leave();
        }
        self.alive.fetch_sub(1, Ordering::Release);
        self.caller.unpark();
    }
}

/// What the calling thread does while it waits.
struct Watch<'s, 'c> {
    shared: &'s Shared<'c>,
    begun: Instant,
    asked: Instant,
    /// None where the number of workers stays.
    controller: Option<ConcurrencyController>,
}

impl<'s, 'c> Watch<'s, 'c> {
    fn new(range: WorkerRange, shared: &'s Shared<'c>) -> Self {
        let now = Instant::now();
        let new = || ConcurrencyController::new(range.first, range.most, crate::cpu_count());
        let controller = (range.first < range.most).then(|| new().of_bytes(range.bytes));
        Watch { shared, begun: now, asked: now, controller }
    }

    fn tick(&self) -> Duration {
        if self.controller.is_some() { TICK } else { POLL }
    }

    /// Looks for an interrupt, and how many workers are to be started.
    fn missing(&mut self) -> usize {
        if self.shared.stopped() {
            return 0;
        }
        if self.asked.elapsed() >= POLL {
            self.asked = Instant::now();
            if let Err(error) = self.shared.caller.check() {
                self.shared.interrupt(error);
                return 0;
            }
        }
        // Whoever found no more work has shown that there is none for others.
        let ending = self.shared.ending.load(Ordering::Relaxed);
        let Some(controller) = self.controller.as_mut().filter(|_| !ending) else { return 0 };
        let sample = self.shared.sample(self.begun);
        let wanted = controller.look(&sample);
        let mut count = self.shared.count();
        count.wanted = wanted;
        wanted.saturating_sub(count.running)
    }
}

#[cfg(all(test, feature = "models"))]
mod models;

#[cfg(all(test, not(feature = "models")))]
#[allow(clippy::unwrap_used)]
mod tests {
    use super::*;
    use crate::cancel::Never;

    #[test]
    fn a_silent_source_gets_as_many_as_it_may_have() {
        let most = 9;
        let started = AtomicUsize::new(0);
        let work = |control: &Control<'_>, number| {
            assert!(number < most);
            started.fetch_add(1, Ordering::Relaxed);
            while started.load(Ordering::Relaxed) < most && !control.stopped() {
                thread::sleep(TICK);
            }
            Ok(())
        };
        run_adapting(WorkerRange { first: 2, most, bytes: None }, &Never, work).unwrap();
        assert_eq!(started.into_inner(), most);
    }

    #[test]
    fn the_last_worker_is_never_too_many() {
        let shared = Shared::new(WorkerRange { first: 3, most: 8, bytes: None }, &Never, false);
        *shared.count() = Count { running: 3, wanted: 0 };
        let workers = [shared.control(), shared.control(), shared.control()];
        workers.iter().for_each(|worker| worker.arrived(1));
        let told = workers.each_ref().map(Control::is_retired);
        assert_eq!(told, [true, true, false]);
        assert_eq!(shared.count().running, 1);
        assert_eq!(shared.heard.load(Ordering::Relaxed), 1);
    }

    #[test]
    fn nobody_is_started_when_there_is_no_more_work_or_it_is_time_to_stop() {
        let range = WorkerRange { first: 2, most: 64, bytes: None };
        for (ending, stopped, missing) in [(false, false, 4), (true, false, 0), (false, true, 0)] {
            let shared = Shared::new(range, &Never, false);
            let mut watch = Watch::new(range, &shared);
            // Silence for long enough.
            watch.begun = watch.begun.checked_sub(Duration::from_secs(1)).unwrap();
            shared.ending.store(ending, Ordering::Relaxed);
            shared.stopped.store(stopped, Ordering::Relaxed);
            assert_eq!(watch.missing(), missing);
        }
    }

    #[test]
    fn the_first_error_ends_all_and_is_told() {
        let range = WorkerRange { first: 3, most: 6, bytes: None };
        let work = |control: &Control<'_>, number| {
            if number == 1 {
                return Err(Error::Closed("on purpose".to_owned()));
            }
            while !control.stopped() {
                thread::sleep(TICK);
            }
            control.check()
        };
        let outcome = run_adapting(range, &Never, work);
        assert!(matches!(outcome, Err(Error::Closed(_))));
    }
}
