//! Threads for the length of one call.
//!
//! They are started for the call and joined before it returns: nothing is left that a fork could
//! break, and memory can be lent to them. The calling thread waits, and looks for an interrupt.

use std::sync::atomic::{AtomicBool, AtomicUsize, Ordering};
use std::sync::{Mutex, PoisonError};
use std::thread;

use crate::cancel::{Cancel, POLL};
use crate::error::{Error, Result};

/// What the workers of one call share: the first error, and that it is time to stop.
pub struct Control<'c> {
    stopped: AtomicBool,
    error: Mutex<Option<Error>>,
    caller: &'c dyn Cancel,
    /// Whether the work is done on the caller's thread.
    inline: AtomicBool,
}

impl Cancel for Control<'_> {
    fn check(&self) -> Result<()> {
        if self.stopped() { Err(Error::Cancelled) } else { Ok(()) }
    }
}

impl Control<'_> {
    /// Whether to take no more work.
    pub fn stopped(&self) -> bool {
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
    let inline = threads <= 1;
    let control = Control {
        stopped: AtomicBool::new(false),
        error: Mutex::new(None),
        caller: cancel,
        inline: AtomicBool::new(inline),
    };
    let attempt = |control: &Control<'_>| {
        if let Err(error) = work(control) {
            control.fail(error);
        }
    };
    if inline {
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
                control.inline.store(true, Ordering::Relaxed);
                attempt(&control);
            }
            while running.load(Ordering::Acquire) > 0 {
                thread::park_timeout(POLL);
                if !control.stopped()
                    && let Err(error) = cancel.check()
                {
                    control.interrupt(error);
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
