//! The window between readers and the caller. It holds tensors that were delivered, and bounds the
//! bytes that are read ahead.

use std::collections::{HashMap, VecDeque};
use std::ops::Range;
use std::time::Duration;

use super::options::Order;
use crate::engine::completion::CopyEvents;
use crate::engine::plan::SMALL;
use crate::error::{Error, Result};
use crate::mem::HostBuffer;
use crate::sys::sync::{Condvar, Mutex, MutexGuard, unpoisoned};

/// The divisor of the read-ahead that limits one batch, so that several are in flight.
const BATCH_FRACTION: u64 = 8;
/// Limits of small tensors that are handed out together: their number, and the divisor of the
/// read-ahead that limits their bytes.
const MAX_TOGETHER: usize = 1024;
const TOGETHER_FRACTION: u64 = 16;
/// The most blocks that are allocated together, and the most bytes of them.
const BLOCKS: usize = 256;
const BLOCKS_LEN: u64 = 64 << 20;

/// The memory of a tensor.
pub enum ReadyMemory {
    /// In host memory of its own.
    Host(HostBuffer),
    /// In a block of a device that was allocated for it. The block has the number of the tensor.
    Block(usize),
    /// No memory: it has no data in the file, and is all zeros.
    Zeros,
}

/// A tensor that waits for the caller, by its position in the order of the file.
pub struct WaitingTensor {
    /// Its position.
    pub tensor: usize,
    /// Its bytes.
    pub memory: ReadyMemory,
    /// Events after which the bytes have arrived.
    pub copy_events: CopyEvents,
}

/// The tensors between those that are still to be read and those that were handed out. Tensors
/// that are admitted and not handed out have at most `budget` bytes, or are a single larger one.
pub struct Window {
    /// Bytes of each tensor in memory.
    lens: Vec<u64>,
    order: Order,
    /// True if the caller allocates memory before tensors may be read.
    allocates: bool,
    state: Mutex<WindowState>,
    /// Notified when more tensors may be read.
    room: Condvar,
    /// Notified when more tensors are ready for the caller.
    available: Condvar,
}

#[derive(Default)]
struct WindowState {
    budget: u64,
    /// The number of tensors, from the first one on, that were granted memory.
    granted: usize,
    /// The tensors that readers wait for: those of their next batch, which arrive together.
    pending: Range<usize>,
    /// Bytes of tensors that are granted and not handed out.
    outstanding: u64,
    /// All tensors before this one were handed out.
    all_handed_out_before: usize,
    /// Tensors that were read and wait for the caller, by position.
    waiting: HashMap<usize, WaitingTensor>,
    /// Their positions, in the order in which they were delivered.
    queue: VecDeque<usize>,
    /// True for each tensor that was delivered, also after it was handed out.
    delivered: Vec<bool>,
    /// Bytes of several tensors that the caller got together. They count as outstanding until the
    /// next call.
    handed_out_bytes: u64,
    ended: Option<Result<()>>,
    closed: bool,
}

impl WindowState {
    /// True if a batch waits for memory, and all tensors before it were handed out. Its tensors
    /// arrive only together, so they must be granted beyond the budget.
    fn is_starved(&self) -> bool {
        self.granted < self.pending.end && self.all_handed_out_before >= self.pending.start
    }

    fn is_handed_out(&self, tensor: usize) -> bool {
        self.delivered.get(tensor) == Some(&true) && !self.waiting.contains_key(&tensor)
    }
}

impl Window {
    /// Makes a window for tensors of these lengths.
    pub fn new(lens: Vec<u64>, budget: u64, order: Order, allocates: bool) -> Self {
        let delivered = vec![false; lens.len()];
        let state = WindowState { budget: budget.max(1), delivered, ..WindowState::default() };
        let (room, available) = (Condvar::new(), Condvar::new());
        Window { lens, order, allocates, state: Mutex::new(state), room, available }
    }

