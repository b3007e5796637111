//! The memory of parts: those that are being written, and those on their way.

use std::sync::PoisonError;

use crate::cancel::POLL;
use crate::environment::UPLOAD_MB;
use crate::error::Result;
use crate::fallible::try_repeat;
use crate::io::transport::TransportOptions;
use crate::sys::sync::{Condvar, Mutex, MutexGuard};

/// Connections unless a setting says otherwise: 100 MB/s each fill a network of 12 Gbit/s.
pub const DEFAULT_WRITERS: usize = 16;
/// Parts in memory for each four that are being sent, unless the number of bytes is set. The
/// further one allows for a part that is being filled, and one that waits for the header of its
/// tensor.
const PARTS_PER_FOUR_WRITERS: u64 = 5;
/// Parts that an object of few parts may have in memory, however short it is.
const FEW_PARTS: u64 = 4;

/// The limits of memory and connections.
#[derive(Debug, Clone, Copy)]
pub struct UploadBudget {
    /// The most connections.
    pub writers: usize,
    /// None for as much as the connections need.
    pub bytes: Option<u64>,
    /// Bytes that the object will have, as far as is known.
    pub object: Option<u64>,
}

impl UploadBudget {
    /// Creates the limits that the options and the environment set.
    pub fn new(options: &TransportOptions) -> Result<Self> {
        let bytes = Some(UPLOAD_MB.value()?).filter(|&mb| mb > 0);
        Ok(UploadBudget {
            writers: options.connections.unwrap_or(DEFAULT_WRITERS).min(options.max_connections),
            bytes: bytes.map(|mb| mb.saturating_mul(1 << 20)),
            object: None,
        })
    }

    /// Bytes that parts of this length may take together, at least one part. At most the object's
    /// length less one part: with the copies beside them, parts then take no more memory than the
    /// object is long.
    pub fn limit(&self, part_len: u64) -> u64 {
        let enough = (self.writers as u64).saturating_mul(PARTS_PER_FOUR_WRITERS).div_ceil(4);
        let enough = enough.saturating_mul(part_len);
        let few = FEW_PARTS.saturating_mul(part_len);
        let short = self.object.map_or(u64::MAX, |len| len.saturating_sub(part_len).max(few));
        self.bytes.unwrap_or(enough.min(short)).max(part_len)
    }

    /// Connections that send parts of such a length at once.
    pub fn writers(&self, part_len: u64) -> usize {
        let parts = usize::try_from(self.limit(part_len) / part_len).unwrap_or(usize::MAX);
        parts.clamp(1, self.writers.max(1))
    }

    /// Maximum number of positions at which the file may be written alternately. Each needs memory
    /// for two incomplete parts: its own, and that with the end of the tensor before it.
    pub fn max_positions(&self, part_len: u64) -> usize {
        let parts = usize::try_from(self.limit(part_len) / part_len).unwrap_or(usize::MAX);
        (parts.saturating_sub(self.writers(part_len)) / 2).max(1)
    }
}

/// The memory of the parts of an upload.
pub struct PartMemory {
    budget: Mutex<UploadBudget>,
    state: Mutex<PartMemoryState>,
    freed: Condvar,
}

#[derive(Default)]
struct PartMemoryState {
    bytes: u64,
    /// Parts that are being sent. Their memory will come back.
    sending: usize,
    /// Memory of parts that were sent, for reuse.
    free: Vec<Vec<u8>>,
}

impl PartMemoryState {
    fn lacks_memory(&self, len: usize, limit: u64) -> bool {
        let more = self.bytes.saturating_add(len as u64);
        self.free.is_empty() && self.sending > 0 && more > limit
    }

    /// Memory of a part that was sent, or an empty vector for memory that is counted from now on.
    /// None if there is too little.
    fn take(&mut self, len: usize, limit: u64) -> Option<Vec<u8>> {
        while let Some(free) = self.free.pop() {
            if free.len() == len {
                return Some(free);
            }
            // The length of parts has grown since.
            self.bytes = self.bytes.saturating_sub(free.len() as u64);
        }
        if self.lacks_memory(len, limit) {
            return None;
        }
        self.bytes = self.bytes.saturating_add(len as u64);
        Some(Vec::new())
    }
}

