//! The memory of a pool: buffers, the slabs that they are parts of, and who has them. One of the
//! few doors to `unsafe`.
#![allow(unsafe_code)]

use std::collections::VecDeque;
use std::ptr::NonNull;
use std::sync::{Arc, PoisonError};

use super::returns::Returns;
use super::share::{Held, Share};
use crate::error::Result;
use crate::mem::arena::Arena;
use crate::mem::device::{Device, Event};
use crate::mem::numa;
use crate::sys::process::Inherited;
use crate::sys::sync::thread::Thread;
use crate::sys::sync::{Mutex, MutexGuard};

/// Buffers of one length.
pub struct Inner {
    /// Bytes of each.
    pub len: usize,
    state: Mutex<State>,
}

impl Inner {
    /// None yet, and at most so many.
    pub fn new(len: usize, limit: usize) -> Self {
        let state = State {
            limit: limit.max(1),
            made: 0,
            coming: 0,
            free: Vec::new(),
            in_flight: VecDeque::new(),
            waiting: VecDeque::new(),
            last_ticket: 0,
            pageable: false,
            returns: Returns::default(),
        };
        Inner { len, state: Mutex::new(state) }
    }

    /// Who has which.
    pub fn state(&self) -> MutexGuard<'_, State> {
        self.state.lock().unwrap_or_else(PoisonError::into_inner)
    }

    /// Memory for so many more, which nobody else knows.
    pub fn slab(&self, count: usize, device: &Arc<dyn Device>) -> Result<Vec<Buffer>> {
        let slab = Arc::new(Slab::new(count * self.len, device)?);
        let buffers = (0..count).map(|number| Buffer {
            // SAFETY: the slab has `count` times the length of a buffer.
            start: unsafe { slab.start.add(number * self.len) },
            slab: Arc::clone(&slab),
        });
        Ok(buffers.collect())
    }
}

/// Who has which buffers of a pool.
pub struct State {
    /// The most buffers that there may be.
    pub limit: usize,
    /// Buffers that there are, whoever has them.
    pub made: usize,
    /// Those of them that are being allocated and pinned.
    pub coming: usize,
    /// Buffers that nobody uses; the last one used is the first to be used again.
    pub free: Vec<Buffer>,
    /// Buffers that come back when their copies have ended.
    pub in_flight: VecDeque<Flight>,
    /// Who waits for buffers, in turn.
    pub waiting: VecDeque<Waiter>,
    /// The number of the last one who waited.
    pub last_ticket: u64,
    /// True if some buffers could not be pinned.
    pub pageable: bool,
    /// The times at which buffers have come back.
    pub returns: Returns,
}

/// Who waits for buffers.
pub struct Waiter {
    /// Its ticket.
    pub number: u64,
    /// Whom to wake.
    pub thread: Thread,
    /// What its call may have, if that is bounded.
    pub share: Option<Arc<Share>>,
    /// How many it waits for; one as long as that is not known.
    pub buffers: usize,
}

impl Waiter {
    /// Whether its call has too many to take these now, however many are free.
    fn is_full(&self) -> bool {
        self.share.as_ref().is_some_and(|share| !share.has(self.buffers))
    }

    fn shares(&self, other: Option<&Arc<Share>>) -> bool {
        self.share.as_ref().zip(other).is_some_and(|(one, other)| Arc::ptr_eq(one, other))
    }
}

/// Buffers from or to which copies may be under way.
pub struct Flight {
    /// Passes when they have ended.
    pub event: Arc<dyn Event>,
    /// Whose copies pass one after another.
    pub stream: usize,
    /// The buffers.
    pub buffers: Vec<Buffer>,
    /// What they are of the share of a call, if that is bounded.
    pub _held: Option<Held>,
}

/// A piece of staging memory.
pub struct Buffer {
    /// Its first byte.
    pub start: NonNull<u8>,
    /// What it is a part of.
    pub slab: Arc<Slab>,
}

// SAFETY: a buffer is the only way to its bytes, and they stay as long as the slab does.
unsafe impl Send for Buffer {}
// SAFETY: through a shared buffer its bytes are only read (`Lease::bytes`, `Filled`).
unsafe impl Sync for Buffer {}

/// Memory that is allocated and pinned at once. A process that was forked off has nothing at its
/// addresses, and leaves it alone.
pub struct Slab {
    start: NonNull<u8>,
    pinned: bool,
    _memory: Inherited<Memory>,
}

