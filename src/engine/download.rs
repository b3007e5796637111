//! Downloads from devices to host memory, through staging buffers.

use std::ops::Range;
use std::sync::Arc;

use crate::cancel::Cancel;
use crate::codec::crypt::PIECE_LEN;
use crate::error::{Error, Result};
use crate::mem::device::{Device, DeviceBytes, Stream};
use crate::mem::pinned::{DownloadedBytes, Pool, Share, StagingLease};
use crate::stats::{Counters, Stage};
use crate::sys::to_usize;

/// Downloads for one call.
pub struct Downloader<'d> {
    /// The counters of the time that copies take.
    pub counters: &'d Counters,
    /// The check that cancels a download.
    pub cancel: &'d dyn Cancel,
    /// Called before a thread waits for a staging buffer. It must ensure that the buffers handed
    /// out earlier are returned even while this thread waits; otherwise the wait may deadlock.
    pub before_waiting: &'d dyn Fn() -> Result<()>,
    /// The call's limit on staging buffers; None if it has none.
    pub share: Option<&'d Arc<Share>>,
}

impl Downloader<'_> {
    /// Downloads a range of device memory one staging buffer at a time, front to back. Calls `each`
    /// with the position and the bytes of each; the next buffer is downloaded meanwhile, if one is
    /// free.
    pub fn each_chunk(
        &self,
        from: &DeviceBytes,
        range: Range<usize>,
        stream: &Arc<dyn Stream>,
        mut each: impl FnMut(u64, DownloadedBytes<'static>) -> Result<()>,
    ) -> Result<()> {
        let pool = Pool::of(&from.device)?;
        // Whole pieces of encryption, which a staging buffer has room for.
        let piece = to_usize(PIECE_LEN);
        let (end, step) = (range.end, pool.buffer_len() / piece * piece);
        let begin =
            |mut lease: StagingLease<'static>, at: usize| -> Result<StagingLease<'static>> {
                let now = step.min(end - at);
                self.counters
                    .time(Stage::Copy, || lease.download(stream, (0, 0, now), &from.memory, at))?;
                lease.record_end()?;
                Ok(lease)
            };
        let mut next: Option<StagingLease<'static>> = None;
        for at in range.step_by(step) {
            let lease = match next.take() {
                Some(lease) => lease,
                None => begin(self.lease(&from.device)?, at)?,
            };
            // Without waiting: a thread that holds one buffer and waits for a second one may
            // deadlock.
            if at + step < end
                && let Some(more) = pool.try_lease(self.share)
            {
                next = Some(begin(more, at + step)?);
            }
            let len = step.min(end - at);
            let filled =
                self.counters.time(Stage::Copy, || lease.into_downloaded(len, self.cancel))?;
            each(at as u64, filled)?;
        }
        Ok(())
    }

    /// Downloads tensors of one device that fit together into one staging buffer. Returns the bytes
    /// of the buffer, and the aligned range of each tensor in them.
    pub fn download_group(
        &self,
        all: &[&DeviceBytes],
        stream: &Arc<dyn Stream>,
    ) -> Result<(DownloadedBytes<'static>, Vec<Range<usize>>)> {
        let first = all.first().ok_or_else(|| Error::Bug("nothing to download".to_owned()))?;
        let mut lease = self.lease(&first.device)?;
        let mut ranges = Vec::with_capacity(all.len());
        let mut end = 0usize;
        let filled = self.counters.time(Stage::Copy, || {
            for from in all {
                let start = end.next_multiple_of(crate::mem::ALIGNMENT);
                let len = from.memory.size();
                if len > 0 {
                    lease.download(stream, (0, start, len), &from.memory, 0)?;
                }
                end = start + len;
                ranges.push(start..end);
            }
            lease.into_downloaded(end, self.cancel)
        })?;
        Ok((filled, ranges))
    }

    fn lease(&self, device: &Arc<dyn Device>) -> Result<StagingLease<'static>> {
        let pool = Pool::of(device)?;
        if let Some(lease) = pool.try_lease(self.share) {
            return Ok(lease);
        }
        (self.before_waiting)()?;
        self.counters.time(Stage::Memory, || pool.enqueue(self.share).lease(1, device, self.cancel))
    }
}
