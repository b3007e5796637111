//! Copies of the bytes that are written, so that exactly these bytes are hashed. The caller may
//! change a tensor while it is saved, and a file whose hashes do not match its bytes is rejected.

use std::sync::{Condvar, Mutex};

use crate::cancel::{Cancel, POLL};
use crate::error::Result;
use crate::fallible::try_extend;
use crate::sys::sync::unpoisoned;

/// The memory of shorter copies is not worth keeping.
const SHORT: usize = 64 << 10;

/// A pool of memory for copies.
#[derive(Default)]
pub struct CopyPool(Mutex<Vec<Vec<u8>>>);

/// Limits the number of threads that copy at once. Most threads of an upload only wait for its
/// server.
pub struct CopySlots {
    free: Mutex<usize>,
    freed: Condvar,
}

/// A thread's permission to copy, until it is dropped.
pub struct CopySlot<'t>(&'t CopySlots);

impl CopySlots {
    /// Allows this number of threads to copy at once.
    pub fn new(threads: usize) -> Self {
        CopySlots { free: Mutex::new(threads.max(1)), freed: Condvar::new() }
    }

    /// Waits for permission to copy.
    pub fn acquire(&self, cancel: &dyn Cancel) -> Result<CopySlot<'_>> {
        let mut free = unpoisoned(self.free.lock());
        while *free == 0 {
            free = unpoisoned(self.freed.wait_timeout(free, POLL)).0;
            cancel.check()?;
        }
        *free -= 1;
        Ok(CopySlot(self))
    }
}

impl Drop for CopySlot<'_> {
    fn drop(&mut self) {
        *unpoisoned(self.0.free.lock()) += 1;
        self.0.freed.notify_one();
    }
}

/// A copy of bytes. Its memory returns to the pool when it is dropped.
pub struct PooledCopy<'c> {
    bytes: Vec<u8>,
    pool: &'c CopyPool,
}

impl CopyPool {
    /// Copies bytes.
    pub fn copy(&self, bytes: &[u8]) -> Result<PooledCopy<'_>> {
        let unused = if bytes.len() < SHORT { None } else { unpoisoned(self.0.lock()).pop() };
        let mut copy = unused.unwrap_or(Vec::new());
        copy.clear();
        try_extend(&mut copy, bytes, "a copy of what is saved")?;
        Ok(PooledCopy { bytes: copy, pool: self })
    }
}

impl AsRef<[u8]> for PooledCopy<'_> {
    fn as_ref(&self) -> &[u8] {
        &self.bytes
    }
}

impl Drop for PooledCopy<'_> {
    fn drop(&mut self) {
        if self.bytes.len() >= SHORT {
            let bytes = std::mem::take(&mut self.bytes);
            unpoisoned(self.pool.0.lock()).push(bytes);
        }
    }
}
