//! Pools of pinned staging buffers, through which bytes go to and from devices.
//!
//! Each device has one pool. A buffer is leased and filled, and the host goes on while copies from
//! it run. The buffer returns to the pool when the event after its copies has passed. So a thread
//! waits for copies only if the pool is used up.
//!
//! Memory is allocated in slabs as it is needed, up to a limit. It is pinned for the device, and
//! kept for the next load.

mod buffers;
mod lease;
mod return_poll;
mod share;

use std::collections::HashMap;
use std::sync::Arc;
use std::sync::atomic::{AtomicU64, Ordering};
use std::time::Duration;

pub use lease::{DownloadedBytes, StagingLease, Upload, upload_all};
pub use share::Share;

use crate::cancel::Cancel;
use crate::codec::crypt::PIECE_LEN;
use crate::environment::{IN_FLIGHT_MB, PINNED_MB, STAGING_KB};
use crate::error::Result;
use crate::mem::device::Device;
use crate::sys::process::PerProcess;
use crate::sys::sync::{Mutex, MutexGuard, thread, unpoisoned};
use crate::sys::to_usize;
use buffers::{PoolBuffers, PoolState, PoolWaiter, StagingBuffer};
use return_poll::MIN_SLEEP;

/// Bytes that are allocated and pinned together, far below the size that drivers refuse to pin at
/// once. Pinning takes longer than copying, so that the first copy would wait for a longer slab.
const SLAB: usize = 8 << 20;
/// Minimum number of buffers of a pool: one batch may need this many at once.
pub const MIN_BUFFERS: usize = 4;
/// Poll interval of a reader that waits for other readers, to notice that its call was cancelled.
const QUEUE_POLL: Duration = Duration::from_millis(20);

/// Returns the minimum number of buffers of a length with which a load makes progress.
pub fn min_buffers(buffer_len: u64) -> u64 {
    if buffer_len >= 2 * PIECE_LEN { 2 } else { MIN_BUFFERS as u64 }
}

/// Staging buffers of one device, shared by all its loads and saves. Devices do not share a pool.
/// Another device's copies may depend on work that follows this load, so waiting for its buffers
/// could deadlock.
pub struct Pool {
    inner: PoolBuffers,
    /// Number of buffers that are allocated and pinned together.
    slab: usize,
    /// Number of buffers in flight that saturates the bus. From then on a thread waits for a
    /// buffer, instead of allocating more memory.
    saturating: usize,
}

/// A position in the queue for buffers. Tickets are served in order, except that calls which have
/// used up their share are passed over.
pub struct QueueTicket<'p> {
    pool: &'p Pool,
    number: u64,
    /// The call's limit; None if it has none.
    share: Option<Arc<Share>>,
}

impl Pool {
    /// Creates a pool of at most `limit` buffers. `saturating` of them in flight saturate the bus.
    pub fn new(buffer_len: usize, limit: usize, saturating: usize) -> Self {
        let slab = SLAB.div_ceil(buffer_len.max(1)).clamp(1, 8);
        Pool { inner: PoolBuffers::new(buffer_len, limit), slab, saturating: saturating.max(1) }
    }

