//! The devices of one call, and the tensors that go to them.

use std::sync::Arc;

use tensorizer::cancel::Cancel;
use tensorizer::codec::KeptHeader;
use tensorizer::device::{self, Blocks, Consumer, Device, Index, Streams};
use tensorizer::environment::GDS;
use tensorizer::error::{Error, Result};
use tensorizer::mem::pinned::Pool;
use tensorizer::stats::Counters;
use tensorizer::{Destination, DeviceLoad, LoadOptions, OneDevice};

use crate::torch::{self, thrown};

/// Some of the tensors that are loaded.
pub struct Part {
    /// Their places in the selection.
    pub at: Vec<usize>,
    /// Their numbers in the file.
    pub numbers: Vec<usize>,
}

impl Part {
    /// The tensors of a selection of which something holds.
    pub fn of<T>(selection: &[usize], of_each: &[T], holds: impl Fn(&T) -> bool) -> Self {
        let chosen = selection.iter().zip(of_each).enumerate().filter(|(_, (_, one))| holds(one));
        let (at, numbers) = chosen.map(|(at, (&number, _))| (at, number)).unzip();
        Part { at, numbers }
    }
}

/// Devices that can be reached from here, in the order in which they were asked for.
#[derive(Default)]
pub struct Devices {
    /// The devices that were found.
    pub found: Vec<Found>,
    /// For each number that was asked for, its place among those that were found.
    known: Vec<(Index, Option<usize>)>,
}

/// A device, and the stream on which its memory is used.
pub struct Found {
    /// Its number.
    pub index: Index,
    /// The device.
    pub device: Arc<dyn Device>,
    /// The stream.
    pub consumer: Consumer,
}

impl Devices {
    /// The place of a device; None for host memory. `unreached` says what to do without the device.
    pub fn place(
        &mut self,
        index: Index,
        unreached: impl FnOnce(Error) -> Result<Option<Arc<dyn Device>>>,
    ) -> Result<Option<usize>> {
        if let Some((_, place)) = self.known.iter().find(|(known, _)| *known == index) {
            return Ok(*place);
        }
        let place = match device::find(index).or_else(unreached)? {
            None => None,
            Some(device) => {
                let consumer = Consumer(torch::current_stream(index).map_err(thrown)?);
                // A graph that is being captured refuses here, before memory is taken.
                drop(Arc::clone(&device).stream(consumer)?);
                self.found.push(Found { index, device, consumer });
                Some(self.found.len() - 1)
            }
        };
        self.known.push((index, place));
        Ok(place)
    }

    /// Their names.
    pub fn names(&self) -> Vec<String> {
        self.found.iter().map(|found| found.device.name().to_owned()).collect()
    }

    /// Loads. Copies may be under way until the streams are handed over or dropped.
    pub fn run(
        &self,
        planned: &DeviceLoad<'_>,
        memory: &Blocks,
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

/// Fills a slot of a list.
pub fn put<T>(slots: &mut [Option<T>], at: usize, value: T) {
    if let Some(slot) = slots.get_mut(at) {
        *slot = Some(value);
    }
}
