//! Values that a forked child inherits, and must not release a second time. `unsafe` is allowed in
//! this file: it drops values through raw pointers.
#![allow(unsafe_code)]

use std::mem::ManuallyDrop;
use std::ops::{Deref, DerefMut};
use std::ptr;
use std::sync::atomic::{AtomicPtr, Ordering};

use super::fork_safe_mutex::process_id;

/// The id of the process that owns something.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct OwnerProcess(u32);

impl OwnerProcess {
    /// The id of this process.
    pub fn current() -> Self {
        OwnerProcess(process_id())
    }

    /// True if this process is the owner, and not a forked child of it.
    pub fn is_current(self) -> bool {
        self == Self::current()
    }

    /// Refuses an operation that only the owner may do.
    pub fn check(self, uri: &str) -> crate::error::Result<()> {
        if self.is_current() {
            return Ok(());
        }
        Err(crate::error::Error::Closed(format!(
            "`{uri}` was opened for writing by process {}, and only that process can write and \
             close it: this is process {}, made by fork()",
            self.0,
            std::process::id()
        )))
    }
}

/// A value that is dropped only in its owner, the process that made it. Forked children leave it
/// alone.
pub struct DropInOwner<T> {
    value: ManuallyDrop<T>,
    owner: OwnerProcess,
}

impl<T> DropInOwner<T> {
    /// Wraps a value that this process owns.
    pub fn new(value: T) -> Self {
        DropInOwner { value: ManuallyDrop::new(value), owner: OwnerProcess::current() }
    }

    /// The process that made it.
    pub fn owner(&self) -> OwnerProcess {
        self.owner
    }
}

impl<T> Deref for DropInOwner<T> {
    type Target = T;

    fn deref(&self) -> &T {
        &self.value
    }
}

impl<T> DerefMut for DropInOwner<T> {
    fn deref_mut(&mut self) -> &mut T {
        &mut self.value
    }
}

impl<T> Drop for DropInOwner<T> {
    fn drop(&mut self) {
        if self.owner.is_current() {
            // SAFETY: dropped nowhere else, and not used after this.
            unsafe { ManuallyDrop::drop(&mut self.value) };
        }
    }
}

/// A value that each process has for itself. A forked child begins with a new one: the parent's
/// locks may have been held at the fork, and would never be released. An inherited value is never
/// dropped.
pub struct PerProcess<T>(AtomicPtr<DropInOwner<T>>);

impl<T: Default + Send + Sync> Default for PerProcess<T> {
    fn default() -> Self {
        Self::new()
    }
}

impl<T: Default + Send + Sync> PerProcess<T> {
    /// Creates no value yet: that happens at the first use.
    pub const fn new() -> Self {
        PerProcess(AtomicPtr::new(ptr::null_mut()))
    }

    /// The value of this process.
    pub fn get(&self) -> &T {
        let loaded = self.0.load(Ordering::Acquire);
        // SAFETY: null, or from a box that is freed only with `self`; it is shared, and never
        // changed.
        if let Some(stored) = unsafe { loaded.as_ref() }
            && stored.owner.is_current()
        {
            return stored;
        }
        let new = Box::into_raw(Box::new(DropInOwner::new(T::default())));
        let set = self.0.compare_exchange(loaded, new, Ordering::AcqRel, Ordering::Acquire);
        let stored = match set {
            Ok(_) => new,
            Err(other) => {
                // SAFETY: from the box above, which no other thread has seen.
                drop(unsafe { Box::from_raw(new) });
                other
            }
        };
        // SAFETY: as above; not null. `other` was made by another thread of this process after this
        // thread had loaded `loaded`: a process has only one thread when it begins.
        unsafe { &*stored }
    }
}

impl<T> Drop for PerProcess<T> {
    fn drop(&mut self) {
        let stored = *self.0.get_mut();
        // SAFETY: null, or from a box that `get` has put there.
        if unsafe { stored.as_ref() }.is_some_and(|stored| stored.owner.is_current()) {
            // SAFETY: as above; only `self` leads to the box, and it is borrowed exclusively here.
            drop(unsafe { Box::from_raw(stored) });
        }
    }
}

/// The maximum number of file descriptors that this process may have open.
pub fn descriptor_limit() -> u64 {
    let mut limit = libc::rlimit { rlim_cur: 0, rlim_max: 0 };
    // SAFETY: writes one struct, which lives until the call returns.
    unsafe { libc::getrlimit(libc::RLIMIT_NOFILE, &raw mut limit) };
    limit.rlim_cur
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn threads_share_the_value_of_their_process() {
        static VALUE: PerProcess<std::sync::Mutex<u32>> = PerProcess::new();
        let addresses = std::thread::scope(|scope| {
            let threads: Vec<_> =
                (0..8).map(|_| scope.spawn(|| ptr::from_ref(VALUE.get()).addr())).collect();
            threads.into_iter().filter_map(|thread| thread.join().ok()).collect::<Vec<_>>()
        });
        assert_eq!(addresses, [ptr::from_ref(VALUE.get()).addr(); 8]);
    }
}
