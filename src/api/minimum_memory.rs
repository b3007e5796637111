//! The minimum memory limit with which a file can be read.

use super::file::TensorFile;
use crate::engine::destination::gather;
use crate::engine::page_cache;
use crate::error::Result;
use crate::io::{Capabilities, as_refs};
use crate::mem::pinned;
use crate::memory_limit::{CONNECTION, LoadNeeds};

/// Maximum bytes that one connection, or one Python file object, needs under any limit.
const READER: u64 = 2 * CONNECTION;

impl TensorFile {
    /// Returns the minimum of the bytes that a load has in flight. `parts`: it loads parts of
    /// tensors. `staged`: it loads to a device through staging buffers.
    pub fn minimum_memory(&self, parts: bool, staged: bool) -> Result<u64> {
        let sources = self.sources();
        let files = as_refs(&sources);
        let of_server =
            Capabilities::combined(&files).map_or(0, |capabilities| capabilities.reader_memory);
        let around = if staged { page_cache::READER_MEMORY } else { 0 };
        let buffer = pinned::buffer_len()? as u64;
        let needs = LoadNeeds {
            readers: 1,
            reader_bytes: of_server.clamp(CONNECTION, READER).max(around),
            gather_bytes: if parts { gather::min_memory(self.is_encrypted()) } else { 0 },
            staging: staged.then(|| (buffer, pinned::min_buffers(buffer), 0)),
        };
        // Files of a hub are hashed before the load, piece by piece, which also takes memory.
        let ahead = of_server > CONNECTION || files.iter().any(|source| source.facts().is_of_hub());
        Ok(if ahead { needs.minimum_with_read_ahead() } else { needs.minimum() })
    }
}
