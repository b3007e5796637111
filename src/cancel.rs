//! Cancellation of calls.
//!
//! Every function that may wait takes a [`Cancel`], and checks it at least every 100 ms. On the
//! caller's own thread it is the caller's check, for example for signals. On other threads it is a
//! check of whether the call has ended.

use std::io;
use std::sync::{Arc, TryLockError};
use std::time::Duration;

use crate::error::{Error, Result};
use crate::sys::clock;
use crate::sys::process::PerProcess;
use crate::sys::sync::mpsc::{RecvTimeoutError, sync_channel};
use crate::sys::sync::{Mutex, thread, unpoisoned};

/// Interval of checks for cancellation while waiting.
pub const POLL: Duration = Duration::from_millis(50);

/// Poll interval while waiting for a lock.
const LOCK_POLL: Duration = Duration::from_millis(10);

/// A check for cancellation.
pub trait Cancel: Sync {
    /// Returns an error if the call must end. The call ends with this error.
    fn check(&self) -> Result<()>;
}

impl<F: Fn() -> Result<()> + Sync> Cancel for F {
    fn check(&self) -> Result<()> {
        self()
    }
}

/// Never cancels a call.
#[derive(Debug, Clone, Copy, Default)]
pub struct Never;

impl Cancel for Never {
    fn check(&self) -> Result<()> {
        Ok(())
    }
}

/// Sleeps, and checks for cancellation meanwhile.
pub fn sleep(time: Duration, cancel: &dyn Cancel) -> Result<()> {
    let start = clock::now();
    while let Some(remaining) =
        time.checked_sub(clock::since(start)).filter(|remaining| !remaining.is_zero())
    {
        cancel.check()?;
        clock::sleep(remaining.min(POLL));
    }
    cancel.check()
}

/// Repeats a system call that a signal interrupts, and checks for cancellation before each attempt:
/// its error is carried by the one of the system, for `Error::of_io`.
pub fn retry_interrupted<T>(
    cancel: &dyn Cancel,
    mut call: impl FnMut() -> io::Result<T>,
) -> io::Result<T> {
    loop {
        cancel.check().map_err(io::Error::other)?;
        match call() {
            Err(e) if e.kind() == io::ErrorKind::Interrupted => {}
            done => return done,
        }
    }
}

/// A per-process lock for one-time work: one thread does it while others wait. A forked child has
/// its own lock, because no thread there would release the parent's.
pub type ProcessLock = PerProcess<std::sync::Mutex<()>>;

/// Waits for a mutex that other threads may hold for long.
pub fn lock_mutex<'m, T>(
    mutex: &'m std::sync::Mutex<T>,
    cancel: &dyn Cancel,
) -> Result<std::sync::MutexGuard<'m, T>> {
    loop {
        match mutex.try_lock() {
            Ok(held) => return Ok(held),
            Err(TryLockError::Poisoned(poisoned)) => return Ok(unpoisoned(Err(poisoned))),
            Err(TryLockError::WouldBlock) => sleep(LOCK_POLL, cancel)?,
        }
    }
}

/// Runs work that cannot be stopped, such as a sync to a disk that hangs, on a thread of its own.
/// If the call is cancelled before the work ends, the thread continues, and owns everything that
/// was moved into it.
pub fn run_detached<T: Send + 'static>(
    cancel: &dyn Cancel,
    work: impl FnOnce() -> T + Send + 'static,
) -> Result<T> {
    let (send, receive) = sync_channel(1);
    let work = Arc::new(Mutex::new(Some(work)));
    let take = |work: &Mutex<Option<_>>| unpoisoned(work.lock()).take();
    let work_of_thread = Arc::clone(&work);
    let thread = thread::Builder::new().name("tensorizer".to_owned()).spawn(move || {
        if let Some(work) = take(&work_of_thread) {
            drop(work_of_thread);
            // Fails if the call was cancelled: then there is no receiver.
            let _ = send.send(work());
        }
    });
    // If the process may not have more threads, this one does the work.
    let Ok(thread) = thread else {
        let work = take(&work).ok_or_else(|| Error::Bug("work without a thread".to_owned()))?;
        return Ok(work());
    };
    loop {
        match receive.recv_timeout(POLL) {
            Ok(done) => {
                // The thread only has to exit.
                let _ = thread.join();
                return Ok(done);
            }
            Err(RecvTimeoutError::Timeout) => cancel.check()?,
            Err(RecvTimeoutError::Disconnected) => match thread.join() {
                Err(panic) => std::panic::resume_unwind(panic),
                Ok(()) => return Err(Error::Bug("a thread ended without a result".to_owned())),
            },
        }
    }
}

#[cfg(all(test, feature = "models"))]
mod models;

#[cfg(all(test, not(feature = "models")))]
#[allow(clippy::unwrap_used)]
mod tests {
    use std::sync::atomic::{AtomicU32, Ordering};

    use super::*;

    /// Cancels the call at the check after this many.
    fn cancel_after(times: u32) -> impl Cancel {
        let asked = AtomicU32::new(0);
        move || match asked.fetch_add(1, Ordering::Relaxed) {
            asked if asked < times => Ok(()),
            _ => Err(Error::Cancelled),
        }
    }

    #[test]
    fn a_cancelled_caller_does_not_wait_for_detached_work() {
        assert_eq!(run_detached(&Never, || 7).unwrap(), 7);
        let (end, may_end) = sync_channel::<()>(0);
        let stuck = run_detached(&cancel_after(2), move || may_end.recv());
        assert!(matches!(stuck, Err(Error::Cancelled)));
        // The work is still running, and ends when it can.
        end.send(()).unwrap();
    }

    #[test]
    fn a_panic_reaches_the_caller() {
        let caught: Result<Result<()>, _> = std::panic::catch_unwind(|| {
            run_detached(&Never, || std::panic::panic_any("on purpose"))
        });
        assert!(caught.is_err());
    }

    #[test]
    fn a_cancelled_sleep_ends_early() {
        let long = Duration::from_secs(3600);
        assert!(matches!(sleep(long, &cancel_after(3)), Err(Error::Cancelled)));
        sleep(Duration::ZERO, &Never).unwrap();
    }
}
