//! Temporary memory that batches are read into before parts of them are copied out.

use std::ops::Range;
use std::sync::{Arc, Mutex};

use crate::error::Result;
use crate::mem::{Arena, DISK_BLOCK, HUGE_PAGE, HostBuffer};
use crate::sys::sync::unpoisoned;
use crate::sys::to_usize;

/// Temporary memory that is reused for later batches.
#[derive(Default)]
pub struct ScratchPool(Mutex<Vec<HostBuffer>>);

impl ScratchPool {
    /// Takes memory for `len` bytes from a file position on. They have the same offset within a
    /// disk block as in the file, so that direct reads can go straight there.
    pub fn acquire(self: &Arc<Self>, position: u64, len: usize) -> Result<Scratch> {
        let start = to_usize(position % DISK_BLOCK as u64);
        // Direct reads into huge pages take less time.
        let wanted = len.saturating_add(DISK_BLOCK);
        let unit = if wanted > HUGE_PAGE / 2 { HUGE_PAGE } else { DISK_BLOCK };
        let wanted = wanted.checked_next_multiple_of(unit).unwrap_or(wanted);
        let reusable = {
            let mut free = unpoisoned(self.0.lock());
            let found = free.iter().position(|memory| memory.bytes().len() >= wanted);
            let reusable = found.map(|at| free.swap_remove(at));
            if reusable.is_none() {
                // The new, longer piece replaces it, so that there are never more pieces than are
                // in use at once.
                drop(free.pop());
            }
            reusable
        };
        let memory = reusable.map_or_else(|| Arena::zeroed(wanted), Ok)?;
        Ok(Scratch { memory, range: start..start + len, pool: Arc::clone(self) })
    }
}

/// Memory for the bytes of one batch. It goes back to its pool when it is dropped.
pub struct Scratch {
    memory: HostBuffer,
    range: Range<usize>,
    pool: Arc<ScratchPool>,
}

impl Scratch {
    /// Returns the bytes.
    pub fn bytes(&self) -> &[u8] {
        self.memory.bytes().get(self.range.clone()).unwrap_or(&[])
    }

    /// Returns the bytes, to be written to.
    pub fn bytes_mut(&mut self) -> &mut [u8] {
        self.memory.bytes_mut().get_mut(self.range.clone()).unwrap_or(&mut [])
    }
}

impl Drop for Scratch {
    fn drop(&mut self) {
        let memory = std::mem::replace(&mut self.memory, HostBuffer::empty());
        unpoisoned(self.pool.0.lock()).push(memory);
    }
}

/// Some of the bytes of a batch, which stay as long as this value lives.
pub struct ScratchBytes {
    /// The batch.
    pub scratch: Arc<Scratch>,
    /// The range of its bytes.
    pub range: Range<usize>,
}

impl AsRef<[u8]> for ScratchBytes {
    fn as_ref(&self) -> &[u8] {
        self.scratch.bytes().get(self.range.clone()).unwrap_or(&[])
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn longer_scratch_memory_replaces_shorter() {
        let pool = Arc::new(ScratchPool::default());
        for blocks in 1..20 {
            let mut scratch = pool.acquire(5000, blocks * DISK_BLOCK).unwrap();
            assert_eq!(scratch.bytes_mut().len(), blocks * DISK_BLOCK);
            drop(scratch);
            let lens: Vec<usize> =
                pool.0.lock().unwrap().iter().map(|memory| memory.bytes().len()).collect();
            assert_eq!(lens, [(blocks + 1) * DISK_BLOCK]);
        }
        let _least = pool.acquire(0, 3).unwrap();
        assert!(pool.0.lock().unwrap().is_empty(), "the longest serves for less");
    }

    #[test]
    fn scratch_keeps_the_offset_within_a_disk_block() {
        let scratch = Arc::new(ScratchPool::default()).acquire(4096 * 7 + 100, 3 << 20).unwrap();
        assert_eq!(scratch.bytes().as_ptr().addr() % DISK_BLOCK, 100);
    }
}