    /// Returns the pool of a device, which lives as long as the process.
    pub fn of(device: &Arc<dyn Device>) -> Result<&'static Pool> {
        let (len, limit, saturating) = (buffer_len()?, limit()?, IN_FLIGHT_MB.value()?);
        let mut pools = unpoisoned(POOLS.get().lock());
        if let Some((_, pool)) = pools.iter().find(|(name, _)| name == device.name()) {
            return Ok(pool);
        }
        let pool: &Pool = Box::leak(Box::new(Pool::new(
            len,
            buffers_of(limit, len),
            buffers_of(saturating.saturating_mul(1 << 20), len),
        )));
        pools.push((device.name().to_owned(), pool));
        Ok(pool)
    }

    /// Returns the pools of all devices that were used.
    pub fn all() -> Vec<&'static Pool> {
        let pools = unpoisoned(POOLS.get().lock());
        pools.iter().map(|(_, pool)| *pool).collect()
    }

    /// Sets the maximum bytes of the pool of each device.
    pub fn limit_all(bytes: u64) {
        LIMIT.store(bytes.min(NO_LIMIT - 1), Ordering::Relaxed);
        for pool in Pool::all() {
            pool.set_limit(bytes);
        }
    }

    fn state(&self) -> MutexGuard<'_, PoolState> {
        self.inner.state()
    }

    /// Returns the bytes of a buffer.
    pub fn buffer_len(&self) -> usize {
        self.inner.len
    }

    /// Returns the maximum number of buffers of the pool, and so of a lease.
    pub fn limit(&self) -> usize {
        self.state().limit
    }

    /// Sets the maximum bytes of the pool; at least [`MIN_BUFFERS`] buffers.
    pub fn set_limit(&self, bytes: u64) {
        self.state().limit = buffers_of(bytes, self.inner.len);
        self.release();
    }

    /// Returns the bytes of host memory that the pool has.
    pub fn size(&self) -> usize {
        self.state().allocated * self.inner.len
    }

    /// True if some memory could not be pinned, so that copies are slower.
    pub fn is_pageable(&self) -> bool {
        self.state().pageable
    }

    /// Returns unused memory to the system, and gives the number of bytes.
    pub fn release(&self) -> usize {
        let mut state = self.state();
        // The error of a lost device is reported by the next load.
        let _ = state.reap();
        let mut idle: HashMap<usize, usize> = HashMap::new();
        for buffer in &state.free {
            *idle.entry(buffer.slab.base()).or_default() += 1;
        }
        let is_slab_unused = |buffer: &StagingBuffer| {
            idle.get(&buffer.slab.base()) == Some(&Arc::strong_count(&buffer.slab))
        };
        let (unused, in_use): (Vec<StagingBuffer>, Vec<StagingBuffer>) =
            std::mem::take(&mut state.free).into_iter().partition(is_slab_unused);
        state.free = in_use;
        state.allocated -= unused.len();
        state.pageable = state.pageable && state.allocated > 0;
        drop(state);
        unused.len() * self.inner.len
    }

    /// Takes a position in the queue. `share`: the limit of the call, if it has one.
    pub fn enqueue(&self, share: Option<&Arc<Share>>) -> QueueTicket<'_> {
        let mut state = self.state();
        state.last_ticket += 1;
        let number = state.last_ticket;
        let (thread, share) = (thread::current(), share.cloned());
        state.waiting.push_back(PoolWaiter { number, thread, share: share.clone(), buffers: 1 });
        QueueTicket { pool: self, number, share }
    }

    /// Takes one buffer without waiting. None if none is free, if the call's share is used up, or
    /// if other threads are ahead in the queue.
    pub fn try_lease(&self, share: Option<&Arc<Share>>) -> Option<StagingLease<'_>> {
        let mut state = self.state();
        let waits = state.ahead(None, share) > 0 || state.reap().is_err();
        if waits || share.is_some_and(|share| !share.allows(1)) {
            return None;
        }
        let buffers = state.take(1)?;
        Some(StagingLease::new(&self.inner, buffers, share.map(|share| share.reserve(1))))
    }

    /// Allocates more buffers; false if the limit is reached. A single request beyond the limit is
    /// granted, because the limit may have been lowered after its batch was planned.
    fn grow(
        &self,
        buffers: usize,
        share: Option<&Share>,
        device: &Arc<dyn Device>,
    ) -> Result<bool> {
        let count = {
            let mut state = self.state();
            // A call with a small share allocates no more than that.
            let most = share.map_or(usize::MAX, |share| share.remaining().max(buffers));
            let available = state.free.len() + state.being_allocated;
            let count = state.limit.max(buffers).saturating_sub(state.allocated).min(self.slab);
            let count = count.min(most.saturating_sub(available));
            state.allocated += count;
            state.being_allocated += count;
            count
        };
        if count == 0 {
            return Ok(false);
        }
        let allocated = self.inner.slab(count, device);
        let mut state = self.state();
        state.being_allocated -= count;
        let outcome = match allocated {
            Ok(buffers) => {
                state.pageable |= buffers.iter().any(|buffer| !buffer.slab.is_pinned());
                state.free.extend(buffers);
                Ok(true)
            }
            Err(error) => {
                state.allocated -= count;
                // If fewer buffers than allowed fit into memory but they suffice, the call goes on
                // with those.
                if state.allocated >= buffers { Ok(false) } else { Err(error) }
            }
        };
        state.wake_next();
        outcome
    }
}

