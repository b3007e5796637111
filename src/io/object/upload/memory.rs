//! The memory of parts: those that are being written, and those on their way.

use crate::cancel::POLL;
use crate::environment::UPLOAD_MB;
use crate::error::Result;
use crate::fallible::try_zeroed;
use crate::io::transport::TransportOptions;
use crate::sys::sync::{Condvar, Mutex, MutexGuard, unpoisoned};
use crate::sys::to_usize;

/// Connections unless a setting says otherwise: 100 MB/s each fill a network of 12 Gbit/s.
pub const DEFAULT_WRITERS: usize = 16;
/// Parts in memory for each four that are being sent, unless the number of bytes is set. The
/// further one allows for a part that is being filled, and one that waits for the header of its
/// tensor.
const PARTS_PER_FOUR_WRITERS: usize = 5;
/// Parts that an object of few parts may have in memory, however short it is.
const FEW_PARTS: u64 = 4;

/// The limits of memory and connections.
#[derive(Debug, Clone, Copy)]
pub struct UploadBudget {
    /// Maximum number of connections.
    pub writers: usize,
    /// Maximum bytes of parts; None for as much as the connections need.
    pub bytes: Option<u64>,
    /// Maximum number of parts that the memory limit of a save allows.
    pub parts: usize,
    /// Bytes that the object will have, as far as is known.
    pub object: u64,
}

impl UploadBudget {
    /// Creates the limits that the options and the environment set.
    pub fn new(options: &TransportOptions) -> Result<Self> {
        let bytes = Some(UPLOAD_MB.value()?).filter(|&mb| mb > 0);
        Ok(UploadBudget {
            writers: options.connections.unwrap_or(DEFAULT_WRITERS).min(options.max_connections),
            bytes: bytes.map(|mb| mb.saturating_mul(1 << 20)),
            parts: usize::MAX,
            object: 0,
        })
    }

    /// Maximum number of parts of this length in memory, at least one. Together they are shorter
    /// than the object: with the copies beside them, they take no more memory than it is long.
    pub fn parts(&self, part_len: u64) -> usize {
        let enough = self.writers.saturating_mul(PARTS_PER_FOUR_WRITERS).div_ceil(4);
        let parts = match (self.bytes, self.object) {
            (Some(bytes), _) => to_usize(bytes / part_len),
            (None, 0) => enough,
            (None, len) => enough.min(to_usize((len / part_len).saturating_sub(1).max(FEW_PARTS))),
        };
        parts.min(self.parts).max(1)
    }

    /// Connections that send parts of such a length at once.
    pub fn writers(&self, part_len: u64) -> usize {
        self.parts(part_len).clamp(1, self.writers.max(1))
    }

    /// Maximum number of positions at which the file may be written alternately. Each needs memory
    /// for two incomplete parts: its own, and that with the end of the tensor before it.
    pub fn max_positions(&self, part_len: u64) -> usize {
        (self.parts(part_len).saturating_sub(self.writers(part_len)) / 2).max(1)
    }
}

/// The memory of the parts of an upload.
pub struct PartMemory {
    state: Mutex<PartMemoryState>,
    freed: Condvar,
}

struct PartMemoryState {
    budget: UploadBudget,
    /// Parts that have memory.
    held: usize,
    /// Parts that are being sent. Their memory will come back.
    sending: usize,
    /// Memory of parts that were sent, for reuse; it is counted in `held`.
    free: Vec<Vec<u8>>,
}

impl PartMemoryState {
    fn must_wait(&self, limit: usize) -> bool {
        self.free.is_empty() && self.sending > 0 && self.held >= limit
    }
}

/// A part that is being sent, until this is dropped.
pub struct SendingPart<'m>(&'m PartMemory);

impl PartMemory {
    pub fn new(budget: UploadBudget) -> Self {
        let state = PartMemoryState { budget, held: 0, sending: 0, free: Vec::new() };
        PartMemory { state: Mutex::new(state), freed: Condvar::new() }
    }

    /// The limits.
    pub fn budget(&self) -> UploadBudget {
        self.state().budget
    }

    /// Announces that the object will have at least `len` bytes, and lowers the number of parts.
    pub fn reserve(&self, len: u64, parts: Option<usize>) {
        let mut state = self.state();
        state.budget.object = state.budget.object.max(len);
        state.budget.parts = state.budget.parts.min(parts.unwrap_or(usize::MAX));
    }

