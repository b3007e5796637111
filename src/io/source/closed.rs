//! What is left of a source after its file was closed.

use super::{Published, ReadAt, Traits};
use crate::cancel::Cancel;
use crate::error::{Error, Result};
use crate::mem::Buffers;

/// Refuses every read.
pub struct ClosedSource {
    /// The path or address that it was.
    pub uri: String,
    /// Whether it was one of a hub.
    pub of_hub: bool,
}

impl ReadAt for ClosedSource {
    fn uri(&self) -> &str {
        &self.uri
    }

    fn traits(&self) -> Traits {
        Traits {
            len: None,
            max_readers: 1,
            first_readers: 1,
            most_readers: 1,
            request_len: 1 << 20,
            merge_gap: 0,
            reader_memory: 0,
        }
    }

    fn read_at(
        &self,
        _offset: u64,
        _buffers: &mut Buffers<'_>,
        _cancel: &dyn Cancel,
    ) -> Result<usize> {
        Err(self.refusal())
    }

    fn is_of_hub(&self) -> bool {
        self.of_hub
    }

    fn published(&self, _cancel: &dyn Cancel) -> Result<Published> {
        Err(self.refusal())
    }
}

impl ClosedSource {
    fn refusal(&self) -> Error {
        Error::Closed(format!("I/O operation on closed file `{}`", self.uri))
    }
}
