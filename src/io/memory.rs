//! Files in memory.

use super::{Capabilities, Facts, ReadAt};
use crate::cancel::Cancel;
use crate::error::Result;
use crate::mem::Buffers;
use crate::sys::to_usize;

/// A file held in memory.
pub struct MemorySource<B> {
    bytes: B,
    facts: Facts,
}

impl<B: AsRef<[u8]> + Send + Sync> MemorySource<B> {
    /// `uri`: its name in messages.
    pub fn new(bytes: B, uri: impl Into<String>) -> Self {
        let len = Some(bytes.as_ref().len() as u64);
        MemorySource { bytes, facts: Facts { uri: uri.into(), len, ..Facts::default() } }
    }
}

impl<B: AsRef<[u8]> + Send + Sync> ReadAt for MemorySource<B> {
    fn facts(&self) -> &Facts {
        &self.facts
    }

    fn capabilities(&self) -> Capabilities {
        Capabilities {
            max_readers: usize::MAX,
            initial_readers: crate::cpu_count(),
            max_auto_readers: crate::cpu_count(),
            ..Capabilities::SEQUENTIAL
        }
    }

    fn read_at(&self, offset: u64, into: &mut Buffers<'_>, _cancel: &dyn Cancel) -> Result<usize> {
        // After the end there are no bytes.
        Ok(into.fill_from(self.bytes.as_ref().get(to_usize(offset)..).unwrap_or(&[])))
    }
}