    fn state(&self) -> MutexGuard<'_, PartMemoryState> {
        unpoisoned(self.state.lock())
    }

    /// Returns memory for a part, with any content. While there are too many parts and some are
    /// being sent, it sends some or waits. If none is being sent, the memory is granted beyond the
    /// limit: other parts can become complete only with this one.
    pub fn take(&self, len: usize, send: &dyn Fn() -> Result<()>) -> Result<Vec<u8>> {
        let mut state = self.state();
        let limit = state.budget.parts(len as u64);
        while state.must_wait(limit) {
            drop(state);
            send()?;
            state = self.state();
            if state.must_wait(limit) {
                let waited = self.freed.wait_timeout(state, POLL);
                state = unpoisoned(waited).0;
            }
        }
        if let Some(free) = state.free.pop() {
            // Parts may have become longer since.
            if free.len() == len {
                return Ok(free);
            }
        } else {
            state.held += 1;
        }
        drop(state);
        Ok(try_zeroed(len, "a part of an upload")?.into_vec())
    }

    /// Counts a complete part, which is being sent from now on.
    pub fn complete(&self) {
        self.state().sending += 1;
    }

    /// Returns the guard of a complete part, which ends its sending when it is dropped.
    pub fn sending(&self) -> SendingPart<'_> {
        SendingPart(self)
    }

    /// Frees unused memory after the upload was aborted.
    pub fn clear(&self) {
        self.state().free = Vec::new();
    }
}

impl SendingPart<'_> {
    /// Takes back the memory of a part; None if a cancelled request still uses it.
    pub fn done(self, memory: Option<Vec<u8>>) {
        let mut state = self.0.state();
        match memory {
            Some(memory) => state.free.push(memory),
            None => state.held -= 1,
        }
    }
}

impl Drop for SendingPart<'_> {
    fn drop(&mut self) {
        self.0.state().sending -= 1;
        self.0.freed.notify_all();
    }
}

#[cfg(all(test, feature = "models"))]
mod models;

#[cfg(all(test, not(feature = "models")))]
#[allow(clippy::unwrap_used)]
mod tests {
    use std::sync::atomic::{AtomicUsize, Ordering};

    use super::*;

    fn nothing_to_send() -> Result<()> {
        Ok(())
    }

    fn budget(bytes: Option<u64>, object: u64) -> UploadBudget {
        UploadBudget { writers: 16, bytes, parts: usize::MAX, object }
    }

    #[test]
    fn parts_stay_within_the_limit_if_they_are_sent_in_order() {
        let memory = PartMemory::new(budget(Some(40), 0));
        let (in_use, most) = (AtomicUsize::new(0), AtomicUsize::new(0));
        std::thread::scope(|scope| {
            for _ in 0..8 {
                scope.spawn(|| {
                    for _ in 0..100 {
                        memory.complete();
                        let sending = memory.sending();
                        let part = memory.take(10, &nothing_to_send).unwrap();
                        let now = in_use.fetch_add(1, Ordering::SeqCst) + 1;
                        most.fetch_max(now, Ordering::SeqCst);
                        std::thread::yield_now();
                        in_use.fetch_sub(1, Ordering::SeqCst);
                        sending.done(Some(part));
                    }
                });
            }
        });
        assert!(most.into_inner() <= 4);
        assert!(memory.state().held <= 4);
    }

    #[test]
    fn short_object_has_at_most_its_parts_but_one_in_memory() {
        for (object, parts) in [(0, 20), (1, 4), (50, 4), (60, 5), (200, 19), (900, 20)] {
            assert_eq!(budget(None, object).parts(10), parts, "{object}");
        }
        // A limit that was set takes precedence, and that of a save bounds all.
        assert_eq!(budget(Some(300), 20).parts(10), 30);
        let memory = PartMemory::new(budget(None, 0));
        memory.reserve(60, None);
        memory.reserve(50, Some(7));
        assert_eq!(memory.budget().parts(10), 5);
        memory.reserve(0, Some(3));
        memory.reserve(0, Some(9));
        assert_eq!(memory.budget().parts(10), 3);
    }

    #[test]
    fn memory_is_granted_over_the_limit_if_no_part_is_being_sent() {
        let memory = PartMemory::new(budget(Some(10), 0));
        // No part is being sent, so the second part gets memory although the first takes all of the
        // limit.
        let parts = [0, 1].map(|_| memory.take(10, &nothing_to_send).unwrap());
        assert_eq!(memory.state().held, 2);
        for part in parts {
            memory.complete();
            memory.sending().done(Some(part));
        }
        // Longer parts cannot use the memory of shorter ones.
        assert_eq!(memory.take(30, &nothing_to_send).unwrap().len(), 30);
        assert_eq!(memory.state().held, 2);
    }
}
