//! What a device can do, whatever it is.
//!
//! The unsafe methods are called by [`crate::mem::pinned`] only.
#![allow(unsafe_code)]

use std::any::Any;
use std::fs::File;
use std::sync::Arc;

use crate::error::Result;

/// A device as torch numbers it: those of CUDA from 0 on.
pub type Index = i16;
/// The CPU.
pub const CPU: Index = -1;

/// A device.
pub trait Device: Send + Sync {
    /// What torch calls it, such as `cuda:0`.
    fn name(&self) -> &str;

    /// The NUMA node of the host that it is attached to, if that is known.
    fn node(&self) -> Option<usize> {
        None
    }

    /// Makes this thread ready for calls of the device, which are cheaper until the result is
    /// dropped. Nothing foreign, such as what was to be asked about cancellation, runs meanwhile.
    fn enter(&self) -> Result<Scope> {
        Ok(Box::new(()))
    }

    /// Makes the device copy from and to some host memory at full speed. False if it cannot: then
    /// copies are slower, and right all the same.
    ///
    /// # Safety
    /// The memory stays mapped until [`Device::unpin`] is called for it.
    unsafe fn pin(&self, memory: *mut u8, len: usize) -> bool;

    /// Undoes [`Device::pin`]. No copy from or to the memory is under way.
    ///
    /// # Safety
    /// The memory was pinned.
    unsafe fn unpin(&self, memory: *mut u8);

    /// A stream of our own, on which nothing begins before what was put on the consumer's.
    fn stream(self: Arc<Self>, consumer: Consumer) -> Result<Arc<dyn Stream>>;

    /// Refuses a consumer's stream with which nothing can be ordered now.
    fn check_consumer(&self, _consumer: Consumer) -> Result<()> {
        Ok(())
    }

    /// An event at the end of what was put on the consumer's stream until now.
    fn mark(self: Arc<Self>, consumer: Consumer) -> Result<Arc<dyn Event>>;

    /// A file that the device can read by itself; None if it cannot.
    fn file(self: Arc<Self>, _file: &File) -> Option<Box<dyn DeviceFile>> {
        None
    }
}

/// Until this is dropped a thread is ready for calls of a device.
pub type Scope = Box<dyn Any>;

/// A file that a device reads by itself, in no order with its streams.
pub trait DeviceFile: Send + Sync {
    /// Reads bytes from a position of the file into the device's memory; 0 at its end.
    ///
    /// # Safety
    /// The range of the device's memory exists, and nobody else uses it during the call.
    unsafe fn read(&self, to: usize, len: usize, offset: u64) -> std::io::Result<usize>;
}

/// The stream of whoever uses the device's memory before and after us, as the driver knows it.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Consumer(pub usize);

/// Copies that run one after another.
pub trait Stream: Send + Sync {
    /// As the driver knows it.
    fn handle(&self) -> usize;

    /// Begins a copy to the device.
    ///
    /// # Safety
    /// Both ranges exist, and nobody changes the host's or uses the device's, until an event that
    /// is recorded later has passed.
    unsafe fn upload(&self, to: usize, from: *const u8, len: usize) -> Result<()>;

    /// Begins several copies to the device, which may run in any order. By default one by one.
    ///
    /// # Safety
    /// As for [`Stream::upload`], for each of them.
    unsafe fn upload_batch(&self, copies: &[Upload]) -> Result<()> {
        copies.iter().try_for_each(|copy| {
            // SAFETY: the caller's promise.
            unsafe { self.upload(copy.to, copy.from, copy.len) }
        })
    }

    /// Begins a copy from the device.
    ///
    /// # Safety
    /// Both ranges exist, and nobody uses the host's or changes the device's, until an event that
    /// is recorded later has passed.
    unsafe fn download(&self, to: *mut u8, from: usize, len: usize) -> Result<()>;

    /// Marks the end of what was begun so far.
    fn record(&self) -> Result<Arc<dyn Event>>;

    /// Has everything that is put on the consumer's stream from now on wait for this one.
    fn hand_over(&self) -> Result<()>;

    /// Waits for everything that was begun.
    fn finish(&self) -> Result<()>;
}

/// One copy from host memory to a device.
#[derive(Debug, Clone, Copy)]
pub struct Upload {
    /// Address on the device.
    pub to: usize,
    /// Address in host memory.
    pub from: *const u8,
    /// Bytes.
    pub len: usize,
}

/// A mark in a stream.
pub trait Event: Send + Sync {
    /// True if everything before it has ended.
    fn passed(&self) -> Result<bool>;

    /// Has everything that is put on a stream of the device from now on wait for this event. `stream`:
    /// a stream as the driver knows it, see [`Stream::handle`] and [`Consumer`].
    fn hold_back(&self, stream: usize) -> Result<()>;
}
