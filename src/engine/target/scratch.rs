//! Temporary memory that batches are read into before parts of them are copied out.

use std::sync::{Mutex, PoisonError};

use crate::error::{Error, Result};
use crate::mem::{Arena, DISK_BLOCK, HUGE_PAGE};

/// Temporary memory that is reused for later batches; at most one piece per reader.
#[derive(Default)]
pub struct ScratchPool(Mutex<Vec<Arena>>);

impl ScratchPool {
    /// Takes memory for `len` bytes from a file position on. They have the same offset within a
    /// disk block as in the file, so that direct reads can go straight there.
    pub fn acquire(&self, position: u64, len: usize) -> Result<Scratch> {
        let bug = |_| Error::Bug(format!("position {position} in a block"));
        let start = usize::try_from(position % DISK_BLOCK as u64).map_err(bug)?;
        // Direct reads into huge pages take less time.
        let wanted = len.saturating_add(DISK_BLOCK);
        let unit = if wanted > HUGE_PAGE / 2 { HUGE_PAGE } else { DISK_BLOCK };
        let wanted = wanted.checked_next_multiple_of(unit).unwrap_or(wanted);
        let reusable = {
            let mut free = self.0.lock().unwrap_or_else(PoisonError::into_inner);
            let found = free.iter().position(|memory| memory.len() >= wanted);
            let reusable = found.map(|at| free.swap_remove(at));
            if reusable.is_none() {
                // The new, longer piece replaces it, so that there are never more pieces than
                // readers.
                drop(free.pop());
            }
            reusable
        };
        let memory = reusable.map_or_else(|| Arena::new(wanted), Ok)?;
        Ok(Scratch { memory, start, len })
    }

    /// Returns memory to the pool.
    pub fn release(&self, scratch: Scratch) {
        self.0.lock().unwrap_or_else(PoisonError::into_inner).push(scratch.memory);
    }
}

/// Memory for the bytes of one batch.
pub struct Scratch {
    memory: Arena,
    start: usize,
    len: usize,
}

impl Scratch {
    /// Returns the bytes, to be written to.
    pub fn bytes(&mut self) -> &mut [u8] {
        let bytes = self.memory.bytes_mut().get_mut(self.start..).unwrap_or(&mut []);
        bytes.get_mut(..self.len).unwrap_or(&mut [])
    }
}

#[cfg(test)]
#[allow(clippy::unwrap_used)]
mod tests {
    use super::*;

    #[test]
    fn longer_scratch_memory_replaces_shorter() {
        let pool = ScratchPool::default();
        for blocks in 1..20 {
            let mut scratch = pool.acquire(5000, blocks * DISK_BLOCK).unwrap();
            assert_eq!(scratch.bytes().len(), blocks * DISK_BLOCK);
            pool.release(scratch);
            let lens: Vec<usize> = pool.0.lock().unwrap().iter().map(Arena::len).collect();
            assert_eq!(lens, [(blocks + 1) * DISK_BLOCK]);
        }
        pool.acquire(0, 3).unwrap();
        assert!(pool.0.lock().unwrap().is_empty(), "the longest serves for less");
    }

    #[test]
    fn scratch_keeps_the_offset_within_a_disk_block() {
        let mut scratch = ScratchPool::default().acquire(4096 * 7 + 100, 3 << 20).unwrap();
        assert_eq!(scratch.bytes().as_ptr().addr() % DISK_BLOCK, 100);
    }
}
