//! The interface of a device, independent of its kind.
//!
//! The unsafe methods are called by [`crate::mem::pinned`] only.
#![allow(unsafe_code)]

use std::any::Any;
use std::fs::File;
use std::sync::Arc;

use crate::error::Result;

/// A device as torch numbers it: those of CUDA from 0 on.
pub type DeviceIndex = i16;
/// The CPU.
pub const CPU: DeviceIndex = -1;

/// A device.
pub trait Device: Send + Sync {
    /// Returns torch's name of the device, such as `cuda:0`.
    fn name(&self) -> &str;

    /// Returns the NUMA node of the host that it is attached to, if that is known.
    fn numa_node(&self) -> Option<usize> {
        None
    }

    /// Prepares this thread for calls of the device, which are cheaper until the result is dropped.
    /// No foreign code, such as a cancellation check, may run meanwhile.
    fn enter(&self) -> Result<DeviceScope> {
        Ok(Box::new(()))
    }

    /// Pins host memory, so that the device copies from and to it at full speed. False if it
    /// cannot: then copies are slower, but still correct.
    ///
    /// # Safety
    /// The memory stays mapped until [`Device::unpin`] is called for it.
    unsafe fn pin(&self, memory: *mut u8, len: usize) -> bool;

    /// Undoes [`Device::pin`]. No copy from or to the memory may be under way.
    ///
    /// # Safety
    /// The memory was pinned.
    unsafe fn unpin(&self, memory: *mut u8);

    /// Lends a stream whose work begins only after the work that is on the consumer's stream now.
    fn stream(self: Arc<Self>, consumer: Consumer) -> Result<Arc<dyn Stream>>;

    /// Returns an error if nothing can be ordered with the consumer's stream now, as during a graph
    /// capture.
    fn check_consumer(&self, _consumer: Consumer) -> Result<()> {
        Ok(())
    }

    /// Records an event after all work that is on the consumer's stream now.
    fn record_event(self: Arc<Self>, consumer: Consumer) -> Result<Arc<dyn Event>>;

    /// Opens a file that the device can read itself; None if it cannot.
    fn file(self: Arc<Self>, _file: &File) -> Option<Box<dyn DeviceFile>> {
        None
    }
}

/// A scope in which a thread is ready for calls of a device; it ends when this is dropped.
pub type DeviceScope = Box<dyn Any>;

/// A file that a device reads itself, not ordered with its streams.
pub trait DeviceFile: Send + Sync {
    /// Reads bytes from a position of the file into the device's memory. Returns 0 at the end of
    /// the file.
    ///
    /// # Safety
    /// The range of the device's memory exists, and nothing else uses it during the call.
    unsafe fn read(&self, to: usize, len: usize, offset: u64) -> std::io::Result<usize>;
}

/// The driver's handle of the consumer's stream. The consumer is the code that uses the device's
/// memory before and after a load or save, as torch does.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Consumer(pub usize);

/// A queue of copies, which run one after another.
pub trait Stream: Send + Sync {
    /// Returns the driver's handle of the stream.
    fn handle(&self) -> usize;

    /// Begins copies to the device, which may run in any order.
    ///
    /// # Safety
    /// Until an event that is recorded later has passed, all ranges exist, nothing changes the
    /// host's, and nothing else uses the device's.
    unsafe fn upload_batch(&self, copies: &[HostToDeviceCopy]) -> Result<()>;

    /// Begins a copy from the device.
    ///
    /// # Safety
    /// Until an event that is recorded later has passed, both ranges exist, nothing else uses the
    /// host's, and nothing changes the device's.
    unsafe fn download(&self, to: *mut u8, from: usize, len: usize) -> Result<()>;

    /// Records an event after the copies begun so far.
    fn record(&self) -> Result<Arc<dyn Event>>;

    /// Makes future work on the consumer's stream wait for the work on this one.
    fn hand_over(&self) -> Result<()>;

    /// Waits for everything that was begun.
    fn finish(&self) -> Result<()>;
}

/// One copy from host memory to a device.
#[derive(Debug, Clone, Copy)]
pub struct HostToDeviceCopy {
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

    /// Makes future work on a stream of the device wait for this event. `stream`: the driver's
    /// handle, see [`Stream::handle`] and [`Consumer`].
    fn delay_stream(&self, stream: usize) -> Result<()>;
}