    fn state(&self) -> MutexGuard<'_, WindowState> {
        unpoisoned(self.state.lock())
    }

    fn len(&self, tensor: usize) -> u64 {
        self.lens.get(tensor).copied().unwrap_or(0)
    }

    /// Returns the most bytes of a batch.
    pub fn max_batch_len(&self) -> u64 {
        (self.state().budget / BATCH_FRACTION).max(1)
    }

    /// True if memory for the next tensor may be granted.
    fn has_room(&self, state: &WindowState) -> bool {
        let Some(len) = self.lens.get(state.granted) else { return false };
        let fits = state.outstanding.saturating_add(*len) <= state.budget;
        // A tensor that is larger than the budget comes alone.
        fits || state.outstanding == 0 || state.is_starved()
    }

    fn grant(&self, state: &mut WindowState) {
        // A tensor of which nothing is read may be handed out before it is granted, and does not
        // count then.
        if !state.is_handed_out(state.granted) {
            state.outstanding = state.outstanding.saturating_add(self.len(state.granted));
        }
        state.granted += 1;
    }

    /// True if these tensors, of which parts are in one batch, may be read now.
    pub fn admits(&self, first: usize, last: usize) -> bool {
        let mut state = self.state();
        let pending = first..last + 1;
        if std::mem::replace(&mut state.pending, pending.clone()) != pending && self.allocates {
            self.available.notify_all();
        }
        while !self.allocates && state.granted <= last && self.has_room(&state) {
            self.grant(&mut state);
        }
        state.granted > last
    }

    /// Waits until more tensors may be admitted, or the time is over.
    pub fn wait_for_room(&self, time: Duration) {
        let state = self.state();
        let ready =
            state.granted >= state.pending.end || (!self.allocates && self.has_room(&state));
        if !ready && !state.closed {
            drop(unpoisoned(self.room.wait_timeout(state, time)));
        }
    }

    /// Hands tensors to the caller, which finds all of them when it wakes.
    pub fn deliver_all(&self, items: Vec<WaitingTensor>) -> Result<()> {
        let mut state = self.state();
        if state.closed {
            // The iterator was closed: these tensors are dropped.
            return Ok(());
        }
        let mut wanted = self.order == Order::Ready;
        for item in items {
            let tensor = item.tensor;
            let delivered = state.delivered.get_mut(tensor);
            if delivered.is_none_or(|delivered| std::mem::replace(delivered, true)) {
                return Err(Error::Bug(format!("tensor {tensor} has landed twice")));
            }
            state.waiting.insert(tensor, item);
            state.queue.push_back(tensor);
            wanted |= state.all_handed_out_before == tensor;
        }
        drop(state);
        if wanted {
            self.available.notify_all();
        }
        Ok(())
    }

    /// Returns for each tensor whether it was delivered.
    pub fn delivered(&self) -> Vec<bool> {
        self.state().delivered.clone()
    }

    fn release(&self, state: &mut WindowState, bytes: u64) {
        state.outstanding = state.outstanding.saturating_sub(bytes);
        self.room.notify_all();
        if self.allocates {
            self.available.notify_all();
        }
    }

    /// Notes that everything has been read, or the error that ended the load.
    pub fn end(&self, outcome: Result<()>) {
        self.state().ended = Some(outcome);
        self.available.notify_all();
        self.room.notify_all();
    }

    /// Closes the window: drops tensors that wait for the caller, and makes readers stop.
    pub fn close(&self) {
        let mut state = self.state();
        state.closed = true;
        let waiting = std::mem::take(&mut state.waiting);
        drop(state);
        drop(waiting);
        self.available.notify_all();
        self.room.notify_all();
    }

    /// True once it was closed.
    pub fn is_closed(&self) -> bool {
        self.state().closed
    }

    /// Notes that memory for tensors was allocated.
    pub fn allocated(&self, count: usize) {
        let mut state = self.state();
        (0..count).for_each(|_| self.grant(&mut state));
        drop(state);
        self.room.notify_all();
    }

    /// Notes that memory for `count` tensors could not be allocated, and limits the read-ahead to
    /// its present size. Returns false if the load must fail because no memory will be freed for
    /// even one tensor.
    pub fn allocation_failed(&self, count: usize) -> bool {
        let mut state = self.state();
        state.budget = state.outstanding.max(1);
        count > 1 || (state.outstanding > 0 && !state.is_starved())
    }

    /// Returns the tensors whose memory may be allocated now.
    pub fn to_allocate(&self) -> Option<Range<usize>> {
        let state = self.state();
        let start = state.granted;
        if !self.allocates || !self.has_room(&state) {
            return None;
        }
        let (mut end, mut bytes) = (start + 1, self.len(start));
        while let Some(len) = self.lens.get(end) {
            bytes = bytes.saturating_add(*len);
            let ahead = state.outstanding.saturating_add(bytes);
            if ahead > state.budget || bytes > BLOCKS_LEN || end - start >= BLOCKS {
                break;
            }
            end += 1;
        }
        Some(start..end)
    }

    /// Takes the next tensor, and small ones after it that were delivered too. Tensors that an
    /// earlier call took no longer count against the budget. Takes no tensors if none came within
    /// the time, or if memory may be allocated now; None if all were handed out.
    pub fn take(&self, time: Duration) -> Result<Option<Vec<WaitingTensor>>> {
        let mut state = self.state();
        let handed_out_bytes = std::mem::take(&mut state.handed_out_bytes);
        if handed_out_bytes > 0 {
            self.release(&mut state, handed_out_bytes);
        }
        if state.closed {
            return Err(Error::Closed("the iterator is closed".to_owned()));
        }
        let items = self.take_delivered(&mut state);
        if !items.is_empty() {
            return Ok(Some(items));
        }
        if state.all_handed_out_before == self.lens.len() {
            return Ok(None);
        }
        match state.ended.take() {
            Some(Err(error)) => {
                state.closed = true;
                return Err(error);
            }
            Some(Ok(())) => return Err(Error::Bug("a tensor that was not read".to_owned())),
            None => {}
        }
        if !(self.allocates && self.has_room(&state)) {
            drop(unpoisoned(self.available.wait_timeout(state, time)));
        }
        Ok(Some(items))
    }

    fn take_delivered(&self, state: &mut WindowState) -> Vec<WaitingTensor> {
        let most = state.budget / TOGETHER_FRACTION;
        let (mut items, mut bytes) = (Vec::new(), 0u64);
        while items.len() < MAX_TOGETHER {
            let next = match self.order {
                Order::File => Some(state.all_handed_out_before),
                Order::Ready => state.queue.front().copied(),
            };
            let Some(tensor) = next.filter(|tensor| state.waiting.contains_key(tensor)) else {
                break;
            };
            let len = self.len(tensor);
            let fits = len < SMALL && bytes.saturating_add(len) <= most;
            if !items.is_empty() && !fits {
                break;
            }
            let Some(item) = state.waiting.remove(&tensor) else { break };
            if self.order == Order::Ready {
                state.queue.pop_front();
            }
            while state.is_handed_out(state.all_handed_out_before) {
                state.all_handed_out_before += 1;
            }
            // A tensor that is handed out before it is granted is never counted.
            if tensor < state.granted {
                bytes = bytes.saturating_add(len);
            }
            items.push(item);
            if len >= SMALL {
                break;
            }
        }
        if items.len() > 1 {
            state.handed_out_bytes = bytes;
        } else if bytes > 0 {
            self.release(state, bytes);
        }
        items
    }
}

#[cfg(test)]
mod tests;