/// The pools of this process. A forked process starts without pools, as it does not inherit the
/// memory of its parent's.
static POOLS: PerProcess<Mutex<Vec<(String, &'static Pool)>>> = PerProcess::new();
/// The maximum bytes of each pool, as set by [`Pool::limit_all`].
static LIMIT: AtomicU64 = AtomicU64::new(NO_LIMIT);
const NO_LIMIT: u64 = u64::MAX;

/// Returns the maximum bytes of each pool.
fn limit() -> Result<u64> {
    match LIMIT.load(Ordering::Relaxed) {
        NO_LIMIT => Ok(PINNED_MB.value()?.saturating_mul(1 << 20)),
        bytes => Ok(bytes),
    }
}

/// Returns the bytes of a staging buffer.
///
/// The default is long enough that starting a copy costs little in comparison (a bus of 55 GB/s
/// takes 38 µs for 2 MiB), and for a piece of an encrypted tensor at any position within a disk
/// block. It is short enough that the buffers in use stay in a processor's
/// last-level cache. The length is a multiple of the block of direct reads.
pub fn buffer_len() -> Result<usize> {
    let kib = STAGING_KB.value()? & !3;
    Ok(to_usize(kib << 10))
}

fn buffers_of(bytes: u64, len: usize) -> usize {
    to_usize(bytes / len.max(1) as u64).max(MIN_BUFFERS)
}

impl<'p> QueueTicket<'p> {
    /// Waits for buffers.
    ///
    /// The calling thread must not hold a lease whose return a ticket ahead of it needs: that would
    /// deadlock.
    pub fn lease(
        self,
        buffers: usize,
        device: &Arc<dyn Device>,
        cancel: &dyn Cancel,
    ) -> Result<StagingLease<'p>> {
        self.lease_with_idle_work(buffers, device, &|| Ok(false), cancel)
    }

    /// Waits like [`QueueTicket::lease`], and meanwhile calls `idle`, which returns true if it
    /// found something to do.
    pub fn lease_with_idle_work(
        self,
        buffers: usize,
        device: &Arc<dyn Device>,
        idle: &dyn Fn() -> Result<bool>,
        cancel: &dyn Cancel,
    ) -> Result<StagingLease<'p>> {
        let (pool, share) = (self.pool, self.share.as_ref());
        let mut state = pool.state();
        if let Some(own) = state.waiting.iter_mut().find(|waiter| waiter.number == self.number) {
            (own.buffers, own.thread) = (buffers, thread::current());
        }
        drop(state);
        loop {
            let wait = {
                let mut state = pool.state();
                let ahead = state.ahead(Some(self.number), share);
                // Free buffers first: checking those in flight costs driver calls.
                let has = || share.is_none_or(|share| share.allows(buffers));
                let lacks = state.free.len() < buffers || !has();
                if ahead == 0 && lacks && state.return_poll.wait().is_zero() {
                    state.reap_on(device)?;
                }
                let has = has();
                if ahead == 0
                    && has
                    && let Some(taken_buffers) = state.take(buffers)
                {
                    let held = share.map(|share| share.reserve(buffers));
                    return Ok(StagingLease::new(&pool.inner, taken_buffers, held));
                }
                let under_way: usize = state.in_flight.iter().map(|f| f.buffers.len()).sum();
                // All readers that need memory pin it at the same time. Buffers that are being
                // pinned are subtracted from the demand once, whichever reader began to pin them.
                let available = state.free.len() + state.being_allocated;
                let wanted = available < state.demand() && under_way < pool.saturating;
                let rest = if ahead > 0 || under_way == 0 {
                    QUEUE_POLL
                } else {
                    state.return_poll.wait().max(MIN_SLEEP)
                };
                drop(state);
                if has && wanted && pool.grow(buffers, share.map(Arc::as_ref), device)? {
                    continue;
                }
                rest
            };
            cancel.check()?;
            if !idle()? {
                thread::park_timeout(wait);
            }
        }
    }
}

impl Drop for QueueTicket<'_> {
    fn drop(&mut self) {
        let mut state = self.pool.state();
        state.waiting.retain(|waiter| waiter.number != self.number);
        state.wake_next();
    }
}

#[cfg(all(test, feature = "models"))]
mod models;
#[cfg(all(test, not(feature = "models")))]
#[allow(clippy::unwrap_used, clippy::indexing_slicing)]
mod tests;
