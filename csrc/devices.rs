//! The devices of one call, and the tensors that go to them.

use std::sync::Arc;

use tensorizer::TensorFile;
use tensorizer::cancel::Cancel;
use tensorizer::codec::CompactHeader;
use tensorizer::device::{self, Consumer, Device, DeviceBlocks, DeviceIndex, Streams};
use tensorizer::environment::GDS;
use tensorizer::error::{Error, Result};
use tensorizer::mem::pinned::Pool;
use tensorizer::stats::Counters;
use tensorizer::{DestinationDevice, DeviceLoad, DeviceMemoryBlocks, LoadOptions};

use crate::torch::{self, thrown};

/// Tensors of a call that are loaded together: all in host memory, or all on devices.
pub struct TensorSubset {
    /// True if they are on devices.
    pub on_devices: bool,
    /// Their positions in the selection.
    pub positions: Vec<usize>,
    /// Their numbers in the file.
    pub numbers: Vec<usize>,
}

impl TensorSubset {
    /// Divides a selection, with the device of each tensor, or None for host memory. The tensors on
    /// devices are one subset, and the others a second. A file that can only be read front to back
    /// has a subset for each run of tensors, in its order.
    pub fn divide(
        file: &TensorFile,
        selection: &[usize],
        device_of: &[Option<usize>],
    ) -> Vec<Self> {
        let mut tensors: Vec<(usize, usize, bool)> = selection
            .iter()
            .zip(device_of)
            .enumerate()
            .map(|(at, (&number, device))| (at, number, device.is_some()))
            .collect();
        if file.is_seekable() {
            tensors.sort_by_key(|(_, _, on_device)| !on_device);
        } else {
            tensors.sort_by_cached_key(|(_, number, _)| {
                file.entry(*number).ok().map(|entry| (entry.file, entry.header_offset))
            });
        }
        let runs = tensors.chunk_by(|(.., a), (.., b)| a == b);
        let subsets = runs.map(|run| TensorSubset {
            on_devices: run.first().is_some_and(|(_, _, on_device)| *on_device),
            positions: run.iter().map(|(at, ..)| *at).collect(),
            numbers: run.iter().map(|(_, number, _)| *number).collect(),
        });
        subsets.collect()
    }
}

/// The devices of a call that the core can reach, in the order of the first request.
#[derive(Default)]
pub struct CallDevices {
    /// The devices that were found.
    pub devices: Vec<CallDevice>,
    /// The position in `devices` of each requested device; None for host memory.
    found: Vec<(DeviceIndex, Option<usize>)>,
}

/// A device, and the stream on which its memory is used.
pub struct CallDevice {
    /// Its number.
    pub index: DeviceIndex,
    /// The device.
    pub device: Arc<dyn Device>,
    /// The stream.
    pub consumer: Consumer,
}

impl CallDevices {
    /// Returns the position of a device in `devices`; None for host memory. `unreached` decides
    /// what to do if the device cannot be reached.
    pub fn position_of(
        &mut self,
        index: DeviceIndex,
        unreached: impl FnOnce(Error) -> Result<Option<Arc<dyn Device>>>,
    ) -> Result<Option<usize>> {
        if let Some((_, position)) = self.found.iter().find(|(found, _)| *found == index) {
            return Ok(*position);
        }
        let position = match device::find(index).or_else(unreached)? {
            None => None,
            Some(device) => {
                let consumer = Consumer(torch::current_stream(index).map_err(thrown)?);
                // Fails here, before memory is taken, if the stream is being captured into a graph.
                drop(Arc::clone(&device).stream(consumer)?);
                self.devices.push(CallDevice { index, device, consumer });
                Some(self.devices.len() - 1)
            }
        };
        self.found.push((index, position));
        Ok(position)
    }

    /// Returns the names of the devices.
    pub fn names(&self) -> Vec<String> {
        self.devices.iter().map(|device| device.device.name().to_owned()).collect()
    }

    /// Runs a planned load. Copies may be under way until the streams are handed over or dropped.
    pub fn run(
        &self,
        planned: &DeviceLoad<'_>,
        memory: &DeviceBlocks,
        (options, counters, cancel): (&LoadOptions, &Counters, &dyn Cancel),
        allocate: &mut dyn FnMut() -> Result<bool>,
    ) -> Result<(Vec<CompactHeader>, Vec<Streams>)> {
        let devices = self.devices.iter().map(|CallDevice { device, consumer, .. }| {
            Ok(DestinationDevice { device, consumer: *consumer, pool: Pool::of(device)? })
        });
        let devices = devices.collect::<Result<Vec<_>>>()?;
        let to =
            DeviceMemoryBlocks { devices: &devices, memory, direct_storage: GDS.value()? != 0 };
        planned.run(&to, options, counters, cancel, allocate)
    }
}

/// Puts a value into a slot of a list.
pub fn set_slot<T>(slots: &mut [Option<T>], at: usize, value: T) {
    if let Some(slot) = slots.get_mut(at) {
        *slot = Some(value);
    }
}
