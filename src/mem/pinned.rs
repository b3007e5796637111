//! Host memory through which bytes go to and from a device.
//!
//! One pool serves each device. Its units are leased, filled, copied from while the host
//! goes on, and come back by themselves when the event after the copies has passed: nobody waits
//! for a copy unless the pool is used up. Memory is taken in segments as it is needed, up to a
//! limit, pinned for the device, and kept for the next load.

mod lease;
mod units;

use std::collections::HashMap;
use std::sync::atomic::{AtomicU64, Ordering};
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};
use std::thread;
use std::time::Duration;

pub use lease::{Filled, Lease};

use crate::cancel::Cancel;
use crate::environment::PINNED_MB;
use crate::error::Result;
use crate::mem::device::Device;
use crate::sys::process::PerProcess;
use units::{POLL, State, Unit, Units};

/// Bytes of a unit: so long that starting a copy costs nothing beside it (a bus of 55 GB/s takes
/// 76 µs), so short that the units in use stay in a processor's last cache.
pub const UNIT_LEN: usize = 4 << 20;
/// Units that are allocated and pinned together: 32 MiB, of which a reader has the most when
/// readers need them at the same time, and far below what drivers refuse to pin at once.
const SEGMENT_UNITS: usize = 8;
/// A part of a file may need this many at once.
pub const MIN_UNITS: usize = 4;
/// With so many units on their way (64 MiB, or 1.2 ms of a bus of 55 GB/s), more would not make the
/// bus faster: then whoever needs one waits, instead of taking more memory.
const PLENTY: usize = 16;
/// How often a reader that waits for others looks whether its call was given up.
const IDLE: Duration = Duration::from_millis(20);

/// Units of host memory, shared by all loads to and saves from one device: who waits for another
/// device's copies could wait for ever, for these may wait for what comes after the load.
pub struct Pool {
    units: Units,
}

/// A place in the queue for units: who came first is served first.
pub struct Ticket<'p> {
    pool: &'p Pool,
    number: u64,
}

impl Pool {
    /// A pool of at most so many units.
    pub fn new(unit_len: usize, limit: usize) -> Self {
        Pool { units: Units::new(unit_len, limit) }
    }

    /// The pool of a device, which lives as long as the process.
    pub fn of(device: &Arc<dyn Device>) -> Result<&'static Pool> {
        let limit = limit()?;
        let mut pools = POOLS.get().lock().unwrap_or_else(PoisonError::into_inner);
        if let Some((_, pool)) = pools.iter().find(|(name, _)| name == device.name()) {
            return Ok(pool);
        }
        let pool: &Pool = Box::leak(Box::new(Pool::new(UNIT_LEN, units_of(limit))));
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
        self.units.state()
    }

    /// Bytes of a unit.
    pub fn unit_len(&self) -> usize {
        self.units.len
    }

    /// The most units that a lease can have.
    pub fn limit(&self) -> usize {
        self.state().limit
    }

    /// Sets the most bytes that the pool may take, at least one unit.
    pub fn set_limit(&self, bytes: u64) {
        self.state().limit = units_of(bytes);
        self.release();
    }

    /// Bytes of host memory that the pool has.
    pub fn size(&self) -> usize {
        self.state().made * self.units.len
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
        for unit in &state.free {
            *idle.entry(unit.segment.base()).or_default() += 1;
        }
        let whole =
            |unit: &Unit| idle.get(&unit.segment.base()) == Some(&Arc::strong_count(&unit.segment));
        let (unused, kept): (Vec<Unit>, Vec<Unit>) =
            std::mem::take(&mut state.free).into_iter().partition(whole);
        state.free = kept;
        state.made -= unused.len();
        state.pageable = state.pageable && state.made > 0;
        drop(state);
        unused.len() * self.units.len
    }

    /// Takes a place in the queue.
    pub fn enter(&self) -> Ticket<'_> {
        let mut state = self.state();
        state.last_ticket += 1;
        let number = state.last_ticket;
        state.waiting.push_back((number, thread::current()));
        Ticket { pool: self, number }
    }

    /// Units that are there at once, if nobody waits for them.
    pub fn try_lease(&self, units: usize) -> Option<Lease<'_>> {
        let mut state = self.state();
        if !state.waiting.is_empty() || state.reap().is_err() {
            return None;
        }
        let units = state.take(units)?;
        Some(Lease::new(&self.units, units))
    }

    /// Makes more units; false if there may be no more. Who needs more than the limit at once gets
    /// them all the same: the limit may have been lowered since its parts were planned.
    fn grow(&self, units: usize, device: &Arc<dyn Device>) -> Result<bool> {
        let count = {
            let mut state = self.state();
            let count = state.limit.max(units).saturating_sub(state.made).min(SEGMENT_UNITS);
            state.made += count;
            count
        };
        if count == 0 {
            return Ok(false);
        }
        let made = self.units.segment(count, device);
        let mut state = self.state();
        match made {
            Ok(units) => {
                state.pageable |= units.iter().any(|unit| !unit.segment.is_pinned());
                state.free.extend(units);
                Ok(true)
            }
            Err(error) => {
                state.made -= count;
                // Who has less than was allowed goes on with that.
                if state.made >= units { Ok(false) } else { Err(error) }
            }
        }
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

fn units_of(bytes: u64) -> usize {
    usize::try_from(bytes / UNIT_LEN as u64).unwrap_or(usize::MAX).max(MIN_UNITS)
}

impl<'p> Ticket<'p> {
    /// Waits for units.
    ///
    /// Whoever waits must not hold a lease that somebody who waits before needs to be given back.
    pub fn lease(
        self,
        units: usize,
        device: &Arc<dyn Device>,
        cancel: &dyn Cancel,
    ) -> Result<Lease<'p>> {
        self.lease_or(units, device, &|| Ok(false), cancel)
    }

    /// The same; as long as it waits it calls `idle`, which says whether it found something to do.
    pub fn lease_or(
        self,
        units: usize,
        device: &Arc<dyn Device>,
        idle: &dyn Fn() -> Result<bool>,
        cancel: &dyn Cancel,
    ) -> Result<Lease<'p>> {
        let pool = self.pool;
        loop {
            let wait = {
                let mut state = pool.state();
                if state.waiting.front().map(|(number, _)| *number) == Some(self.number) {
                    state.reap()?;
                    if let Some(units) = state.take(units) {
                        return Ok(Lease::new(&pool.units, units));
                    }
                    let under_way: usize = state.in_flight.iter().map(|f| f.units.len()).sum();
                    let quiet = under_way == 0;
                    drop(state);
                    if under_way < PLENTY && pool.grow(units, device)? {
                        continue;
                    }
                    if quiet { IDLE } else { POLL }
                } else {
                    IDLE
                }
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
        state.waiting.retain(|(number, _)| *number != self.number);
        state.wake_first();
    }
}

#[cfg(test)]
#[allow(clippy::unwrap_used, clippy::indexing_slicing)]
mod tests;
