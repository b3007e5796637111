//! Host memory through which bytes go to and from a device. One of the few doors to `unsafe`.
//!
//! One pool serves each device. Its units are leased, filled, copied from while the host
//! goes on, and come back by themselves when the event after the copies has passed: nobody waits
//! for a copy unless the pool is used up. Memory is taken in segments as it is needed, up to a
//! limit, pinned for the device, and kept for the next load.
#![allow(unsafe_code)]

mod lease;

use std::collections::{HashMap, VecDeque};
use std::ptr::NonNull;
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};
use std::thread::{self, Thread};
use std::time::Duration;

pub use lease::Lease;

use super::arena::Arena;
use crate::cancel::Cancel;
use crate::environment::PINNED_MB;
use crate::error::Result;
use crate::mem::device::{Device, Event};

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
/// How often events are looked at while the pool is used up.
const POLL: Duration = Duration::from_micros(20);
/// How often a reader that waits for others looks whether its call was given up.
const IDLE: Duration = Duration::from_millis(20);

/// Units of host memory, shared by all loads to and saves from one device: who waits for another
/// device's copies could wait for ever, for these may wait for what comes after the load.
pub struct Pool {
    unit_len: usize,
    state: Mutex<State>,
}

struct State {
    /// The most units that there may be.
    limit: usize,
    /// Units that there are, whoever has them.
    made: usize,
    /// Units that nobody uses; the last one used is the first to be used again.
    free: Vec<Unit>,
    in_flight: VecDeque<Flight>,
    waiting: VecDeque<(u64, Thread)>,
    last_ticket: u64,
    pageable: bool,
}

/// Units from or to which copies may be under way.
struct Flight {
    event: Box<dyn Event>,
    /// Whose copies pass one after another.
    stream: usize,
    units: Vec<Unit>,
}

struct Unit {
    start: NonNull<u8>,
    segment: Arc<Segment>,
}

// SAFETY: a unit is the only way to its bytes, and they stay as long as the segment does.
unsafe impl Send for Unit {}

struct Segment {
    arena: Mutex<Arena>,
    base: usize,
    pinned_by: Option<Arc<dyn Device>>,
}

impl Drop for Segment {
    fn drop(&mut self) {
        if let Some(device) = &self.pinned_by {
            let arena = self.arena.get_mut().unwrap_or_else(PoisonError::into_inner);
            // SAFETY: pinned when it was made, and no unit is left from which a copy could be
            // under way: those are kept until an event says that it has ended.
            unsafe { device.unpin(arena.bytes_mut().as_mut_ptr()) };
        }
    }
}

/// A place in the queue for units: who came first is served first.
pub struct Ticket<'p> {
    pool: &'p Pool,
    number: u64,
}

impl Pool {
    /// A pool of at most so many units.
    pub fn new(unit_len: usize, limit: usize) -> Self {
        let state = State {
            limit: limit.max(1),
            made: 0,
            free: Vec::new(),
            in_flight: VecDeque::new(),
            waiting: VecDeque::new(),
            last_ticket: 0,
            pageable: false,
        };
        Pool { unit_len, state: Mutex::new(state) }
    }

