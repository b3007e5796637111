//! A source whose file was closed.

use std::sync::Arc;

use super::{Capabilities, Facts, ReadAt, RequestChecksum, ServerFile};
use crate::cancel::Cancel;
use crate::error::{Error, Result};
use crate::mem::Buffers;

/// Refuses every read.
pub struct ClosedSource(Facts);

impl ClosedSource {
    /// The source that replaces an open one.
    pub fn new(open: &dyn ReadAt) -> Self {
        let uri = open.uri().to_owned();
        let closed = uri.clone();
        let checksum: RequestChecksum = Arc::new(move |_| Err(closed_error(&closed)));
        let server = open.facts().server.as_ref().map(|_| ServerFile {
            headers: open.facts().headers().to_vec(),
            checksum: open.facts().is_of_hub().then_some(checksum),
            ..ServerFile::default()
        });
        ClosedSource(Facts { uri, server, ..Facts::default() })
    }
}

impl ReadAt for ClosedSource {
    fn facts(&self) -> &Facts {
        &self.0
    }

    fn capabilities(&self) -> Capabilities {
        Capabilities { request_len: 1 << 20, ..Capabilities::SEQUENTIAL }
    }

    fn read_at(&self, _: u64, _: &mut Buffers<'_>, _: &dyn Cancel) -> Result<usize> {
        Err(closed_error(&self.0.uri))
    }
}

/// The error of the use of a closed file.
pub fn closed_error(uri: &str) -> Error {
    Error::Closed(format!("I/O operation on closed file `{uri}`"))
}
