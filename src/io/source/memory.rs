//! Bytes that are in memory already.
// A broken invariant ends the call by a panic that its boundary catches.
#![allow(clippy::indexing_slicing)]

use std::io::IoSliceMut;

use super::{ReadAt, Traits};
use crate::cancel::Cancel;
use crate::error::Result;

/// A `.tensors` file held in memory.
pub struct MemorySource<B> {
    bytes: B,
    uri: String,
}

impl<B: AsRef<[u8]> + Send + Sync> MemorySource<B> {
    /// `uri` is what messages call it.
    pub fn new(bytes: B, uri: impl Into<String>) -> Self {
        MemorySource { bytes, uri: uri.into() }
    }
}

impl<B: AsRef<[u8]> + Send + Sync> ReadAt for MemorySource<B> {
    fn uri(&self) -> &str {
        &self.uri
    }

    fn traits(&self) -> Traits {
        Traits {
            len: Some(self.bytes.as_ref().len() as u64),
            max_readers: usize::MAX,
            default_readers: crate::cpu_count(),
            request_len: 8 << 20,
            merge_gap: 0,
        }
    }

    fn read_at(
        &self,
        offset: u64,
        buffers: &mut [IoSliceMut<'_>],
        _cancel: &dyn Cancel,
    ) -> Result<usize> {
        let start = usize::try_from(offset).unwrap_or(usize::MAX);
        // Nothing behind the end.
        let mut rest = self.bytes.as_ref().get(start..).unwrap_or(&[]);
        let mut done = 0;
        for buffer in buffers {
            let len = buffer.len().min(rest.len());
            let (now, later) = rest.split_at(len);
            buffer[..len].copy_from_slice(now);
            rest = later;
            done += len;
        }
        Ok(done)
    }
}
