//! The memory of a pool: its buffers, the slabs that they are parts of, and the queue for them.
//! `unsafe` is allowed in this file: devices copy to and from this memory.
#![allow(unsafe_code)]

use std::collections::VecDeque;
use std::ptr::NonNull;
use std::sync::Arc;

use super::return_poll::ReturnPoll;
use super::share::{Share, ShareReservation};
use crate::error::Result;
use crate::mem::device::{Device, Event};
use crate::mem::mapping::Mapping;
use crate::sys::numa::prefer_node;
use crate::sys::process::DropInOwner;
use crate::sys::sync::thread::Thread;
use crate::sys::sync::{Mutex, MutexGuard, unpoisoned};

/// The buffers of a pool, all of one length.
pub struct PoolBuffers {
    /// Bytes of each buffer.
    pub len: usize,
    state: Mutex<PoolState>,
}

impl PoolBuffers {
    /// Creates an empty pool of at most `limit` buffers.
    pub fn new(len: usize, limit: usize) -> Self {
        let state = PoolState { limit: limit.max(1), ..PoolState::default() };
        PoolBuffers { len, state: Mutex::new(state) }
    }

    /// Locks and returns the state of the buffers.
    pub fn state(&self) -> MutexGuard<'_, PoolState> {
        unpoisoned(self.state.lock())
    }

    /// Allocates `count` more buffers, which are not in the state yet.
    pub fn slab(&self, count: usize, device: &Arc<dyn Device>) -> Result<Vec<StagingBuffer>> {
        let slab = Arc::new(Slab::new(count * self.len, device)?);
        let buffers = (0..count).map(|number| StagingBuffer {
            // SAFETY: the slab has `count` times the length of a buffer.
            start: unsafe { slab.start.add(number * self.len) },
            slab: Arc::clone(&slab),
        });
        Ok(buffers.collect())
    }
}

/// The state of a pool's buffers.
#[derive(Default)]
pub struct PoolState {
    /// Maximum number of buffers.
    pub limit: usize,
    /// Number of buffers that exist, in use or not.
    pub allocated: usize,
    /// Number of these that are still being allocated and pinned.
    pub being_allocated: usize,
    /// Unused buffers; the last one used is the first to be reused.
    pub free: Vec<StagingBuffer>,
    /// Buffers that return when their copies have ended.
    pub in_flight: VecDeque<InFlightBuffers>,
    /// Threads that wait for buffers, in the order of their tickets.
    pub waiting: VecDeque<PoolWaiter>,
    /// The number of the last ticket.
    pub last_ticket: u64,
    /// True if some buffers could not be pinned.
    pub pageable: bool,
    /// Tells when to look for buffers whose copies have ended.
    pub return_poll: ReturnPoll,
}

/// A thread that waits for buffers.
pub struct PoolWaiter {
    /// The number of its ticket.
    pub number: u64,
    /// The thread to wake.
    pub thread: Thread,
    /// The limit of its call; None if it has none.
    pub share: Option<Arc<Share>>,
    /// Number of buffers that it waits for; 1 until that is known.
    pub buffers: usize,
}

impl PoolWaiter {
    /// True if the share of its call does not allow these buffers now, however many are free.
    fn is_full(&self) -> bool {
        self.share.as_ref().is_some_and(|share| !share.allows(self.buffers))
    }

    fn shares(&self, other: Option<&Arc<Share>>) -> bool {
        self.share.as_ref().zip(other).is_some_and(|(one, other)| Arc::ptr_eq(one, other))
    }
}

/// Buffers from or to which copies may be under way.
pub struct InFlightBuffers {
    /// Passes when the copies have ended.
    pub event: Arc<dyn Event>,
    /// The stream of the copies; copies of one stream end in order.
    pub stream: usize,
    /// The buffers.
    pub buffers: Vec<StagingBuffer>,
    /// Their part of the share of a call; None if it has no limit.
    pub _reservation: Option<ShareReservation>,
}

/// A piece of staging memory.
pub struct StagingBuffer {
    /// Its first byte.
    pub start: NonNull<u8>,
    /// The slab that it is a part of.
    pub slab: Arc<Slab>,
}

// SAFETY: a buffer is the only way to its bytes, and they stay as long as the slab does.
unsafe impl Send for StagingBuffer {}
// SAFETY: through a shared buffer its bytes are only read (`StagingLease::bytes`,
// `DownloadedBytes`).
unsafe impl Sync for StagingBuffer {}

/// Memory that is allocated and pinned at once. Its addresses are unmapped in a forked process,
/// which neither uses nor frees it.
pub struct Slab {
    start: NonNull<u8>,
    memory: DropInOwner<PinnedMemory>,
}

// SAFETY: the start is only compared, and passed on to buffers of disjoint bytes.
unsafe impl Send for Slab {}
// SAFETY: as above.
unsafe impl Sync for Slab {}

