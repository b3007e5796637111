//! The sources of a load: their capabilities, and direct reads of files that are not in the page
//! cache.

use super::page_cache::{self, PageCacheResidency};
use super::read_request::ReadRequest;
use crate::codec::hash::Verify;
use crate::error::Result;
use crate::io::Capabilities;
use crate::memory_limit::MemoryLimit;

/// Loads of fewer bytes are read through the page cache even if the file is not in it. The kernel's
/// read-ahead covers them, and later reads of the file find it in the cache.
const DIRECT_FROM: u64 = 4 << 20;

/// Loads of fewer bytes are read on the calling thread, which takes less time than starting a
/// second one.
const INLINE_LEN: u64 = 4 << 20;
/// The same limit for loads that decrypt or hash.
const INLINE_HASHED: u64 = 1 << 20;

/// The sources of one load.
pub struct Sources {
    /// Their capabilities, including the memory of each reader.
    pub capabilities: Capabilities,
    /// Their page-cache residency; None unless all are local files.
    pub residency: Option<PageCacheResidency>,
    /// True if they are read with direct I/O, around the page cache.
    pub direct: bool,
    /// True if the calling thread reads everything. Never from servers: their latency exceeds the
    /// time of the transfer, so requests must overlap however few the bytes.
    pub inline: bool,
}

impl Sources {
    /// Examines the sources of a load of `total` bytes. None if there are no sources.
    pub fn examine(
        request: &ReadRequest<'_>,
        total: u64,
        memory: MemoryLimit,
    ) -> Result<Option<Self>> {
        let Some(capabilities) = Capabilities::combined(request.files) else { return Ok(None) };
        let local = request.files.iter().all(|file| file.facts().is_local);
        let hashed = request.codec.decrypts() || request.options.verify != Verify::Nothing;
        let inline = total < if hashed { INLINE_HASHED } else { INLINE_LEN };
        let inline = inline && !capabilities.has_long_requests();
        let residency = local.then(|| match inline {
            // One reader of few bytes is as fast wherever they are.
            true => PageCacheResidency::All,
            false => page_cache::sample_residency(request.files, &request.plan.extents),
        });
        let shared = request.options.shares_cache;
        let direct = residency == Some(PageCacheResidency::Little)
            && total >= DIRECT_FROM
            && page_cache::may_read_directly(request.files, memory, shared)?;
        let more = if direct { page_cache::READER_MEMORY } else { 0 };
        let capabilities =
            Capabilities { reader_memory: capabilities.reader_memory + more, ..capabilities };
        Ok(Some(Sources { capabilities, residency, direct, inline }))
    }

    /// True if all are local files.
    pub fn are_local(&self) -> bool {
        self.residency.is_some()
    }
}
