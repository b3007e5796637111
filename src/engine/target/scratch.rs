//! Memory that batches are read to before parts of them are taken.

use std::sync::{Mutex, PoisonError};

use crate::error::{Error, Result};
use crate::mem::{Arena, DISK_BLOCK, HUGE_PAGE};

/// Memory of batches that were read, for those that come: a piece for each reader at most.
#[derive(Default)]
pub struct ScratchPool(Mutex<Vec<Arena>>);

impl ScratchPool {
    /// Memory for so many bytes from a position of a file on. They lie in blocks of it as in those of the
    /// file, so that direct reads can go straight there.
    pub fn take(&self, position: u64, len: usize) -> Result<Scratch> {
        let bug = |_| Error::Bug(format!("position {position} in a block"));
        let start = usize::try_from(position % DISK_BLOCK as u64).map_err(bug)?;
        // Direct reads take a disk less long into huge pages.
        let wanted = len.saturating_add(DISK_BLOCK);
        let unit = if wanted > HUGE_PAGE / 2 { HUGE_PAGE } else { DISK_BLOCK };
        let wanted = wanted.checked_next_multiple_of(unit).unwrap_or(wanted);
        let known = {
            let mut free = self.0.lock().unwrap_or_else(PoisonError::into_inner);
            let found = free.iter().position(|memory| memory.len() >= wanted);
            let known = found.map(|at| free.swap_remove(at));
            if known.is_none() {
                // A longer one takes its place: there are no more than readers.
                drop(free.pop());
            }
            known
        };
        let memory = known.map_or_else(|| Arena::new(wanted), Ok)?;
        Ok(Scratch { memory, start, len })
    }

    /// Takes memory back.
    pub fn give_back(&self, scratch: Scratch) {
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
    /// The bytes.
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
    fn longer_memory_takes_the_place_of_shorter() {
        let pool = ScratchPool::default();
        for blocks in 1..20 {
            let mut scratch = pool.take(5000, blocks * DISK_BLOCK).unwrap();
            assert_eq!(scratch.bytes().len(), blocks * DISK_BLOCK);
            pool.give_back(scratch);
            let lens: Vec<usize> = pool.0.lock().unwrap().iter().map(Arena::len).collect();
            assert_eq!(lens, [(blocks + 1) * DISK_BLOCK]);
        }
        pool.take(0, 3).unwrap();
        assert!(pool.0.lock().unwrap().is_empty(), "the longest serves for less");
    }

    #[test]
    fn bytes_lie_as_in_the_file() {
        let mut scratch = ScratchPool::default().take(4096 * 7 + 100, 3 << 20).unwrap();
        assert_eq!(scratch.bytes().as_ptr().addr() % DISK_BLOCK, 100);
    }
}
