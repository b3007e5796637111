//! The state between the caller of an iterator and the thread of its load.

use std::sync::Arc;

use super::window::Window;
use crate::api::file::TensorFile;
use crate::engine::load_options::LoadOptions;
use crate::mem::device::{Consumer, Device, DeviceBlocks};
use crate::mem::pinned::Pool;
use crate::stats::Counters;

/// A device to which tensors go.
pub struct IteratorDevice {
    /// The device.
    pub device: Arc<dyn Device>,
    /// The stream that is current when the iterator is made.
    pub consumer: Consumer,
    /// Its staging buffers.
    pub pool: &'static Pool,
    /// True if the device is to read local files itself (GPUDirect Storage), if it can.
    pub direct_storage: bool,
}

/// State that the caller and the thread of the load share.
pub struct IteratorState {
    /// The file.
    pub file: TensorFile,
    /// Numbers of the tensors, in the order of their data in the file.
    pub numbers: Vec<usize>,
    /// The most bytes of dropped tensors that wait for the next ones.
    pub spare: u64,
    /// Load options.
    pub options: LoadOptions,
    /// True if tensors are handed out only when their copies to the device have ended.
    pub complete: bool,
    /// Tensors that wait for the caller.
    pub window: Window,
    /// The device that tensors go to, and their memory there; None for host memory.
    pub device: Option<(IteratorDevice, DeviceBlocks)>,
    /// Counters of the work done.
    pub counters: Counters,
}
