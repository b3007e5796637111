//! A source whose file was closed.

use super::{Capabilities, HubChecksum, ReadAt};
use crate::cancel::Cancel;
use crate::error::{Error, Result};
use crate::mem::Buffers;

/// Refuses every read.
pub struct ClosedSource {
    /// The path or address.
    pub uri: String,
    /// True if the file came from a hub.
    pub of_hub: bool,
}

impl ReadAt for ClosedSource {
    fn uri(&self) -> &str {
        &self.uri
    }

    fn capabilities(&self) -> Capabilities {
        Capabilities { of_hub: self.of_hub, request_len: 1 << 20, ..Capabilities::SEQUENTIAL }
    }

    fn read_at(
        &self,
        _offset: u64,
        _buffers: &mut Buffers<'_>,
        _cancel: &dyn Cancel,
    ) -> Result<usize> {
        Err(self.closed_error())
    }

    fn checksum(&self, _cancel: &dyn Cancel) -> Result<HubChecksum> {
        Err(self.closed_error())
    }
}

impl ClosedSource {
    fn closed_error(&self) -> Error {
        Error::Closed(format!("I/O operation on closed file `{}`", self.uri))
    }
}
