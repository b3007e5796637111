//! The limit on the staging buffers of one call, out of those that all calls share.

use std::sync::Arc;

use crate::sys::sync::atomic::{AtomicUsize, Ordering};

/// The number of buffers that one call holds, including those in flight, and its limit.
#[derive(Debug)]
pub struct Share {
    most: usize,
    held: AtomicUsize,
}

/// Buffers that count against a share until this is dropped.
pub struct ShareReservation {
    share: Arc<Share>,
    buffers: usize,
}

impl Share {
    /// Creates a share of at most `most` buffers. A single request for more is granted while the
    /// call holds none.
    pub fn new(most: usize) -> Arc<Self> {
        Arc::new(Share { most, held: AtomicUsize::new(0) })
    }

    /// Returns the maximum number of buffers at once.
    pub fn most(&self) -> usize {
        self.most
    }

    /// Returns the number of buffers that the call may still take.
    pub fn left(&self) -> usize {
        self.most.saturating_sub(self.held.load(Ordering::Relaxed))
    }

    /// True if the call may take this many buffers now.
    pub fn has(&self, buffers: usize) -> bool {
        let held = self.held.load(Ordering::Relaxed);
        held == 0 || held.saturating_add(buffers) <= self.most
    }

    /// Counts buffers as held. Called under the lock of the pool, after [`Share::has`].
    pub fn hold(self: &Arc<Self>, buffers: usize) -> ShareReservation {
        self.held.fetch_add(buffers, Ordering::Relaxed);
        ShareReservation { share: Arc::clone(self), buffers }
    }
}

impl Drop for ShareReservation {
    fn drop(&mut self) {
        self.share.held.fetch_sub(self.buffers, Ordering::Relaxed);
    }
}
