//! Threads for the length of one call.
//!
//! They are started for the call and joined before it returns: nothing is left that a fork could
//! break, and memory can be lent to them. The calling thread waits, and looks for an interrupt.

use std::sync::atomic::{AtomicBool, AtomicUsize, Ordering};
use std::sync::{Mutex, PoisonError};
use std::thread;
use std::time::Duration;

use crate::error::{Error, Result};

/// How often the calling thread looks for an interrupt.
const POLL: Duration = Duration::from_millis(100);

/// Called on the caller's thread now and then; an error ends the work with it.
pub type Interrupt<'a> = &'a dyn Fn() -> Result<()>;

/// What the workers of one call share: the first error, and that it is time to stop.
#[derive(Default)]
pub struct Control {
    stopped: AtomicBool,
    error: Mutex<Option<Error>>,
}

impl Control {
    /// Whether to take no more work.
    pub fn stopped(&self) -> bool {
        self.stopped.load(Ordering::Relaxed)
    }

    fn fail(&self, error: Error) {
        self.error.lock().unwrap_or_else(PoisonError::into_inner).get_or_insert(error);
        self.stopped.store(true, Ordering::Relaxed);
    }
}

/// Runs `work` on `threads` threads at once and returns the first error.
///
/// With `threads` 0 it runs on the calling thread, for work too small to be worth a thread.
pub fn run(
    threads: usize,
    interrupt: Interrupt<'_>,
    work: impl Fn(&Control) -> Result<()> + Sync,
) -> Result<()> {
    let control = Control::default();
    let attempt = |control: &Control| {
        if let Err(error) = work(control) {
            control.fail(error);
        }
    };
    if threads == 0 {
        attempt(&control);
    } else {
        let running = AtomicUsize::new(threads);
        let caller = thread::current();
        thread::scope(|scope| {
            let mut handles = Vec::with_capacity(threads);
            for _ in 0..threads {
                // Declared in the closure, so that it runs when the work panics too.
                let worker = || {
                    let _done = OnDrop(|| {
                        // A panic must not leave the others waiting for what it would have done.
                        if thread::panicking() {
                            control.stopped.store(true, Ordering::Relaxed);
                        }
                        running.fetch_sub(1, Ordering::Release);
                        caller.unpark();
                    });
                    attempt(&control);
                };
                match thread::Builder::new()
                    .name("tensorizer".to_owned())
                    .spawn_scoped(scope, worker)
                {
                    Ok(handle) => handles.push(handle),
                    Err(_) => drop(running.fetch_sub(1, Ordering::Release)),
                }
            }
            // A process that may not have more threads goes on with those that it has.
            if handles.is_empty() {
                attempt(&control);
            }
            while running.load(Ordering::Acquire) > 0 {
                thread::park_timeout(POLL);
                if !control.stopped()
                    && let Err(error) = interrupt()
                {
                    control.fail(error);
                }
            }
            // The scope would only wait for the work; joined threads are gone from the process.
            for handle in handles {
                if let Err(panic) = handle.join() {
                    std::panic::resume_unwind(panic);
                }
            }
        });
    }
    match control.error.into_inner().unwrap_or_else(PoisonError::into_inner) {
        Some(error) => Err(error),
        None => Ok(()),
    }
}

struct OnDrop<F: FnMut()>(F);

impl<F: FnMut()> Drop for OnDrop<F> {
    fn drop(&mut self) {
        (self.0)();
    }
}
