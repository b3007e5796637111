//! Host memory through which bytes go to and from a device.
//!
//! One pool serves each device. Its buffers are leased, filled, copied from while the host
//! goes on, and come back by themselves when the event after the copies has passed: nobody waits
//! for a copy unless the pool is used up. Memory is taken in slabs as it is needed, up to a
//! limit, pinned for the device, and kept for the next load.

mod buffers;
mod lease;
mod returns;
mod share;

use std::collections::HashMap;
use std::sync::atomic::{AtomicU64, Ordering};
use std::sync::{Arc, PoisonError};
use std::time::Duration;

pub use lease::{Filled, Lease};
pub use share::Share;

use crate::cancel::Cancel;
use crate::codec::crypt::PIECE_LEN;
use crate::environment::{IN_FLIGHT_MB, PINNED_MB, STAGING_KB};
use crate::error::Result;
use crate::mem::device::Device;
use crate::sys::process::PerProcess;
use crate::sys::sync::{Mutex, MutexGuard, thread};
use buffers::{Buffer, Inner, State, Waiter};

/// Bytes that are allocated and pinned together: of which a reader has the most when readers need
/// them at the same time, and far below what drivers refuse to pin at once.
const SLAB: usize = 32 << 20;
/// A part of a file may need this many at once.
pub const MIN_BUFFERS: usize = 4;
/// How often a reader that waits for others looks whether its call was given up.
const IDLE: Duration = Duration::from_millis(20);

/// The fewest buffers of a length with which a load goes on.
pub fn fewest(buffer_len: u64) -> u64 {
    if buffer_len >= 2 * PIECE_LEN { 2 } else { MIN_BUFFERS as u64 }
}

/// Staging buffers, shared by all loads to and saves from one device: who waits for another
/// device's copies could wait for ever, for these may wait for what comes after the load.
pub struct Pool {
    inner: Inner,
    /// Buffers that are allocated and pinned together.
    slab: usize,
    /// With so many buffers on their way more would not make the bus faster: then whoever needs one
    /// waits, instead of taking more memory.
    plenty: usize,
}

/// A place in the queue for buffers: who came first is served first, but for calls that have all that
/// they may.
pub struct Ticket<'p> {
    pool: &'p Pool,
    number: u64,
    /// What the call may have, if that is bounded.
    share: Option<Arc<Share>>,
}

impl Pool {
    /// A pool of at most so many buffers, of which so many on their way are enough.
    pub fn new(buffer_len: usize, limit: usize, plenty: usize) -> Self {
        let slab = (SLAB / buffer_len.max(1)).clamp(1, 8);
        Pool { inner: Inner::new(buffer_len, limit), slab, plenty: plenty.max(1) }
    }

    /// The pool of a device, which lives as long as the process.
    pub fn of(device: &Arc<dyn Device>) -> Result<&'static Pool> {
        let (len, limit, plenty) = (buffer_len()?, limit()?, IN_FLIGHT_MB.value()?);
        let mut pools = POOLS.get().lock().unwrap_or_else(PoisonError::into_inner);
        if let Some((_, pool)) = pools.iter().find(|(name, _)| name == device.name()) {
            return Ok(pool);
        }
        let pool: &Pool = Box::leak(Box::new(Pool::new(
            len,
            buffers_of(limit, len),
            buffers_of(plenty.saturating_mul(1 << 20), len),
        )));
        pools.push((device.name().to_owned(), pool));
        Ok(pool)
    }

    /// The pools of all devices that were used.
    pub fn all() -> Vec<&'static Pool> {
        let pools = POOLS.get().lock().unwrap_or_else(PoisonError::into_inner);
        pools.iter().map(|(_, pool)| *pool).collect()
    }

    /// Sets the most bytes that the pool of each device may take.
    pub fn limit_all(bytes: u64) {
        LIMIT.store(bytes.min(NO_LIMIT - 1), Ordering::Relaxed);
        for pool in Pool::all() {
            pool.set_limit(bytes);
        }
    }

    fn state(&self) -> MutexGuard<'_, State> {
        self.inner.state()
    }

    /// Bytes of a buffer.
    pub fn buffer_len(&self) -> usize {
        self.inner.len
    }

    /// The most buffers that a lease can have.
    pub fn limit(&self) -> usize {
        self.state().limit
    }

    /// Sets the most bytes that the pool may take, at least one buffer.
    pub fn set_limit(&self, bytes: u64) {
        self.state().limit = buffers_of(bytes, self.inner.len);
        self.release();
    }

    /// Bytes of host memory that the pool has.
    pub fn size(&self) -> usize {
        self.state().made * self.inner.len
    }

    /// Whether memory could not be pinned, so that copies are slower.
    pub fn is_pageable(&self) -> bool {
        self.state().pageable
    }

    /// Gives memory that is not in use back to the system, and says how many bytes.
    pub fn release(&self) -> usize {
        let mut state = self.state();
        // A device that was lost is told of by the next load.
        let _ = state.reap();
        let mut idle: HashMap<usize, usize> = HashMap::new();
        for buffer in &state.free {
            *idle.entry(buffer.slab.base()).or_default() += 1;
        }
        let whole = |buffer: &Buffer| {
            idle.get(&buffer.slab.base()) == Some(&Arc::strong_count(&buffer.slab))
        };
        let (unused, kept): (Vec<Buffer>, Vec<Buffer>) =
            std::mem::take(&mut state.free).into_iter().partition(whole);
        state.free = kept;
        state.made -= unused.len();
        state.pageable = state.pageable && state.made > 0;
        drop(state);
        unused.len() * self.inner.len
    }

    /// Takes a place in the queue, for a call that may have so many if that is bounded.
    pub fn enter(&self, share: Option<&Arc<Share>>) -> Ticket<'_> {
        let mut state = self.state();
        state.last_ticket += 1;
        let number = state.last_ticket;
        let (thread, share) = (thread::current(), share.cloned());
        state.waiting.push_back(Waiter { number, thread, share: share.clone(), buffers: 1 });
        Ticket { pool: self, number, share }
    }

    /// Buffers that are there at once, if nobody waits for them.
    pub fn try_lease(&self, buffers: usize, share: Option<&Arc<Share>>) -> Option<Lease<'_>> {
        let mut state = self.state();
        let waits = state.ahead(None, share) > 0 || state.reap().is_err();
        if waits || share.is_some_and(|share| !share.has(buffers)) {
            return None;
        }
        let taken = state.take(buffers)?;
        Some(Lease::new(&self.inner, taken, share.map(|share| share.hold(buffers))))
    }

    /// Makes more buffers; false if there may be no more. Who needs more than the limit at once gets
    /// them all the same: the limit may have been lowered since its parts were planned.
    fn grow(
        &self,
        buffers: usize,
        share: Option<&Share>,
        device: &Arc<dyn Device>,
    ) -> Result<bool> {
        let count = {
            let mut state = self.state();
            // A call that may have few makes no more than those.
            let most = share.map_or(usize::MAX, |share| share.left().max(buffers));
            let there = state.free.len() + state.coming;
            let count = state.limit.max(buffers).saturating_sub(state.made).min(self.slab);
            let count = count.min(most.saturating_sub(there));
            state.made += count;
            state.coming += count;
            count
        };
        if count == 0 {
            return Ok(false);
        }
        let made = self.inner.slab(count, device);
        let mut state = self.state();
        state.coming -= count;
        let outcome = match made {
            Ok(buffers) => {
                state.pageable |= buffers.iter().any(|buffer| !buffer.slab.is_pinned());
                state.free.extend(buffers);
                Ok(true)
            }
            Err(error) => {
                state.made -= count;
                // Who has less than was allowed goes on with that.
                if state.made >= buffers { Ok(false) } else { Err(error) }
            }
        };
        state.wake_first();
        outcome
    }
}