/// A part that is being sent, until this is dropped.
pub struct SendingPart<'m>(&'m PartMemory);

impl PartMemory {
    pub fn new(budget: UploadBudget) -> Self {
        PartMemory { budget: Mutex::new(budget), state: Mutex::default(), freed: Condvar::new() }
    }

    /// The limits.
    pub fn budget(&self) -> UploadBudget {
        *self.budget.lock().unwrap_or_else(PoisonError::into_inner)
    }

    /// Lowers the limit to `bytes`; a lower limit from before stays.
    pub fn limit(&self, bytes: u64) {
        let mut budget = self.budget.lock().unwrap_or_else(PoisonError::into_inner);
        budget.bytes = Some(budget.bytes.map_or(bytes, |before| before.min(bytes)));
    }

    /// Announces that the object will have at least `len` bytes.
    pub fn announce(&self, len: u64) {
        let mut budget = self.budget.lock().unwrap_or_else(PoisonError::into_inner);
        budget.object = budget.object.max(Some(len));
    }

    fn state(&self) -> MutexGuard<'_, PartMemoryState> {
        self.state.lock().unwrap_or_else(PoisonError::into_inner)
    }

    /// Returns memory for a part, with any content. While there is too little and parts are being
    /// sent, it sends some or waits for memory. If no part is being sent, the memory is granted
    /// beyond the limit: other parts can become complete only with this one.
    pub fn take(&self, len: usize, send: &dyn Fn() -> Result<()>) -> Result<Vec<u8>> {
        let limit = self.budget().limit(len as u64);
        let mut state = self.state();
        loop {
            if let Some(free) = state.take(len, limit) {
                drop(state);
                return if free.is_empty() {
                    try_repeat(0, len, "a part of an upload")
                } else {
                    Ok(free)
                };
            }
            drop(state);
            send()?;
            state = self.state();
            if state.lacks_memory(len, limit) {
                let waited = self.freed.wait_timeout(state, POLL);
                state = waited.unwrap_or_else(PoisonError::into_inner).0;
            }
        }
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
    pub fn done(self, len: usize, memory: Option<Vec<u8>>) {
        let mut state = self.0.state();
        match memory {
            Some(memory) => state.free.push(memory),
            None => state.bytes = state.bytes.saturating_sub(len as u64),
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

    #[test]
    fn memory_stays_within_the_limit_if_parts_are_sent_in_order() {
        let memory = PartMemory::new(UploadBudget { writers: 4, bytes: Some(40), object: None });
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
                        sending.done(10, Some(part));
                    }
                });
            }
        });
        assert!(most.into_inner() <= 4);
        assert!(memory.state().bytes <= 40);
    }

    #[test]
    fn short_object_has_at_most_its_parts_but_one_in_memory() {
        let budget = |object| UploadBudget { writers: 16, bytes: None, object };
        for (object, parts) in [
            (None, 20),
            (Some(1), 4),
            (Some(50), 4),
            (Some(60), 5),
            (Some(200), 19),
            (Some(900), 20),
        ] {
            assert_eq!(budget(object).limit(10) / 10, parts, "{object:?}");
        }
        // A limit that was set takes precedence.
        assert_eq!(UploadBudget { bytes: Some(300), ..budget(Some(20)) }.limit(10), 300);
        let memory = PartMemory::new(budget(None));
        memory.announce(60);
        memory.announce(50);
        assert_eq!(memory.budget().limit(10), 50);
    }

    #[test]
    fn memory_is_granted_over_the_limit_if_no_part_is_being_sent() {
        let memory = PartMemory::new(UploadBudget { writers: 1, bytes: Some(10), object: None });
        // No part is being sent, so the second part gets memory although the first takes all of the
        // limit.
        let parts = [
            memory.take(10, &nothing_to_send).unwrap(),
            memory.take(10, &nothing_to_send).unwrap(),
        ];
        assert_eq!(memory.state().bytes, 20);
        for part in parts {
            memory.complete();
            memory.sending().done(10, Some(part));
        }
        // Longer parts cannot use the memory of shorter ones.
        assert_eq!(memory.take(30, &nothing_to_send).unwrap().len(), 30);
        assert_eq!(memory.state().bytes, 30);
    }
}
