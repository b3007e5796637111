//! Locks and threads of code that has models: those of the standard library, or in a model those of
//! shuttle, which chooses the thread that runs next.

#[cfg(all(test, feature = "models"))]
mod modelled;

use std::sync::{LockResult, PoisonError};

#[cfg(not(all(test, feature = "models")))]
pub use super::cpu_time;
#[cfg(all(test, feature = "models"))]
pub use modelled::*;
#[cfg(not(all(test, feature = "models")))]
pub use std::sync::{Condvar, Mutex, MutexGuard, atomic, mpsc};
#[cfg(not(all(test, feature = "models")))]
pub use std::thread;
#[cfg(not(all(test, feature = "models")))]
pub use std::time::Instant;

/// The guard of a lock, or the value in it, even if a thread has panicked while it held the lock:
/// that panic is reported where it happened.
#[allow(clippy::disallowed_methods)] // clippy.toml names this function to all others.
pub fn unpoisoned<T>(locked: LockResult<T>) -> T {
    locked.unwrap_or_else(PoisonError::into_inner)
}
