//! Leases of staging buffers to one reader or writer. `unsafe` is allowed in this file: devices
//! copy to and from this memory.
#![allow(unsafe_code)]

use std::sync::Arc;

use super::buffers::{InFlightBuffers, PoolBuffers, StagingBuffer};
use super::return_estimator::MIN_SLEEP;
use super::share::ShareReservation;
use crate::cancel::Cancel;
use crate::error::{Error, Result};
use crate::mem::device::{DeviceMemory, Event, HostToDeviceCopy, Stream};
use crate::sys::sync::thread;

/// Staging buffers that one reader or writer has.
pub struct StagingLease<'p> {
    pool: &'p PoolBuffers,
    buffers: Vec<StagingBuffer>,
    /// The stream on which copies from or to these buffers are under way.
    stream: Option<Arc<dyn Stream>>,
    /// Passes when the copies have ended; None if it is not recorded.
    event: Option<Arc<dyn Event>>,
    /// True if a device writes to the buffers.
    filling: bool,
    /// Their part of the share of a call; None if it has no limit.
    reservation: Option<ShareReservation>,
}

impl<'p> StagingLease<'p> {
    pub(super) fn new(
        pool: &'p PoolBuffers,
        buffers: Vec<StagingBuffer>,
        reservation: Option<ShareReservation>,
    ) -> Self {
        StagingLease { pool, buffers, stream: None, event: None, filling: false, reservation }
    }

    /// Returns the bytes of each buffer; none while copies are under way.
    pub fn buffers(&mut self) -> Vec<&mut [u8]> {
        if self.stream.is_some() {
            return Vec::new();
        }
        let len = self.pool.len;
        let buffers = self.buffers.iter_mut().map(|buffer| {
            // SAFETY: the buffer's own initialised bytes, borrowed exclusively through it; no copy
            // is under way.
            unsafe { std::slice::from_raw_parts_mut(buffer.start.as_ptr(), len) }
        });
        buffers.collect()
    }

    /// Returns bytes of a buffer, also while copies from it are under way.
    pub fn bytes(&self, buffer: usize, at: usize, len: usize) -> Option<&[u8]> {
        let start = self.range(buffer, at, len).ok().filter(|_| !self.filling)?;
        // SAFETY: initialised bytes of the buffer (`range`). Nothing writes to them: `buffers`
        // borrows the lease exclusively, and no download is under way.
        Some(unsafe { std::slice::from_raw_parts(start, len) })
    }

    fn range(&self, buffer: usize, at: usize, len: usize) -> Result<*mut u8> {
        let inside = at.checked_add(len).is_some_and(|end| end <= self.pool.len);
        let buffer = self.buffers.get(buffer).filter(|_| inside);
        let buffer =
            buffer.ok_or_else(|| Error::Bug(format!("{len} bytes at {at} of a buffer")))?;
        // SAFETY: `at` lies in the buffer, as checked above.
        Ok(unsafe { buffer.start.as_ptr().add(at) })
    }

    fn begin(&mut self, stream: &Arc<dyn Stream>) -> Result<()> {
        match &self.stream {
            Some(own) if !Arc::ptr_eq(own, stream) => Err(Error::Bug("two streams".to_owned())),
            _ => {
                self.stream = Some(Arc::clone(stream));
                self.event = None;
                Ok(())
            }
        }
    }

    /// Begins copies, which may run in any order: bytes of a buffer to an offset of a device's
    /// memory. From now on, all copies of this lease must be on this stream.
    pub fn upload_batch(
        &mut self,
        stream: &Arc<dyn Stream>,
        uploads: &[((usize, usize, usize), &DeviceMemory, usize)],
    ) -> Result<()> {
        if uploads.is_empty() {
            return Ok(());
        }
        let copies = uploads.iter().map(|&((buffer, at, len), to, offset)| {
            let from = self.range(buffer, at, len)?.cast_const();
            let to = to.at(offset, len).ok_or_else(|| out_of_range(to, offset, len))?;
            Ok(HostToDeviceCopy { to, from, len })
        });
        let copies = copies.collect::<Result<Vec<_>>>()?;
        self.begin(stream)?;
        // SAFETY: the host's ranges are in buffers, which are not touched and not given away before
        // an event has passed (`buffers`, `drop`); the device's are what `DeviceMemory` promises.
        unsafe { stream.upload_batch(&copies) }
    }

