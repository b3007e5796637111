//! The thread that holds a lock, so that a call from within its own work is an error and not a
//! deadlock: signal handlers and progress callables of Python run in the middle of native calls.

use std::sync::atomic::{AtomicUsize, Ordering};

/// The thread that holds a lock; none at first.
#[derive(Debug, Default)]
pub struct LockHolder(AtomicUsize);

/// Marks the calling thread as the holder until it is dropped.
pub struct HolderMark<'h>(&'h LockHolder);

impl LockHolder {
    /// Marks the calling thread, which has just acquired the lock.
    pub fn mark(&self) -> HolderMark<'_> {
        self.0.store(this_thread(), Ordering::Relaxed);
        HolderMark(self)
    }

    /// True if the calling thread holds the lock. Only this thread stores its own number, so that
    /// the result is never out of date.
    pub fn is_this_thread(&self) -> bool {
        self.0.load(Ordering::Relaxed) == this_thread()
    }
}

impl Drop for HolderMark<'_> {
    fn drop(&mut self) {
        self.0.0.store(0, Ordering::Relaxed);
    }
}

/// Returns a number that no other live thread has: an address in its own memory.
fn this_thread() -> usize {
    thread_local!(static MARK: u8 = const { 0 });
    MARK.with(|mark| std::ptr::from_ref(mark).addr())
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn only_the_thread_that_marked_it_is_the_holder() {
        let holder = LockHolder::default();
        assert!(!holder.is_this_thread());
        let mark = holder.mark();
        assert!(holder.is_this_thread());
        std::thread::scope(|scope| {
            scope.spawn(|| assert!(!holder.is_this_thread()));
        });
        drop(mark);
        assert!(!holder.is_this_thread());
    }
}
