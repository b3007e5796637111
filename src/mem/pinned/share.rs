//! The limit on the staging buffers of one call, out of those that all calls share.

use std::sync::Arc;

use crate::sys::sync::atomic::{AtomicUsize, Ordering};

/// The number of buffers that one call holds, including those in flight, and its limit.
#[derive(Debug)]
pub struct Share {
    /// The maximum number of buffers at once.
    pub max_buffers: usize,
    reserved: AtomicUsize,
}

/// Buffers that count against a share until this is dropped.
pub struct ShareReservation {
    share: Arc<Share>,
    buffers: usize,
}

impl Share {
    /// Creates a share of at most `max_buffers` buffers. A single request for more is granted while
    /// the call holds none.
    pub fn new(max_buffers: usize) -> Arc<Self> {
        Arc::new(Share { max_buffers, reserved: AtomicUsize::new(0) })
    }

    /// Returns the number of buffers that the call may still take.
    pub fn remaining(&self) -> usize {
        self.max_buffers.saturating_sub(self.reserved.load(Ordering::Relaxed))
    }

    /// True if the call may take this many buffers now.
    pub fn allows(&self, buffers: usize) -> bool {
        let reserved = self.reserved.load(Ordering::Relaxed);
        reserved == 0 || reserved.saturating_add(buffers) <= self.max_buffers
    }

    /// Counts buffers as held. Called under the lock of the pool, after [`Share::allows`].
    pub fn reserve(self: &Arc<Self>, buffers: usize) -> ShareReservation {
        self.reserved.fetch_add(buffers, Ordering::Relaxed);
        ShareReservation { share: Arc::clone(self), buffers }
    }
}

impl Drop for ShareReservation {
    fn drop(&mut self) {
        self.share.reserved.fetch_sub(self.buffers, Ordering::Relaxed);
    }
}
