//! Comparison of tensors with the headers of their file.

use crate::cancel::Cancel;
use crate::codec::CompactHeader;
use crate::codec::hash::Verify;
use crate::engine::download::Downloader;
use crate::engine::write::TensorData;
use crate::error::{Error, Result};
use crate::format::catalog::Entry;
use crate::mem::device::Streams;
use crate::stats::Counters;

/// True if a tensor, in host memory or on a device, has the hashes of a header.
pub fn matches_header(
    data: &TensorData<'_>,
    header: &CompactHeader,
    entry: &Entry,
    uri: &str,
    cancel: &dyn Cancel,
) -> Result<bool> {
    let mut hash = header.start_hash();
    match data {
        // A tensor that was saved from the meta device has no data that were hashed; loaded, it is
        // zeros.
        _ if entry.is_meta() => {}
        TensorData::Meta => return Ok(false),
        TensorData::Bytes(bytes) => hash.update_large(bytes, cancel)?,
        TensorData::Device(bytes) => {
            let streams = Streams::open(&bytes.device, bytes.consumer)?;
            let counters = Counters::default();
            let download =
                Downloader { counters: &counters, cancel, before_waiting: &|| Ok(()), share: None };
            let all = 0..bytes.memory.size();
            download.each_chunk(bytes, all, streams.next()?, |_, chunk| {
                hash.update(chunk.as_ref());
                Ok(())
            })?;
        }
        TensorData::Deferred(copy_to_host) => {
            hash.update_large((*copy_to_host()?).as_ref(), cancel)?
        }
    }
    match header.verify(&hash.finish(), entry, uri, Verify::All) {
        Ok(()) => Ok(true),
        Err(Error::HashMismatch { .. }) => Ok(false),
        Err(other) => Err(other),
    }
}
