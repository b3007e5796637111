//! How many staging buffers one call has, of those that all calls share.

use std::sync::Arc;

use crate::sys::sync::atomic::{AtomicUsize, Ordering};

/// The buffers of one call, those on their way included.
#[derive(Debug)]
pub struct Share {
    most: usize,
    held: AtomicUsize,
}

/// So many of them, until this is dropped.
pub struct Held {
    share: Arc<Share>,
    buffers: usize,
}

impl Share {
    /// At most so many; who needs more at once gets them alone.
    pub fn new(most: usize) -> Arc<Self> {
        Arc::new(Share { most, held: AtomicUsize::new(0) })
    }

    /// The most at once.
    pub fn most(&self) -> usize {
        self.most
    }

    /// How many may still be had.
    pub fn left(&self) -> usize {
        self.most.saturating_sub(self.held.load(Ordering::Relaxed))
    }

    /// Whether so many may be had now.
    pub fn has(&self, buffers: usize) -> bool {
        let held = self.held.load(Ordering::Relaxed);
        held == 0 || held.saturating_add(buffers) <= self.most
    }

    /// Counts them. Called under the lock of the pool, after [`Share::has`].
    pub fn hold(self: &Arc<Self>, buffers: usize) -> Held {
        self.held.fetch_add(buffers, Ordering::Relaxed);
        Held { share: Arc::clone(self), buffers }
    }
}

impl Drop for Held {
    fn drop(&mut self) {
        self.share.held.fetch_sub(self.buffers, Ordering::Relaxed);
    }
}
