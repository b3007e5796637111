//! Copies of what is written, to be hashed as it was written: the caller may change a tensor while
//! it is saved, and hashes of other bytes than those in the file would condemn it.

use std::sync::atomic::{AtomicUsize, Ordering};
use std::sync::{Mutex, PoisonError};

/// Bytes of copies for each thread that wait to be hashed; beyond, threads hash before they write
/// more. Half a part: hashing and writing take about as long.
const WAITING: usize = 2 << 20;
/// At least two parts, so that one is there when another was hashed.
const LEAST: usize = 8 << 20;
/// Bytes of shorter copies are not worth to be kept.
const SHORT: usize = 64 << 10;

/// Memory for copies, used again and again.
pub struct Copies {
    free: Mutex<Vec<Vec<u8>>>,
    /// Bytes that wait to be hashed.
    waiting: AtomicUsize,
    enough: usize,
}

/// Bytes as they were when they were copied.
pub struct Copy<'c> {
    bytes: Vec<u8>,
    of: &'c Copies,
    waits: bool,
}

impl Copies {
    /// For so many threads.
    pub fn new(threads: usize) -> Self {
        let enough = WAITING.saturating_mul(threads).max(LEAST);
        Copies { free: Mutex::default(), waiting: AtomicUsize::new(0), enough }
    }

    /// Copies bytes.
    pub fn of(&self, bytes: &[u8]) -> Copy<'_> {
        let mut copy = if bytes.len() < SHORT { Vec::new() } else { self.free() };
        copy.clear();
        copy.extend_from_slice(bytes);
        Copy { bytes: copy, of: self, waits: false }
    }

    fn free(&self) -> Vec<u8> {
        let free = self.free.lock().unwrap_or_else(PoisonError::into_inner).pop();
        free.unwrap_or(Vec::new())
    }

    /// Whether enough of them wait to be hashed.
    pub fn are_enough(&self) -> bool {
        self.waiting.load(Ordering::Relaxed) >= self.enough
    }
}

impl Copy<'_> {
    /// The same, which waits to be hashed from now on.
    pub fn waiting(mut self) -> Self {
        self.waits = true;
        self.of.waiting.fetch_add(self.bytes.len(), Ordering::Relaxed);
        self
    }
}

impl AsRef<[u8]> for Copy<'_> {
    fn as_ref(&self) -> &[u8] {
        &self.bytes
    }
}

impl Drop for Copy<'_> {
    fn drop(&mut self) {
        if self.waits {
            self.of.waiting.fetch_sub(self.bytes.len(), Ordering::Relaxed);
        }
        if self.bytes.len() >= SHORT {
            let bytes = std::mem::take(&mut self.bytes);
            self.of.free.lock().unwrap_or_else(PoisonError::into_inner).push(bytes);
        }
    }
}
