//! Copies of what is written, to be hashed as it was written: the caller may change a tensor while
//! it is saved, and hashes of other bytes than those in the file would condemn it.

use std::sync::atomic::{AtomicUsize, Ordering};
use std::sync::{Mutex, PoisonError};

/// Bytes of copies beyond which threads hash before they write more.
const ENOUGH: usize = 8 << 20;

/// Memory for copies, used again and again.
#[derive(Default)]
pub struct Copies {
    free: Mutex<Vec<Vec<u8>>>,
    held: AtomicUsize,
}

/// Bytes as they were when they were copied.
pub struct Copy<'c> {
    bytes: Vec<u8>,
    of: &'c Copies,
}

impl Copies {
    /// Copies bytes.
    pub fn of(&self, bytes: &[u8]) -> Copy<'_> {
        let free = self.free.lock().unwrap_or_else(PoisonError::into_inner).pop();
        let mut copy = free.unwrap_or(Vec::new());
        copy.clear();
        copy.extend_from_slice(bytes);
        self.held.fetch_add(copy.len(), Ordering::Relaxed);
        Copy { bytes: copy, of: self }
    }

    /// Whether there are enough of them.
    pub fn are_enough(&self) -> bool {
        self.held.load(Ordering::Relaxed) >= ENOUGH
    }
}

impl AsRef<[u8]> for Copy<'_> {
    fn as_ref(&self) -> &[u8] {
        &self.bytes
    }
}

impl Drop for Copy<'_> {
    fn drop(&mut self) {
        self.of.held.fetch_sub(self.bytes.len(), Ordering::Relaxed);
        let bytes = std::mem::take(&mut self.bytes);
        self.of.free.lock().unwrap_or_else(PoisonError::into_inner).push(bytes);
    }
}
