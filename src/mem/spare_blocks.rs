//! Memory of tensors that were dropped, for the next tensors of the same iterator.

use std::sync::Mutex;

use super::mapping::Mapping;
use crate::sys::sync::unpoisoned;

/// Mappings that wait for another use, of at most so many bytes together.
pub struct SpareBlocks {
    most: usize,
    spare: Mutex<Vec<Mapping>>,
}

impl SpareBlocks {
    /// At most `most` bytes wait.
    pub fn new(most: usize) -> Self {
        SpareBlocks { most, spare: Mutex::default() }
    }

    /// Keeps a mapping, or frees it if there are enough. It is freed, too, while another thread has
    /// the lock: after a fork, none may ever give it back.
    pub fn give(&self, mapping: Mapping) {
        if let Ok(mut spare) = self.spare.try_lock() {
            let kept: usize = spare.iter().map(Mapping::size).sum();
            if kept.saturating_add(mapping.size()) <= self.most {
                spare.push(mapping);
            }
        }
    }

    /// Takes the shortest mapping of at least `len` bytes, unless it is more than twice as long.
    pub fn take(&self, len: usize) -> Option<Mapping> {
        let mut spare = unpoisoned(self.spare.lock());
        let fits = |mapping: &Mapping| (len..=len.saturating_mul(2)).contains(&mapping.size());
        let found = spare.iter().enumerate().filter(|(_, mapping)| fits(mapping));
        let (at, _) = found.min_by_key(|(_, mapping)| mapping.size())?;
        Some(spare.swap_remove(at))
    }
}