    /// Begins to copy from `offset` of a device's memory into a buffer.
    pub fn download(
        &mut self,
        stream: &Arc<dyn Stream>,
        (buffer, at, len): (usize, usize, usize),
        from: &DeviceMemory,
        offset: usize,
    ) -> Result<()> {
        let to = self.range(buffer, at, len)?;
        let from = from.at(offset, len).ok_or_else(|| out_of_range(from, offset, len))?;
        self.begin(stream)?;
        self.filling = true;
        // SAFETY: as for `upload_batch`.
        unsafe { stream.download(to, from, len) }
    }

    /// Marks the end of this lease's copies, so that [`StagingLease::wait`] waits for no later
    /// copies of the stream. Returns the event at their end; None if there are no copies.
    pub fn record_end(&mut self) -> Result<Option<Arc<dyn Event>>> {
        if let Some(stream) = &self.stream {
            self.event = Some(stream.record()?);
        }
        Ok(self.event.clone())
    }

    /// Waits for the copies that were begun.
    pub fn wait(&mut self, cancel: &dyn Cancel) -> Result<()> {
        let Some(stream) = &self.stream else { return Ok(()) };
        let event = match self.event.take() {
            Some(event) => event,
            None => stream.record()?,
        };
        while !event.passed()? {
            cancel.check()?;
            thread::park_timeout(MIN_SLEEP);
        }
        self.stream = None;
        self.filling = false;
        Ok(())
    }

    /// Waits for the copies that were begun, and returns the first `len` bytes of the first buffer,
    /// to be read.
    pub fn into_downloaded(
        mut self,
        len: usize,
        cancel: &dyn Cancel,
    ) -> Result<DownloadedBytes<'p>> {
        self.wait(cancel)?;
        self.range(0, 0, len)?;
        let (buffers, reservation) = (std::mem::take(&mut self.buffers), self.reservation.take());
        Ok(DownloadedBytes { pool: self.pool, buffers, len, reservation })
    }
}

/// Bytes that came from a device. Nothing writes to them as long as this value lives.
pub struct DownloadedBytes<'p> {
    pool: &'p PoolBuffers,
    /// At least one buffer. No copy is under way.
    buffers: Vec<StagingBuffer>,
    len: usize,
    reservation: Option<ShareReservation>,
}

impl AsRef<[u8]> for DownloadedBytes<'_> {
    fn as_ref(&self) -> &[u8] {
        let Some(buffer) = self.buffers.first() else { return &[] };
        // SAFETY: initialised bytes of the buffer's own, no more than it has
        // (`StagingLease::into_downloaded`); this value has the buffer, and offers no way to write
        // to them.
        unsafe { std::slice::from_raw_parts(buffer.start.as_ptr(), self.len) }
    }
}

impl Drop for DownloadedBytes<'_> {
    fn drop(&mut self) {
        let mut state = self.pool.state();
        state.free.append(&mut self.buffers);
        self.reservation = None;
        state.wake_next();
    }
}

fn out_of_range(memory: &DeviceMemory, offset: usize, len: usize) -> Error {
    Error::Bug(format!("{len} bytes at {offset} of {} on a device", memory.size()))
}

impl Drop for StagingLease<'_> {
    fn drop(&mut self) {
        let buffers = std::mem::take(&mut self.buffers);
        // The event is recorded before the lock is taken, as recording may take long.
        let ended = match (self.stream.take(), self.event.take()) {
            (None, _) => Ok(None),
            (Some(stream), Some(event)) => Ok(Some((event, stream.handle()))),
            (Some(stream), None) => stream
                .record()
                .map(|event| Some((event, stream.handle())))
                .or_else(|_| stream.finish().map(|()| None)),
        };
        let mut state = self.pool.state();
        match ended {
            Ok(None) => state.free.extend(buffers),
            Ok(Some((event, stream))) => {
                let reservation = self.reservation.take();
                state.in_flight.push_back(InFlightBuffers {
                    event,
                    stream,
                    buffers,
                    _reservation: reservation,
                })
            }
            Err(_) => state.leak(buffers),
        }
        // Before the wake-up, as the thread that is woken checks the share of its call.
        self.reservation = None;
        state.wake_next();
    }
}
