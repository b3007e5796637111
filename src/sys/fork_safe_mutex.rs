//! A fork-safe mutex: no process is forked while it is held. `unsafe` is allowed in this file: it
//! calls `pthread_atfork`.
//!
//! In a forked child, only the thread that called `fork` continues. A mutex that another thread
//! held would never be released there. So `fork` waits until no other thread holds one of these.
#![allow(unsafe_code)]

use std::cell::Cell;
use std::ops::{Deref, DerefMut};
use std::sync::atomic::{AtomicBool, AtomicU32, Ordering};
use std::sync::{Mutex, MutexGuard, Once};

use crate::sys::sync::unpoisoned;

/// A fork-safe mutex for short sections. While a thread holds it, it neither forks, nor waits for
/// other threads, nor calls code that may do so.
#[derive(Debug, Default)]
pub struct ForkSafeMutex<T>(Mutex<T>);

/// Threads that hold such mutexes, or are about to lock one.
static HOLDERS: AtomicU32 = AtomicU32::new(0);
/// Threads that are forking, and wait until there are no holders.
static FORKING: AtomicU32 = AtomicU32::new(0);

/// The id of this process; 0 where it has to be asked for.
static PROCESS: AtomicU32 = AtomicU32::new(0);
/// True if the handlers see forks.
static SEES_FORKS: AtomicBool = AtomicBool::new(false);

thread_local! {
    // The number of these mutexes that this thread holds.
    static HELD: Cell<u32> = const { Cell::new(0) };
}

impl<T> ForkSafeMutex<T> {
    /// Wraps a value.
    pub const fn new(value: T) -> Self {
        ForkSafeMutex(Mutex::new(value))
    }

    /// Locks the mutex; waits while another thread holds it.
    pub fn lock(&self) -> ForkSafeGuard<'_, T> {
        let blocker = ForkBlocker::new();
        let value = unpoisoned(self.0.lock());
        ForkSafeGuard { value, _blocker: blocker }
    }
}

/// Holds the lock until it is dropped.
pub struct ForkSafeGuard<'b, T> {
    // The first field, because fields are dropped in order: the mutex is unlocked before forks may
    // go on.
    value: MutexGuard<'b, T>,
    _blocker: ForkBlocker,
}

impl<T> Deref for ForkSafeGuard<'_, T> {
    type Target = T;

    fn deref(&self) -> &T {
        &self.value
    }
}

impl<T> DerefMut for ForkSafeGuard<'_, T> {
    fn deref_mut(&mut self) -> &mut T {
        &mut self.value
    }
}

/// No process is forked while this lives. It stays on the thread that made it, because it lies
/// beside the guard of a mutex, which is not `Send`.
struct ForkBlocker;

impl ForkBlocker {
    fn new() -> Self {
        install_fork_handlers();
        let held = HELD.get();
        // `fork` waits for a thread that holds one already: if that waited for `fork`, both would
        // wait for ever.
        if held == 0 {
            HOLDERS.fetch_add(1, Ordering::SeqCst);
            while FORKING.load(Ordering::SeqCst) > 0 {
                HOLDERS.fetch_sub(1, Ordering::SeqCst);
                // Only reads: if many threads kept counting themselves, `fork` might never see zero
                // holders.
                while FORKING.load(Ordering::SeqCst) > 0 {
                    std::thread::yield_now();
                }
                HOLDERS.fetch_add(1, Ordering::SeqCst);
            }
        }
        HELD.set(held + 1);
        ForkBlocker
    }
}

impl Drop for ForkBlocker {
    fn drop(&mut self) {
        let held = HELD.get().saturating_sub(1);
        HELD.set(held);
        if held == 0 {
            HOLDERS.fetch_sub(1, Ordering::SeqCst);
        }
    }
}

/// Installs the fork handlers. The first lock calls this; a library calls it while it is loaded,
/// before there are threads.
pub fn install_fork_handlers() {
    static INSTALLED: Once = Once::new();
    let (before, parent, child) = (before_fork, after_fork_in_parent, after_fork_in_child);
    INSTALLED.call_once(|| {
        // SAFETY: functions that take nothing and stay in memory as long as their library; when
        // that is unloaded, the C library drops them. If there is no memory to register them, forks
        // do not wait.
        let failed = unsafe { libc::pthread_atfork(Some(before), Some(parent), Some(child)) };
        SEES_FORKS.store(failed == 0, Ordering::SeqCst);
    });
}

/// The id of this process, without a system call.
pub fn process_id() -> u32 {
    let known = PROCESS.load(Ordering::Relaxed);
    if known != 0 {
        return known;
    }
    install_fork_handlers();
    let id = std::process::id();
    if SEES_FORKS.load(Ordering::SeqCst) {
        PROCESS.store(id, Ordering::Relaxed);
    }
    id
}

extern "C" fn before_fork() {
    FORKING.fetch_add(1, Ordering::SeqCst);
    while HOLDERS.load(Ordering::SeqCst) > own_holders() {
        std::thread::yield_now();
    }
}

extern "C" fn after_fork_in_parent() {
    FORKING.fetch_sub(1, Ordering::SeqCst);
}

extern "C" fn after_fork_in_child() {
    // Threads of the parent that were forking, or checked whether one was, do not exist here.
    FORKING.store(0, Ordering::SeqCst);
    PROCESS.store(0, Ordering::SeqCst);
    HOLDERS.store(own_holders(), Ordering::SeqCst);
}

/// 1 if this thread is among the holders, else 0: a thread that forks does not wait for itself.
fn own_holders() -> u32 {
    HELD.get().min(1)
}

#[cfg(test)]
mod tests {
    use super::*;

    /// Forks while threads take a lock; returns the number of children that could not take it.
    fn deadlocked_children(lock: &ForkSafeMutex<u64>, forks: u32) -> u32 {
        let stop = AtomicBool::new(false);
        std::thread::scope(|scope| {
            for _ in 0..3 {
                scope.spawn(|| {
                    while !stop.load(Ordering::Relaxed) {
                        let mut held = lock.lock();
                        *held += 1;
                        std::hint::black_box(lock);
                    }
                });
            }
            let without = (0..forks).filter(|_| {
                // SAFETY: the child only takes locks, sets an alarm and ends.
                let child = unsafe { libc::fork() };
                if child == 0 {
                    // SAFETY: takes a number.
                    unsafe { libc::alarm(20) };
                    *lock.lock() += 1;
                    // SAFETY: does not return.
                    unsafe { libc::_exit(0) };
                }
                let mut status = 0;
                // SAFETY: writes one number.
                unsafe { libc::waitpid(child, &raw mut status, 0) };
                status != 0
            });
            let without = without.count();
            stop.store(true, Ordering::Relaxed);
            u32::try_from(without).unwrap_or(u32::MAX)
        })
    }

    #[test]
    fn a_forked_child_can_take_the_lock() {
        static LOCK: ForkSafeMutex<u64> = ForkSafeMutex::new(0);
        // As while a library is loaded: a fork during the first lock would not be seen.
        install_fork_handlers();
        assert_eq!(deadlocked_children(&LOCK, 60), 0);
    }

    #[test]
    fn locks_nest() {
        let (one, other) = (ForkSafeMutex::new(1), ForkSafeMutex::new(2));
        let (held, inner) = (one.lock(), other.lock());
        assert_eq!(*held + *inner, 3);
        drop(held);
        assert_eq!(HELD.get(), 1);
        drop(inner);
        assert_eq!(HELD.get(), 0);
    }
}
