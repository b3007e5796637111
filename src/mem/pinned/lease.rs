//! Leases of staging buffers to one reader or writer. `unsafe` is allowed in this file: devices
//! copy to and from this memory.
#![allow(unsafe_code)]

use std::sync::Arc;

use super::MIN_SLEEP;
use super::buffers::{InFlightBuffers, PoolBuffers, StagingBuffer};
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
        // SAFETY: as for `upload_all`.
        unsafe { stream.download(to, from, len) }
    }

    /// Marks the end of this lease's copies, so that [`StagingLease::wait`] waits for no later
    /// copies of the stream.
    pub fn record_end(&mut self) -> Result<()> {
        if let Some(stream) = &self.stream {
            self.event = Some(stream.record()?);
        }
        Ok(())
    }

    /// Waits for the copies that were begun.
    pub fn wait(&mut self, cancel: &dyn Cancel) -> Result<()> {
        let Some(stream) = &self.stream else { return Ok(()) };
        let event = self.event.take().map_or_else(|| stream.record(), Ok)?;
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

/// A lease whose buffers are filled, and the copies from them to a device.
pub struct Upload<'d> {
    /// The lease.
    pub lease: StagingLease<'d>,
    /// The bytes of each copy (buffer, position, length), and the memory and offset that they go
    /// to.
    pub copies: Vec<((usize, usize, usize), &'d DeviceMemory, usize)>,
    /// The ends of earlier uses of that memory, which the copies wait for.
    pub after: Vec<&'d Arc<dyn Event>>,
}

/// Begins the copies of several leases, which may run in any order. From now on, all copies of
/// these leases must be on this stream. Returns the event at their end, one for all; None if there
/// are no copies, or if the event cannot be recorded, which waits for them.
pub fn upload_all(
    uploads: &mut [Upload<'_>],
    stream: &Arc<dyn Stream>,
) -> Result<Option<Arc<dyn Event>>> {
    let mut all = Vec::new();
    for Upload { lease, copies, .. } in &mut *uploads {
        for &((buffer, at, len), to, offset) in &*copies {
            let from = lease.range(buffer, at, len)?.cast_const();
            let to = to.at(offset, len).ok_or_else(|| out_of_range(to, offset, len))?;
            all.push(HostToDeviceCopy { to, from, len });
        }
        if !copies.is_empty() {
            lease.begin(stream)?;
        }
    }
    if all.is_empty() {
        return Ok(None);
    }
    // SAFETY: the host's ranges are in buffers, which are not touched and not given away before an
    // event has passed (`buffers`, `drop`); the device's are what `DeviceMemory` promises.
    unsafe { stream.upload_batch(&all)? };
    let Ok(event) = stream.record() else {
        stream.finish()?;
        return Ok(None);
    };
    for Upload { lease, .. } in uploads.iter_mut().filter(|upload| !upload.copies.is_empty()) {
        lease.event = Some(Arc::clone(&event));
    }
    Ok(Some(event))
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
            (Some(stream), event) => event
                .map_or_else(|| stream.record(), Ok)
                .map(|event| Some((event, stream.handle())))
                .or_else(|_| stream.finish().map(|()| None)),
        };
        let mut state = self.pool.state();
        match ended {
            Ok(None) => state.free.extend(buffers),
            Ok(Some((event, stream))) => {
                let _reservation = self.reservation.take();
                state.in_flight.push_back(InFlightBuffers { event, stream, buffers, _reservation })
            }
            Err(_) => state.leak(buffers),
        }
        // Before the wake-up, as the thread that is woken checks the share of its call.
        self.reservation = None;
        state.wake_next();
    }
}
