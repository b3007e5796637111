//! A source that is read front to back, and whose first bytes were read before.

use std::sync::Arc;

use super::{Capabilities, Facts, ReadAt};
use crate::cancel::Cancel;
use crate::error::Result;
use crate::mem::Buffers;
use crate::sys::to_usize;

/// The bytes that were read, and the source of the rest.
pub struct PrefixedSource {
    source: Arc<dyn ReadAt>,
    base: u64,
    prefix: Vec<u8>,
}

impl PrefixedSource {
    /// `prefix`: the bytes from `base` on that were read from `source` before.
    pub fn new(source: Arc<dyn ReadAt>, base: u64, prefix: Vec<u8>) -> Self {
        PrefixedSource { source, base, prefix }
    }
}

impl ReadAt for PrefixedSource {
    fn facts(&self) -> &Facts {
        self.source.facts()
    }

    fn capabilities(&self) -> Capabilities {
        self.source.capabilities()
    }

    fn read_at(&self, offset: u64, into: &mut Buffers<'_>, cancel: &dyn Cancel) -> Result<usize> {
        let here = offset.checked_sub(self.base).map(to_usize);
        match here.and_then(|at| self.prefix.get(at..)).filter(|here| !here.is_empty()) {
            Some(here) => Ok(into.fill_from(here)),
            None => self.source.read_at(offset, into, cancel),
        }
    }
}
