//! Blocks of device memory, which are allocated one after another while others are being filled.

use std::sync::{Arc, OnceLock};

use super::{DeviceMemory, Event};
use crate::cancel::{Cancel, POLL};
use crate::error::{Error, Result};
use crate::sys::sync::{Condvar, Mutex, unpoisoned};

/// Memory for the tensors of a load, block by block.
pub struct DeviceBlocks {
    slots: Vec<OnceLock<DeviceBlock>>,
    /// Held while a block is added, so that no wait misses it.
    adding: Mutex<()>,
    added: Condvar,
}

/// One block of device memory.
pub struct DeviceBlock {
    /// Its memory.
    pub memory: DeviceMemory,
    /// The event at the end of the memory's previous use, before which nothing is written to it.
    /// None if there was no previous use.
    pub after: Option<Arc<dyn Event>>,
}

impl DeviceBlocks {
    /// Creates room for `count` blocks, none of which is allocated yet.
    pub fn new(count: usize) -> Self {
        let slots = (0..count).map(|_| OnceLock::new()).collect();
        DeviceBlocks { slots, adding: Mutex::new(()), added: Condvar::new() }
    }

    /// Creates blocks that are all allocated.
    pub fn from_memory(memory: Vec<DeviceMemory>) -> Result<Self> {
        let blocks = Self::new(memory.len());
        for (at, memory) in memory.into_iter().enumerate() {
            blocks.insert(at, DeviceBlock { memory, after: None })?;
        }
        Ok(blocks)
    }

    /// Returns the memory of all blocks that are allocated.
    #[cfg(test)]
    pub fn into_memory(self) -> Vec<DeviceMemory> {
        self.slots.into_iter().filter_map(|slot| Some(slot.into_inner()?.memory)).collect()
    }

    /// Adds a block; an error if it was added before.
    pub fn insert(&self, at: usize, block: DeviceBlock) -> Result<()> {
        let bug = || Error::Bug(format!("block {at} is allocated twice, or too many are"));
        let slot = self.slots.get(at).ok_or_else(bug)?;
        {
            let _adding = unpoisoned(self.adding.lock());
            slot.set(block).map_err(|_| bug())?;
        }
        self.added.notify_all();
        Ok(())
    }

    /// Returns a block; waits until it is allocated.
    pub fn get(&self, at: usize, cancel: &dyn Cancel) -> Result<&DeviceBlock> {
        let slot = self.slots.get(at).ok_or_else(|| Error::Bug(format!("no block {at}")))?;
        if let Some(block) = slot.get() {
            return Ok(block);
        }
        let mut adding = unpoisoned(self.adding.lock());
        loop {
            if let Some(block) = slot.get() {
                return Ok(block);
            }
            cancel.check()?;
            let waited = self.added.wait_timeout(adding, POLL);
            adding = unpoisoned(waited).0;
        }
    }
}
