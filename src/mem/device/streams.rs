//! The streams of one call, and bytes that are on a device.

use std::sync::Arc;
use std::sync::atomic::{AtomicUsize, Ordering};

use super::{Consumer, Device, DeviceMemory, Stream};
use crate::environment::STREAMS;
use crate::error::{Error, Result};

/// The streams of a call, which its threads use in turn. While one stream goes from copy to copy,
/// another keeps the bus busy.
///
/// Unless they were handed over, their drop waits for them: memory that copies use must not be
/// freed.
pub struct Streams {
    device: Arc<dyn Device>,
    /// At least one stream.
    streams: Vec<Arc<dyn Stream>>,
    next_index: AtomicUsize,
    handed_over: bool,
}

impl Streams {
    /// Opens streams whose work begins only after the work that is on the consumer's stream now.
    pub fn open(device: &Arc<dyn Device>, consumer: Consumer) -> Result<Self> {
        let streams = (0..STREAMS.value()?).map(|_| Arc::clone(device).stream(consumer));
        Ok(Streams {
            device: Arc::clone(device),
            streams: streams.collect::<Result<_>>()?,
            next_index: AtomicUsize::new(0),
            handed_over: false,
        })
    }

    /// Returns the device.
    pub fn device(&self) -> &Arc<dyn Device> {
        &self.device
    }

    /// Returns the stream whose turn it is.
    pub fn next(&self) -> Result<&Arc<dyn Stream>> {
        let next_index =
            self.next_index.fetch_add(1, Ordering::Relaxed) % self.streams.len().max(1);
        self.streams.get(next_index).ok_or_else(|| Error::Bug("no stream".to_owned()))
    }

    /// Waits for the work that the consumer's stream had when these streams were opened, and for
    /// everything begun since.
    pub fn finish(&self) -> Result<()> {
        self.streams.iter().try_for_each(|stream| stream.finish())
    }

    /// Makes the consumers' streams wait for everything that was begun. If one fails, none is
    /// handed over, and their drop waits for everything instead.
    pub fn hand_over_all(mut all: Vec<Self>) -> Result<()> {
        for streams in &all {
            streams.streams.iter().try_for_each(|stream| stream.hand_over())?;
        }
        all.iter_mut().for_each(|streams| streams.handed_over = true);
        Ok(())
    }
}

impl Drop for Streams {
    fn drop(&mut self) {
        if !self.handed_over {
            for stream in &self.streams {
                // A stream that fails here has failed before, and that error is the one to report.
                let _ = stream.finish();
            }
        }
    }
}

/// Bytes on a device, in row-major order.
pub struct DeviceBytes {
    /// The device.
    pub device: Arc<dyn Device>,
    /// The consumer that has written them.
    pub consumer: Consumer,
    /// Their memory on the device.
    pub memory: DeviceMemory,
}

/// The streams of a call for bytes that may be on several devices.
#[derive(Default)]
pub struct StreamsByDevice(Vec<Streams>);

impl StreamsByDevice {
    /// Opens streams for all bytes that are to be read.
    pub fn open<'d>(all: impl Iterator<Item = &'d DeviceBytes>) -> Result<Self> {
        let mut found = StreamsByDevice::default();
        for one in all {
            if found.of(one).is_none() {
                found.0.push(Streams::open(&one.device, one.consumer)?);
            }
        }
        Ok(found)
    }

    fn of(&self, bytes: &DeviceBytes) -> Option<&Streams> {
        self.0.iter().find(|streams| streams.device.name() == bytes.device.name())
    }

    /// Returns the stream whose turn it is on the device of some bytes.
    pub fn next(&self, bytes: &DeviceBytes) -> Result<&Arc<dyn Stream>> {
        self.of(bytes).ok_or_else(|| Error::Bug("no stream".to_owned()))?.next()
    }

    /// Returns the names of the devices.
    pub fn names(&self) -> String {
        let names: Vec<&str> = self.0.iter().map(|streams| streams.device.name()).collect();
        names.join(", ")
    }
}
