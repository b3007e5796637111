//! A source that can only be read front to back, and whose first bytes were read before.

use std::sync::Arc;

use super::{ReadAt, Traits};
use crate::cancel::Cancel;
use crate::error::Result;
use crate::mem::Buffers;
use crate::memory_limit::MemoryLimit;

/// The bytes that were read, and what follows them.
pub struct Prefixed {
    rest: Arc<dyn ReadAt>,
    base: u64,
    first: Vec<u8>,
}

impl Prefixed {
    /// `first` are the bytes from `base` on that `rest` has given already.
    pub fn new(rest: Arc<dyn ReadAt>, base: u64, first: Vec<u8>) -> Self {
        Prefixed { rest, base, first }
    }
}

impl ReadAt for Prefixed {
    fn uri(&self) -> &str {
        self.rest.uri()
    }

    fn traits(&self) -> Traits {
        self.rest.traits()
    }

    fn limit_memory(&self, limit: MemoryLimit) {
        self.rest.limit_memory(limit);
    }

    fn read_at(
        &self,
        offset: u64,
        buffers: &mut Buffers<'_>,
        cancel: &dyn Cancel,
    ) -> Result<usize> {
        let here = offset.checked_sub(self.base).and_then(|at| usize::try_from(at).ok());
        match here.and_then(|at| self.first.get(at..)).filter(|here| !here.is_empty()) {
            Some(here) => Ok(buffers.put(here)),
            None => self.rest.read_at(offset, buffers, cancel),
        }
    }

    fn headers(&self) -> &[(String, String)] {
        self.rest.headers()
    }
}