/// Memory and its pinning, which ends before the memory is freed.
struct PinnedMemory {
    mapping: Mapping,
    pinned_by: Option<Arc<dyn Device>>,
}

impl Slab {
    fn new(len: usize, device: &Arc<dyn Device>) -> Result<Self> {
        let mut mapping = Mapping::new(len)?;
        // If a child process shared these pages, the next write to one would copy it
        // (copy-on-write). The device would go on with the old page, which is then the child's.
        mapping.leave_out_of_forks();
        // Before the first touch, which decides the node of a page. If that is not possible, the
        // memory comes from any node.
        let _ = device.numa_node().map(|node| prefer_node(mapping.bytes_mut(), node));
        // All accesses to the bytes go through this pointer: another one taken from the mapping would
        // invalidate it (aliasing).
        let start = NonNull::from(mapping.bytes_mut()).cast::<u8>();
        // SAFETY: unpinned before the memory is freed (`PinnedMemory::drop`).
        let pinned_by = unsafe { device.pin(start.as_ptr(), len) }.then(|| Arc::clone(device));
        Ok(Slab { start, memory: DropInOwner::new(PinnedMemory { mapping, pinned_by }) })
    }

    /// The address of the first byte, by which slabs are told apart.
    pub fn base(&self) -> usize {
        self.start.as_ptr().addr()
    }

    /// True if the memory is pinned, so that the device copies at full speed.
    pub fn is_pinned(&self) -> bool {
        self.memory.pinned_by.is_some()
    }
}

impl Drop for PinnedMemory {
    fn drop(&mut self) {
        if let Some(device) = &self.pinned_by {
            // SAFETY: pinned when it was made, and no buffer is left from which a copy could be
            // under way: buffers are kept until an event shows that the copy has ended.
            unsafe { device.unpin(self.mapping.bytes_mut().as_mut_ptr()) };
        }
    }
}

impl PoolState {
    /// Takes back the buffers whose copies have ended. An error is the device's; buffers of its
    /// failed copies are never reused.
    pub fn reap(&mut self) -> Result<()> {
        let mut waiting: Vec<usize> = Vec::new();
        let free = self.free.len();
        let mut outcome = Ok(());
        for _ in 0..self.in_flight.len() {
            let Some(flight) = self.in_flight.pop_front() else { break };
            // Copies of a stream end in order. Streams share a bus: if one of them has a copy in
            // flight, the others have hardly progressed further. Each query would cost a driver
            // call.
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
                    self.leak(flight.buffers);
                    outcome = outcome.and(Err(error));
                }
            }
        }
        let in_flight = self.in_flight.iter().map(|flight| flight.buffers.len()).sum();
        self.return_poll.record(self.free.len() - free, in_flight);
        outcome
    }

    /// Takes buffers back like [`PoolState::reap`], if the copies in flight are of this device.
    /// Enters the device first if there are several queries.
    pub fn reap_on(&mut self, device: &Arc<dyn Device>) -> Result<()> {
        let _entered = if self.in_flight.len() > 1 { Some(device.enter()?) } else { None };
        self.reap()
    }

    /// Gives up buffers that a copy may still use: their memory is never freed.
    pub fn leak(&mut self, buffers: Vec<StagingBuffer>) {
        self.allocated -= buffers.len();
        std::mem::forget(buffers);
    }

    /// Takes free buffers; None if there are too few.
    pub fn take(&mut self, buffers: usize) -> Option<Vec<StagingBuffer>> {
        let from = self.free.len().checked_sub(buffers)?;
        Some(self.free.split_off(from))
    }

    /// Returns how many waiting tickets are served before `ticket`, or before a request without a
    /// ticket. All earlier tickets count, except those of other calls whose share is used up.
    pub fn ahead(&self, ticket: Option<u64>, share: Option<&Arc<Share>>) -> usize {
        let before = self.waiting.iter().take_while(|waiter| Some(waiter.number) != ticket);
        before.filter(|waiter| waiter.shares(share) || !waiter.is_full()).count()
    }

    /// Returns the number of buffers that threads wait for, except those of calls whose share is
    /// used up.
    pub fn demand(&self) -> usize {
        self.waiting
            .iter()
            .filter(|waiter| !waiter.is_full())
            .fold(0, |sum, waiter| sum.saturating_add(waiter.buffers))
    }

    /// Wakes the thread that is served next. Also wakes the first one in the queue, as it may not
    /// know yet that its share allows more.
    pub fn wake_next(&self) {
        let next = self.waiting.iter().find(|waiter| {
            let share = waiter.share.as_ref();
            !waiter.is_full() && self.ahead(Some(waiter.number), share) == 0
        });
        let first = self.waiting.front();
        first.into_iter().chain(next).for_each(|waiter| waiter.thread.unpark());
    }
}