/// A process that was forked off has no pool yet: the memory of the parent's is not there.
static POOLS: PerProcess<Mutex<Vec<(String, &'static Pool)>>> = PerProcess::new();
/// The most bytes of each pool that were asked for.
static LIMIT: AtomicU64 = AtomicU64::new(NO_LIMIT);
const NO_LIMIT: u64 = u64::MAX;

/// The most bytes of each pool.
fn limit() -> Result<u64> {
    match LIMIT.load(Ordering::Relaxed) {
        NO_LIMIT => Ok(PINNED_MB.value()?.saturating_mul(1 << 20)),
        bytes => Ok(bytes),
    }
}

/// Bytes of a buffer in the pools of devices. By default so long that starting a copy costs nothing
/// beside it (a bus of 55 GB/s takes 76 µs for 4 MiB), so short that the buffers in use stay in a
/// processor's last cache. In whole blocks of direct reads.
pub fn buffer_len() -> Result<usize> {
    let kib = STAGING_KB.value()?.clamp(1 << 10, 64 << 10) & !3;
    Ok(usize::try_from(kib << 10).unwrap_or(SLAB))
}

fn buffers_of(bytes: u64, len: usize) -> usize {
    usize::try_from(bytes / len.max(1) as u64).unwrap_or(usize::MAX).max(MIN_BUFFERS)
}

impl<'p> Ticket<'p> {
    /// Waits for buffers.
    ///
    /// Whoever waits must not hold a lease that somebody who waits before needs to be given back.
    pub fn lease(
        self,
        buffers: usize,
        device: &Arc<dyn Device>,
        cancel: &dyn Cancel,
    ) -> Result<Lease<'p>> {
        self.lease_or(buffers, device, &|| Ok(false), cancel)
    }

    /// The same; as long as it waits it calls `idle`, which says whether it found something to do.
    pub fn lease_or(
        self,
        buffers: usize,
        device: &Arc<dyn Device>,
        idle: &dyn Fn() -> Result<bool>,
        cancel: &dyn Cancel,
    ) -> Result<Lease<'p>> {
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
                // Free buffers first: a look at those on their way costs calls of the driver.
                let has = || share.is_none_or(|share| share.has(buffers));
                let lacks = state.free.len() < buffers || !has();
                if ahead == 0 && lacks && !state.returns.is_early() {
                    state.reap_on(device)?;
                }
                let has = has();
                if ahead == 0
                    && has
                    && let Some(taken) = state.take(buffers)
                {
                    let held = share.map(|share| share.hold(buffers));
                    return Ok(Lease::new(&pool.inner, taken, held));
                }
                let under_way: usize = state.in_flight.iter().map(|f| f.buffers.len()).sum();
                // All readers that need memory pin it at the same time: what one of them is pinning
                // counts for one of them only, whichever asked first.
                let there = state.free.len() + state.coming;
                let wanted = there < state.wanted() && under_way < pool.plenty;
                let rest = if ahead > 0 || under_way == 0 { IDLE } else { state.returns.rest() };
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

impl Drop for Ticket<'_> {
    fn drop(&mut self) {
        let mut state = self.pool.state();
        state.waiting.retain(|waiter| waiter.number != self.number);
        state.wake_first();
    }
}

#[cfg(all(test, feature = "models"))]
mod models;
#[cfg(all(test, not(feature = "models")))]
#[allow(clippy::unwrap_used, clippy::indexing_slicing)]
mod tests;
