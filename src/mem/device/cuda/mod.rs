//! CUDA devices, through the driver API. `unsafe` is allowed in this file: it calls the driver.
#![allow(unsafe_code)]

mod context;
mod driver;
mod gds;
mod library;
mod stream;

use std::collections::BTreeMap;
use std::sync::Arc;

use super::{Consumer, Device, DeviceScope, Event, Stream};
use crate::environment::NUMA;
use crate::error::Result;
use crate::mem::numa;
use crate::sys::fork_safe_mutex::ForkSafeMutex;
use context::Context;
use stream::OwnStreams;

/// A CUDA device. Lives as long as the process.
pub struct CudaDevice {
    context: Arc<Context>,
    streams: Arc<OwnStreams>,
    node: Option<usize>,
}

impl CudaDevice {
    /// Returns the device that torch calls `cuda:<index>`.
    pub fn get_or_open(index: u32) -> Result<Arc<dyn Device>> {
        static DEVICES: ForkSafeMutex<BTreeMap<u32, Arc<CudaDevice>>> =
            ForkSafeMutex::new(BTreeMap::new());
        let cached = DEVICES.lock().get(&index).map(Arc::clone);
        if let Some(device) = cached {
            device.context.check_process()?;
            return Ok(device);
        }
        // Opened without the lock, as it takes long. If two threads do so at once, one of the
        // results is used.
        let context = Arc::new(Context::open(index)?);
        let streams = Arc::new(OwnStreams::new(Arc::clone(&context)));
        let id = if NUMA.value()? == 0 { None } else { context.bus_id() };
        let node = id.and_then(|id| numa::node_of_pci(&id));
        let device = Arc::new(CudaDevice { context, streams, node });
        let device = Arc::clone(DEVICES.lock().entry(index).or_insert(device));
        Ok(device)
    }
}

impl Device for CudaDevice {
    fn name(&self) -> &str {
        &self.context.name
    }

    fn numa_node(&self) -> Option<usize> {
        self.node
    }

    fn enter(&self) -> Result<DeviceScope> {
        Ok(Box::new(self.context.enter()?))
    }

    unsafe fn pin(&self, memory: *mut u8, len: usize) -> bool {
        let Ok(_entered) = self.context.enter() else { return false };
        let register = self.context.driver.register_memory;
        // SAFETY: the caller's promise that the memory stays mapped.
        let code = unsafe { register(memory.cast(), len, driver::FOR_ALL_DEVICES) };
        code == driver::SUCCESS
    }

    unsafe fn unpin(&self, memory: *mut u8) {
        if let Ok(_entered) = self.context.enter() {
            // SAFETY: the caller's promise that it was pinned. A failure leaves it pinned until the
            // process ends, which costs memory only.
            let _ = unsafe { (self.context.driver.unregister_memory)(memory.cast()) };
        }
    }

    fn file(self: Arc<Self>, file: &std::fs::File) -> Option<Box<dyn super::DeviceFile>> {
        let file = gds::GdsFile::open(Arc::clone(&self.context), file)?;
        Some(Box::new(file))
    }

    fn stream(self: Arc<Self>, consumer: Consumer) -> Result<Arc<dyn Stream>> {
        self.streams.lend(consumer)
    }

    fn check_consumer(&self, consumer: Consumer) -> Result<()> {
        self.streams.check_consumer(consumer)
    }

    fn record_event(self: Arc<Self>, consumer: Consumer) -> Result<Arc<dyn Event>> {
        self.streams.record_consumer_event(consumer)
    }
}
