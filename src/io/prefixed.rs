//! A source that is read front to back, and whose first bytes were read before.

use std::sync::Arc;

use super::{CachedHead, Capabilities, ReadAt};
use crate::cancel::Cancel;
use crate::error::Result;
use crate::mem::Buffers;

/// The bytes that were read, and the source of the rest.
pub struct PrefixedSource {
    rest: Arc<dyn ReadAt>,
    base: u64,
    first: Vec<u8>,
}

impl PrefixedSource {
    /// `first` are the bytes from `base` on that `rest` has given already.
    pub fn new(rest: Arc<dyn ReadAt>, base: u64, first: Vec<u8>) -> Self {
        PrefixedSource { rest, base, first }
    }
}

impl ReadAt for PrefixedSource {
    fn uri(&self) -> &str {
        self.rest.uri()
    }

    fn capabilities(&self) -> Capabilities {
        self.rest.capabilities()
    }

    fn limit_connection(&self, bytes: u64) {
        self.rest.limit_connection(bytes);
    }

    fn read_at(
        &self,
        offset: u64,
        buffers: &mut Buffers<'_>,
        cancel: &dyn Cancel,
    ) -> Result<usize> {
        let here = offset.checked_sub(self.base).and_then(|at| usize::try_from(at).ok());
        match here.and_then(|at| self.first.get(at..)).filter(|here| !here.is_empty()) {
            Some(here) => Ok(buffers.fill_from(here)),
            None => self.rest.read_at(offset, buffers, cancel),
        }
    }

    fn response_head(&self) -> Option<CachedHead> {
        self.rest.response_head()
    }
}
