//! Chunks of tensor data on their way into the file. Their bytes do not change any more, and are
//! released when they are no longer needed.

use std::ops::Range;
use std::sync::Arc;
use std::sync::atomic::{AtomicUsize, Ordering};

use super::copy_pool::PooledCopy;
use crate::sys::to_usize;

/// The fraction (1/2) of a batch that may wait to be hashed, for each thread. Threads with a longer
/// backlog hash before they write more. Hashing and writing take about the same time.
const BACKLOG_DIVISOR: u64 = 2;

/// A part of a tensor's data.
pub struct TensorChunk<'c> {
    /// Index of the tensor.
    pub tensor: usize,
    /// Position within the data.
    pub start: u64,
    /// The bytes, before encryption.
    pub bytes: ChunkBytes<'c>,
}

/// Bytes that do not change any more.
pub enum ChunkBytes<'c> {
    /// A copy of memory that the caller may change.
    Copied(PooledCopy<'c>),
    /// That memory itself, which is read only once.
    Borrowed(&'c [u8]),
    /// A range of shared memory, which is released with its last chunk.
    Shared(Arc<dyn AsRef<[u8]> + Send + Sync>, Range<usize>),
}

impl AsRef<[u8]> for ChunkBytes<'_> {
    fn as_ref(&self) -> &[u8] {
        match self {
            ChunkBytes::Copied(copy) => copy.as_ref(),
            ChunkBytes::Borrowed(bytes) => bytes,
            // The creator of the range has checked it.
            ChunkBytes::Shared(all, range) => (**all).as_ref().get(range.clone()).unwrap_or(&[]),
        }
    }
}

/// The number of bytes that wait to be hashed.
pub struct HashBacklog {
    waiting: AtomicUsize,
    limit: usize,
}

impl HashBacklog {
    /// Creates the backlog of a number of threads, of at most `most` bytes. Unless `most` is less,
    /// two batches may wait, so that one is ready when another has been hashed.
    pub fn new(threads: usize, batch_len: u64, most: Option<u64>) -> Self {
        let two_batches = batch_len.saturating_mul(2);
        let usual = (batch_len / BACKLOG_DIVISOR).saturating_mul(threads as u64).max(two_batches);
        let usual = to_usize(usual);
        let limit = most.map_or(usual, |most| to_usize(most).min(usual));
        HashBacklog { waiting: AtomicUsize::new(0), limit }
    }

    /// True if so many bytes wait that threads must hash before they write more.
    pub fn is_full(&self) -> bool {
        self.waiting.load(Ordering::Relaxed) >= self.limit
    }

    /// Counts bytes as waiting until they are dropped.
    pub fn add<'c>(&'c self, bytes: ChunkBytes<'c>) -> UnhashedBytes<'c> {
        self.waiting.fetch_add(bytes.as_ref().len(), Ordering::Relaxed);
        UnhashedBytes { bytes, backlog: self }
    }
}

/// Bytes that were written and wait to be hashed.
pub struct UnhashedBytes<'c> {
    bytes: ChunkBytes<'c>,
    backlog: &'c HashBacklog,
}

impl AsRef<[u8]> for UnhashedBytes<'_> {
    fn as_ref(&self) -> &[u8] {
        self.bytes.as_ref()
    }
}

impl Drop for UnhashedBytes<'_> {
    fn drop(&mut self) {
        self.backlog.waiting.fetch_sub(self.bytes.as_ref().len(), Ordering::Relaxed);
    }
}
