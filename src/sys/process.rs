//! What a process that was forked off inherits, and must not undo a second time. One of the few
//! doors to `unsafe`.
#![allow(unsafe_code)]

use std::mem::ManuallyDrop;
use std::ops::{Deref, DerefMut};
use std::ptr;
use std::sync::atomic::{AtomicPtr, Ordering};

/// The process that made something.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Maker(u32);

impl Maker {
    /// This process.
    pub fn this() -> Self {
        Maker(std::process::id())
    }

    /// Whether this still is that process, and not one that was forked off it.
    pub fn is_here(self) -> bool {
        self == Self::this()
    }

    /// Refuses what only the maker may do.
    pub fn check(self, uri: &str) -> crate::error::Result<()> {
        if self.is_here() {
            return Ok(());
        }
        Err(crate::error::Error::Closed(format!(
            "`{uri}` was begun by process {}, which alone can write and finish it: this is \
             process {}, which was forked off",
            self.0,
            std::process::id()
        )))
    }
}

/// A value that is dropped by the process that made it, and in others left alone.
pub struct Inherited<T> {
    value: ManuallyDrop<T>,
    maker: Maker,
}

impl<T> Inherited<T> {
    /// Made here.
    pub fn new(value: T) -> Self {
        Inherited { value: ManuallyDrop::new(value), maker: Maker::this() }
    }

    /// Who made it.
    pub fn maker(&self) -> Maker {
        self.maker
    }
}

impl<T> Deref for Inherited<T> {
    type Target = T;

    fn deref(&self) -> &T {
        &self.value
    }
}

impl<T> DerefMut for Inherited<T> {
    fn deref_mut(&mut self) -> &mut T {
        &mut self.value
    }
}

impl<T> Drop for Inherited<T> {
    fn drop(&mut self) {
        if self.maker.is_here() {
            // SAFETY: dropped nowhere else, and not used after this.
            unsafe { ManuallyDrop::drop(&mut self.value) };
        }
    }
}

/// A value that each process has for itself. One that was forked off begins with a new one: the
/// parent's locks may have been held at that moment, and would never be released. What is inherited is
/// never dropped.
pub struct PerProcess<T>(AtomicPtr<Made<T>>);

impl<T: Default + Send + Sync> Default for PerProcess<T> {
    fn default() -> Self {
        Self::new()
    }
}

struct Made<T> {
    maker: Maker,
    value: T,
}

impl<T: Default + Send + Sync> PerProcess<T> {
    /// Made when it is asked for.
    pub const fn new() -> Self {
        PerProcess(AtomicPtr::new(ptr::null_mut()))
    }

    /// The value of this process.
    pub fn get(&self) -> &T {
        let known = self.0.load(Ordering::Acquire);
        // SAFETY: null, or from a box that is freed with `self`; shared, and never changed.
        if let Some(made) = unsafe { known.as_ref() }
            && made.maker.is_here()
        {
            return &made.value;
        }
        let new = Box::new(Made { maker: Maker::this(), value: T::default() });
        let new = Box::into_raw(new);
        let set = self.0.compare_exchange(known, new, Ordering::AcqRel, Ordering::Acquire);
        let made = match set {
            Ok(_) => new,
            Err(other) => {
                // SAFETY: from the box above, which nobody else has seen.
                drop(unsafe { Box::from_raw(new) });
                other
            }
        };
        // SAFETY: as above; not null. Another thread of this process has made `other`, after this
        // one has looked: a process has one thread when it begins.
        unsafe { &(*made).value }
    }
}

impl<T> Drop for PerProcess<T> {
    fn drop(&mut self) {
        let made = *self.0.get_mut();
        // SAFETY: null, or from a box of `get`, in which it was put.
        if unsafe { made.as_ref() }.is_some_and(|made| made.maker.is_here()) {
            // SAFETY: as above; nobody else has `self` now, from which alone it is had.
            drop(unsafe { Box::from_raw(made) });
        }
    }
}

/// The most descriptors that this process may have.
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