    /// The pool of a device, which lives as long as the process.
    pub fn of(device: &Arc<dyn Device>) -> Result<&'static Pool> {
        let limit = limit()?;
        let mut pools = POOLS.lock().unwrap_or_else(PoisonError::into_inner);
        if let Some((_, pool)) = pools.iter().find(|(name, _)| name == device.name()) {
            return Ok(pool);
        }
        let pool: &Pool = Box::leak(Box::new(Pool::new(UNIT_LEN, units_of(limit))));
        pools.push((device.name().to_owned(), pool));
        Ok(pool)
    }

    /// The pools of all devices that were used.
    pub fn all() -> Vec<&'static Pool> {
        let pools = POOLS.lock().unwrap_or_else(PoisonError::into_inner);
        pools.iter().map(|(_, pool)| *pool).collect()
    }

    /// Sets the most bytes that the pool of each device may take.
    pub fn limit_all(bytes: u64) {
        *LIMIT.lock().unwrap_or_else(PoisonError::into_inner) = Some(bytes);
        for pool in Pool::all() {
            pool.set_limit(bytes);
        }
    }

    fn state(&self) -> MutexGuard<'_, State> {
        self.state.lock().unwrap_or_else(PoisonError::into_inner)
    }

    /// Bytes of a unit.
    pub fn unit_len(&self) -> usize {
        self.unit_len
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
        self.state().made * self.unit_len
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
            *idle.entry(unit.segment.base).or_default() += 1;
        }
        let whole =
            |unit: &Unit| idle.get(&unit.segment.base) == Some(&Arc::strong_count(&unit.segment));
        let (unused, kept): (Vec<Unit>, Vec<Unit>) =
            std::mem::take(&mut state.free).into_iter().partition(whole);
        state.free = kept;
        state.made -= unused.len();
        state.pageable = state.pageable && state.made > 0;
        drop(state);
        unused.len() * self.unit_len
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
        Some(Lease::new(self, units))
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
        let made = self.segment(count, device);
        let mut state = self.state();
        match made {
            Ok(units) => {
                state.pageable |= units.iter().any(|unit| unit.segment.pinned_by.is_none());
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

    fn segment(&self, count: usize, device: &Arc<dyn Device>) -> Result<Vec<Unit>> {
        let len = count * self.unit_len;
        let mut arena = Arena::new(len)?;
        let memory = arena.bytes_mut();
        let start = NonNull::from(&mut *memory).cast::<u8>();
        // SAFETY: the segment unpins the memory before it lets it go.
        let pinned = unsafe { device.pin(memory.as_mut_ptr(), memory.len()) };
        let segment = Arc::new(Segment {
            arena: Mutex::new(arena),
            base: start.as_ptr().addr(),
            pinned_by: pinned.then(|| Arc::clone(device)),
        });
        let units = (0..count).map(|number| Unit {
            // SAFETY: the arena has `count` times the length of a unit.
            start: unsafe { start.add(number * self.unit_len) },
            segment: Arc::clone(&segment),
        });
        Ok(units.collect())
    }
}

static POOLS: Mutex<Vec<(String, &'static Pool)>> = Mutex::new(Vec::new());
static LIMIT: Mutex<Option<u64>> = Mutex::new(None);

/// The most bytes of each pool.
fn limit() -> Result<u64> {
    let set = *LIMIT.lock().unwrap_or_else(PoisonError::into_inner);
    set.map_or_else(|| Ok(PINNED_MB.value()?.saturating_mul(1 << 20)), Ok)
}

fn units_of(bytes: u64) -> usize {
    usize::try_from(bytes / UNIT_LEN as u64).unwrap_or(usize::MAX).max(MIN_UNITS)
}

impl State {
    /// Takes back the units whose copies have ended. An error is that of the device, whose units are
    /// never used again.
    fn reap(&mut self) -> Result<()> {
        let mut waiting: Vec<usize> = Vec::new();
        let mut outcome = Ok(());
        for _ in 0..self.in_flight.len() {
            let Some(flight) = self.in_flight.pop_front() else { break };
            // What was begun later on a stream ends later.
            if waiting.contains(&flight.stream) {
                self.in_flight.push_back(flight);
                continue;
            }
            match flight.event.passed() {
                Ok(true) => self.free.extend(flight.units),
                Ok(false) => {
                    waiting.push(flight.stream);
                    self.in_flight.push_back(flight);
                }
                Err(error) => {
                    self.abandon(flight.units);
                    outcome = outcome.and(Err(error));
                }
            }
        }
        outcome
    }

    /// Nobody knows whether a copy still uses these: their memory is never freed.
    fn abandon(&mut self, units: Vec<Unit>) {
        self.made -= units.len();
        std::mem::forget(units);
    }

    fn take(&mut self, units: usize) -> Option<Vec<Unit>> {
        let from = self.free.len().checked_sub(units)?;
        Some(self.free.split_off(from))
    }

    fn wake_first(&self) {
        if let Some((_, thread)) = self.waiting.front() {
            thread.unpark();
        }
    }
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
                        return Ok(Lease::new(pool, units));
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