// SAFETY: the start is only compared, and passed on to buffers of disjoint bytes.
unsafe impl Send for Slab {}
// SAFETY: as above.
unsafe impl Sync for Slab {}

/// The arena outlives the pinning.
struct Memory {
    arena: Arena,
    pinned_by: Option<Arc<dyn Device>>,
}

impl Slab {
    fn new(len: usize, device: &Arc<dyn Device>) -> Result<Self> {
        let mut arena = Arena::mapped(len)?;
        // Pages that a child shared with this process would be copied at the next write to them,
        // and the device would go on with the child's.
        arena.leave_out_of_forks();
        // Before the first of its pages is there.
        numa::place(arena.bytes_mut(), device.node());
        // All bytes are reached by this pointer alone: one that is taken anew ends its right to them.
        let start = NonNull::from(arena.bytes_mut()).cast::<u8>();
        // SAFETY: unpinned before the memory goes (`Memory::drop`).
        let pinned = unsafe { device.pin(start.as_ptr(), len) };
        let pinned_by = pinned.then(|| Arc::clone(device));
        Ok(Slab { start, pinned, _memory: Inherited::new(Memory { arena, pinned_by }) })
    }

    /// The address of the first byte, by which slabs are told apart.
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
            // SAFETY: pinned when it was made, and no buffer is left from which a copy could be
            // under way: those are kept until an event says that it has ended.
            unsafe { device.unpin(self.arena.bytes_mut().as_mut_ptr()) };
        }
    }
}

impl State {
    /// Takes back the buffers whose copies have ended. An error is that of the device, whose buffers are
    /// never used again.
    pub fn reap(&mut self) -> Result<()> {
        let mut waiting: Vec<usize> = Vec::new();
        let free = self.free.len();
        let mut outcome = Ok(());
        for _ in 0..self.in_flight.len() {
            let Some(flight) = self.in_flight.pop_front() else { break };
            // Copies of a stream end in their order. Streams share a bus: if one of them has a copy under
            // way, the others are hardly ahead, and to ask them would be a call of the driver each.
            let has_some = self.free.len() > free && !waiting.is_empty();
            if has_some || waiting.contains(&flight.stream) {
                self.in_flight.push_back(flight);
                continue;
            }
            match flight.event.passed() {
                Ok(true) => self.free.extend(flight.buffers),
                Ok(false) => {
                    waiting.push(flight.stream);
                    self.in_flight.push_back(flight);
                }
                Err(error) => {
                    self.abandon(flight.buffers);
                    outcome = outcome.and(Err(error));
                }
            }
        }
        if self.free.len() > free {
            self.returns.note(self.free.len() - free, !self.in_flight.is_empty());
        }
        outcome
    }

    /// The same, where buffers of this device are the ones under way.
    pub fn reap_on(&mut self, device: &Arc<dyn Device>) -> Result<()> {
        let _entered = if self.in_flight.len() > 1 { Some(device.enter()?) } else { None };
        self.reap()
    }

    /// Nobody knows whether a copy still uses these: their memory is never freed.
    pub fn abandon(&mut self, buffers: Vec<Buffer>) {
        self.made -= buffers.len();
        std::mem::forget(buffers);
    }

    /// So many buffers that nobody uses.
    pub fn take(&mut self, buffers: usize) -> Option<Vec<Buffer>> {
        let from = self.free.len().checked_sub(buffers)?;
        Some(self.free.split_off(from))
    }

    /// How many are served before a ticket of a share, or before who has none: all who came before,
    /// but for those of other calls that may take no more now.
    pub fn ahead(&self, ticket: Option<u64>, share: Option<&Arc<Share>>) -> usize {
        let before = self.waiting.iter().take_while(|waiter| Some(waiter.number) != ticket);
        before.filter(|waiter| waiter.shares(share) || !waiter.is_full()).count()
    }

    /// Buffers for which readers wait, those of calls that may take no more now left out.
    pub fn wanted(&self) -> usize {
        self.waiting
            .iter()
            .filter(|waiter| !waiter.is_full())
            .fold(0, |sum, waiter| sum.saturating_add(waiter.buffers))
    }

    /// Has whoever is served next look again; and who waits longest, as it may not know yet that it may
    /// have more.
    pub fn wake_first(&self) {
        let next = self.waiting.iter().find(|waiter| {
            let share = waiter.share.as_ref();
            !waiter.is_full() && self.ahead(Some(waiter.number), share) == 0
        });
        let first = self.waiting.front();
        first.into_iter().chain(next).for_each(|waiter| waiter.thread.unpark());
    }
}
