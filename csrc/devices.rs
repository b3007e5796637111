//! The devices of one call, and the tensors that go to them.

use std::sync::Arc;

use tensorizer::cancel::Cancel;
use tensorizer::codec::KeptHeader;
use tensorizer::device::{self, Consumer, Device, DeviceBlocks, DeviceIndex, Streams};
use tensorizer::environment::GDS;
use tensorizer::error::{Error, Result};
use tensorizer::mem::pinned::Pool;
use tensorizer::stats::Counters;
use tensorizer::{Destination, DeviceLoad, LoadOptions, OneDevice};

use crate::torch::{self, thrown};

/// A subset of the tensors of a call.
pub struct Part {
    /// Their places in the selection.
    pub at: Vec<usize>,
    /// Their numbers in the file.
    pub numbers: Vec<usize>,
}

impl Part {
    /// Returns the tensors of a selection for which a condition holds. `of_each` has one value for each.
    pub fn of<T>(selection: &[usize], of_each: &[T], holds: impl Fn(&T) -> bool) -> Self {
        let chosen = selection.iter().zip(of_each).enumerate().filter(|(_, (_, one))| holds(one));
        let (at, numbers) = chosen.map(|(at, (&number, _))| (at, number)).unzip();
        Part { at, numbers }
    }
}

/// The devices of a call that the core can reach, in the order in which they were asked for.
#[derive(Default)]
pub struct Devices {
    /// The devices that were found.
    pub found: Vec<Found>,
    /// The place in `found` of each device that was asked for; None for host memory.
    known: Vec<(DeviceIndex, Option<usize>)>,
}

/// A device, and the stream on which its memory is used.
pub struct Found {
    /// Its number.
    pub index: DeviceIndex,
    /// The device.
    pub device: Arc<dyn Device>,
    /// The stream.
    pub consumer: Consumer,
}

impl Devices {
    /// Returns the place of a device in `found`; None for host memory. `unreached` decides what to
    /// do if the device cannot be reached.
    pub fn place(
        &mut self,
        index: DeviceIndex,
        unreached: impl FnOnce(Error) -> Result<Option<Arc<dyn Device>>>,
    ) -> Result<Option<usize>> {
        if let Some((_, place)) = self.known.iter().find(|(known, _)| *known == index) {
            return Ok(*place);
        }
        let place = match device::find(index).or_else(unreached)? {
            None => None,
            Some(device) => {
                let consumer = Consumer(torch::current_stream(index).map_err(thrown)?);
                // Fails here, before memory is taken, if the stream is being captured into a graph.
                drop(Arc::clone(&device).stream(consumer)?);
                self.found.push(Found { index, device, consumer });
                Some(self.found.len() - 1)
            }
        };
        self.known.push((index, place));
        Ok(place)
    }

    /// Returns the names of the devices.
    pub fn names(&self) -> Vec<String> {
        self.found.iter().map(|found| found.device.name().to_owned()).collect()
    }

    /// Runs a planned load. Copies may be under way until the streams are handed over or dropped.
    pub fn run(
        &self,
        planned: &DeviceLoad<'_>,
        memory: &DeviceBlocks,
        (options, counters, cancel): (&LoadOptions, &Counters, &dyn Cancel),
        allocate: &mut dyn FnMut() -> Result<bool>,
    ) -> Result<(Vec<KeptHeader>, Vec<Streams>)> {
        let devices = self.found.iter().map(|Found { device, consumer, .. }| {
            Ok(OneDevice { device, consumer: *consumer, pool: Pool::of(device)? })
        });
        let devices = devices.collect::<Result<Vec<_>>>()?;
        let to = Destination { devices: &devices, memory, direct_storage: GDS.value()? != 0 };
        planned.run(&to, options, counters, cancel, allocate)
    }
}

/// Puts a value into a slot of a list.
pub fn put<T>(slots: &mut [Option<T>], at: usize, value: T) {
    if let Some(slot) = slots.get_mut(at) {
        *slot = Some(value);
    }
}
