//! The memory of a pool: units, the segments that they are parts of, and who has them. One of the
//! few doors to `unsafe`.
#![allow(unsafe_code)]

use std::collections::VecDeque;
use std::ptr::NonNull;
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};
use std::thread::Thread;
use std::time::Duration;

use crate::error::Result;
use crate::mem::arena::Arena;
use crate::mem::device::{Device, Event};
use crate::sys::process::Inherited;

/// How often events are looked at by who waits for copies.
pub const POLL: Duration = Duration::from_micros(20);

/// Units of one length.
pub struct Units {
    /// Bytes of each.
    pub len: usize,
    state: Mutex<State>,
}

impl Units {
    /// None yet, and at most so many.
    pub fn new(len: usize, limit: usize) -> Self {
        let state = State {
            limit: limit.max(1),
            made: 0,
            free: Vec::new(),
            in_flight: VecDeque::new(),
            waiting: VecDeque::new(),
            last_ticket: 0,
            pageable: false,
        };
        Units { len, state: Mutex::new(state) }
    }

    /// Who has which.
    pub fn state(&self) -> MutexGuard<'_, State> {
        self.state.lock().unwrap_or_else(PoisonError::into_inner)
    }

    /// Memory for so many more, which nobody else knows.
    pub fn segment(&self, count: usize, device: &Arc<dyn Device>) -> Result<Vec<Unit>> {
        let segment = Arc::new(Segment::new(count * self.len, device)?);
        let units = (0..count).map(|number| Unit {
            // SAFETY: the segment has `count` times the length of a unit.
            start: unsafe { segment.start.add(number * self.len) },
            segment: Arc::clone(&segment),
        });
        Ok(units.collect())
    }
}

/// Who has which units of a pool.
pub struct State {
    /// The most units that there may be.
    pub limit: usize,
    /// Units that there are, whoever has them.
    pub made: usize,
    /// Units that nobody uses; the last one used is the first to be used again.
    pub free: Vec<Unit>,
    /// Units that come back when their copies have ended.
    pub in_flight: VecDeque<Flight>,
    /// Who waits for units, in turn.
    pub waiting: VecDeque<(u64, Thread)>,
    /// The number of the last one who waited.
    pub last_ticket: u64,
    /// Whether some units could not be pinned.
    pub pageable: bool,
}

/// Units from or to which copies may be under way.
pub struct Flight {
    /// Passes when they have ended.
    pub event: Box<dyn Event>,
    /// Whose copies pass one after another.
    pub stream: usize,
    /// The units.
    pub units: Vec<Unit>,
}

/// A piece of staging memory.
pub struct Unit {
    /// Its first byte.
    pub start: NonNull<u8>,
    /// What it is a part of.
    pub segment: Arc<Segment>,
}

// SAFETY: a unit is the only way to its bytes, and they stay as long as the segment does.
unsafe impl Send for Unit {}
// SAFETY: through a shared unit its bytes are only read (`Lease::bytes`, `Filled`).
unsafe impl Sync for Unit {}

/// Memory that is allocated and pinned at once. A process that was forked off has nothing at its
/// addresses, and leaves it alone.
pub struct Segment {
    start: NonNull<u8>,
    pinned: bool,
    _memory: Inherited<Memory>,
}

// SAFETY: the start is only compared, and passed on to units of disjoint bytes.
unsafe impl Send for Segment {}
// SAFETY: as above.
unsafe impl Sync for Segment {}

/// The arena outlives the pinning.
struct Memory {
    arena: Arena,
    pinned_by: Option<Arc<dyn Device>>,
}

impl Segment {
    fn new(len: usize, device: &Arc<dyn Device>) -> Result<Self> {
        let mut arena = Arena::new(len)?;
        // Pages that a child shared with this process would be copied at the next write to them,
        // and the device would go on with the child's.
        arena.leave_out_of_forks();
        let memory = arena.bytes_mut();
        let start = NonNull::from(&mut *memory).cast::<u8>();
        // SAFETY: unpinned before the memory goes (`Memory::drop`).
        let pinned = unsafe { device.pin(memory.as_mut_ptr(), memory.len()) };
        let pinned_by = pinned.then(|| Arc::clone(device));
        Ok(Segment { start, pinned, _memory: Inherited::new(Memory { arena, pinned_by }) })
    }

    /// The address of the first byte, by which segments are told apart.
    pub fn base(&self) -> usize {
        self.start.as_ptr().addr()
    }

    /// Whether the device copies at full speed.
    pub fn is_pinned(&self) -> bool {
        self.pinned
    }
}

impl Drop for Memory {
    fn drop(&mut self) {
        if let Some(device) = &self.pinned_by {
            // SAFETY: pinned when it was made, and no unit is left from which a copy could be
            // under way: those are kept until an event says that it has ended.
            unsafe { device.unpin(self.arena.bytes_mut().as_mut_ptr()) };
        }
    }
}

impl State {
    /// Takes back the units whose copies have ended. An error is that of the device, whose units are
    /// never used again.
    pub fn reap(&mut self) -> Result<()> {
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
    pub fn abandon(&mut self, units: Vec<Unit>) {
        self.made -= units.len();
        std::mem::forget(units);
    }

    /// So many units that nobody uses.
    pub fn take(&mut self, units: usize) -> Option<Vec<Unit>> {
        let from = self.free.len().checked_sub(units)?;
        Some(self.free.split_off(from))
    }

    /// Has whoever waits longest look again.
    pub fn wake_first(&self) {
        if let Some((_, thread)) = self.waiting.front() {
            thread.unpark();
        }
    }
}
