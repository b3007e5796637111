//! Shuttle's locks and threads, with a clock that advances only while a thread waits.
//!
//! `cargo test --features models --lib models::` runs all models, each for `MODEL_SECONDS` and from
//! the seed `MODEL_SEED`. `MODEL_SCHEDULE` runs the schedule again that a failure has printed.
#![allow(clippy::unwrap_used)]

use std::cell::Cell;
use std::str::FromStr;
use std::sync::Arc;
use std::time::Duration;

pub use shuttle::rand::{Rng, thread_rng};
use shuttle::scheduler::{PctScheduler, RandomScheduler};
pub use shuttle::sync::{Condvar, Mutex, MutexGuard, atomic};
use shuttle::{Config, Runner};

/// The rules of a model.
#[derive(Debug, Clone, Copy)]
pub struct ModelRules {
    /// Waits up to this long may time out. Longer ones never do: a thread that is not woken waits
    /// for ever.
    pub longest_timeout: Duration,
    /// True if the system may refuse to start threads.
    pub spawn_may_fail: bool,
}

std::thread_local! {
    // Shuttle runs all threads of a model on the thread of the test, so that they share these.
    static RULES: Cell<ModelRules> = const { Cell::new(ModelRules { longest_timeout: Duration::ZERO, spawn_may_fail: false }) };
    static CLOCK: Cell<Duration> = const { Cell::new(Duration::ZERO) };
}

fn env_or_default<T: FromStr>(name: &str, default: T) -> T {
    std::env::var(name).ok().and_then(|value| value.parse().ok()).unwrap_or(default)
}

/// Runs a model under as many schedules as there is time for: random ones, and ones with few thread
/// switches. The latter find defects that need a few switches at certain places.
pub fn check_model(rules: ModelRules, model: impl Fn() + Send + Sync + 'static) {
    let model = Arc::new(move || {
        RULES.set(rules);
        CLOCK.set(Duration::ZERO);
        // A second thread, so that there is a choice even in a model that uses no threads.
        shuttle::thread::spawn(shuttle::thread::yield_now);
        model();
    });
    let run = Arc::clone(&model);
    if let Ok(schedule) = std::env::var("MODEL_SCHEDULE") {
        return shuttle::replay(move || run(), &schedule);
    }
    let mut config = Config::new();
    config.silence_warnings = true;
    config.max_time = Some(Duration::from_secs_f64(env_or_default("MODEL_SECONDS", 2.0) / 2.0));
    let seed = env_or_default("MODEL_SEED", 0);
    let random = RandomScheduler::new_from_seed(seed, usize::MAX);
    let mut schedules = Runner::new(random, config.clone()).run(move || run());
    let few = PctScheduler::new_from_seed(seed, 3, usize::MAX);
    schedules += Runner::new(few, config).run(move || model());
    println!("{schedules} schedules");
}

/// Lets other threads run and time pass: `time`, or longer, as on a busy machine.
fn advance_clock(time: Duration) {
    let until = CLOCK.get() + time * thread_rng().gen_range(1..64);
    shuttle::thread::yield_now();
    CLOCK.set(CLOCK.get().max(until));
}

fn times_out(time: Duration) -> bool {
    time <= RULES.get().longest_timeout
}

/// The CPU time of the process: none in a model.
pub fn cpu_time() -> Duration {
    Duration::ZERO
}

/// A moment of the model's clock.
#[derive(Debug, Clone, Copy)]
pub struct Instant(Duration);

impl Instant {
    pub fn now() -> Self {
        Instant(CLOCK.get())
    }

    pub fn elapsed(self) -> Duration {
        CLOCK.get() - self.0
    }
}

pub mod thread {
    use std::io;
    use std::time::Duration;

    use shuttle::thread::park;
    pub use shuttle::thread::{
        JoinHandle, Scope, ScopedJoinHandle, Thread, current, panicking, scope, yield_now,
    };

    use super::{RULES, Rng as _, advance_clock, thread_rng, times_out};

    pub fn park_timeout(time: Duration) {
        if times_out(time) {
            advance_clock(time);
            // The `park` below returns at once, and consumes a wake-up that came meanwhile too.
            current().unpark();
        }
        park();
    }

    pub fn sleep(time: Duration) {
        advance_clock(time);
    }

    fn may_refuse_thread() -> io::Result<()> {
        if RULES.get().spawn_may_fail && thread_rng().gen_ratio(1, 4) {
            return Err(io::ErrorKind::WouldBlock.into());
        }
        Ok(())
    }

    #[derive(Default)]
    pub struct Builder(shuttle::thread::Builder);

    impl Builder {
        pub fn new() -> Self {
            Self::default()
        }

        pub fn name(self, name: String) -> Self {
            Builder(self.0.name(name))
        }

        pub fn spawn<T: Send + 'static>(
            self,
            work: impl FnOnce() -> T + Send + 'static,
        ) -> io::Result<JoinHandle<T>> {
            may_refuse_thread()?;
            self.0.spawn(work)
        }

        pub fn spawn_scoped<'scope, T: Send + 'scope>(
            self,
            scope: &'scope Scope<'scope, '_>,
            work: impl FnOnce() -> T + Send + 'scope,
        ) -> io::Result<ScopedJoinHandle<'scope, T>> {
            may_refuse_thread()?;
            Ok(scope.spawn(work))
        }
    }
}

pub mod mpsc {
    use std::time::Duration;

    pub use shuttle::sync::mpsc::{RecvTimeoutError, SyncSender, TryRecvError};

    use super::{advance_clock, times_out};

    pub struct Receiver<T>(shuttle::sync::mpsc::Receiver<T>);

    pub fn sync_channel<T>(bound: usize) -> (SyncSender<T>, Receiver<T>) {
        let (send, receive) = shuttle::sync::mpsc::sync_channel(bound);
        (send, Receiver(receive))
    }

    impl<T> Receiver<T> {
        pub fn recv_timeout(&self, time: Duration) -> Result<T, RecvTimeoutError> {
            if !times_out(time) {
                return self.0.recv().map_err(|_| RecvTimeoutError::Disconnected);
            }
            advance_clock(time);
            self.0.try_recv().map_err(|error| match error {
                TryRecvError::Empty => RecvTimeoutError::Timeout,
                TryRecvError::Disconnected => RecvTimeoutError::Disconnected,
            })
        }
    }
}
