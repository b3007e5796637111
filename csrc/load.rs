//! Loads into new tensors, on any device.

use std::sync::Arc;

use cxx::UniquePtr;
use tensorizer::TensorFile;
use tensorizer::cancel::Cancel;
use tensorizer::codec::CompactHeader;
use tensorizer::device::{DeviceBlock, DeviceBlocks, DeviceIndex, Streams};
use tensorizer::error::{Error, Result};
use tensorizer::format::catalog::Entry;
use tensorizer::stats::Counters;
use tensorizer::{Allocate as _, DeviceLoad, LoadOptions, load_counted};

use crate::allocator::TorchAllocator;
use crate::devices::{CallDevice, CallDevices, TensorSubset, set_slot};
use crate::tensor::{LoadedTensors, TensorLocation};
use crate::torch;

/// The destination of new tensors.
#[derive(Clone, Copy)]
pub struct LoadDestination<'d> {
    /// The device of each tensor, or of all of them.
    pub devices: &'d [DeviceIndex],
    /// True if each tensor on a device has memory of its own, instead of a part of a block.
    pub separate_memory: bool,
}

impl LoadDestination<'_> {
    /// Finds the devices, and for each tensor the position of its device in them; None for host
    /// memory.
    fn find(
        &self,
        file: &TensorFile,
        selection: &[usize],
        counters: &Counters,
    ) -> Result<(CallDevices, Vec<Option<usize>>)> {
        if self.devices.len() != 1 && self.devices.len() != selection.len() {
            return Err(Error::Bug("a list of other devices than tensors".to_owned()));
        }
        let mut devices = CallDevices::default();
        let mut found = Vec::with_capacity(selection.len());
        for (&number, &device) in selection.iter().zip(self.devices.iter().cycle()) {
            check_type(file.entry(number)?)?;
            found.push(devices.position_of(device, |error| {
                counters.fallback(&format!(
                    "copied through host memory by torch, because tensorizer cannot copy to the \
                     device itself: {error}"
                ));
                Ok(None)
            })?);
        }
        Ok((devices, found))
    }
}

/// Loads tensors, given by number, into new memory. If the core cannot reach a device, its tensors
/// come to host memory, and torch has to copy them. Counts the work in `counters`.
pub fn load_tensors(
    file: &TensorFile,
    selection: &[usize],
    to: LoadDestination<'_>,
    options: &LoadOptions,
    counters: &Counters,
    cancel: &dyn Cancel,
) -> Result<(LoadedTensors, Vec<CompactHeader>)> {
    let (devices, found) = to.find(file, selection, counters)?;
    let mut locations: Vec<Option<(TensorLocation, CompactHeader)>> =
        selection.iter().map(|_| None).collect();
    // Local values are dropped in reverse order: copies end before the memory that they use is
    // freed.
    let mut blocks = Vec::new();
    let mut streams = Vec::new();
    let subsets = TensorSubset::divide(file, selection, &found);
    for part in &subsets {
        if part.on_devices {
            let of = part.positions.iter().filter_map(|&at| found.get(at).copied().flatten());
            let to = (&devices, of.collect(), to.separate_memory, blocks.len());
            let loaded = load_on_devices(file, part, to, (options, counters, cancel))?;
            streams.extend(loaded.streams);
            blocks.extend(loaded.blocks);
            for (at, tensor) in loaded.tensors {
                set_slot(&mut locations, at, tensor);
            }
        } else {
            let loaded = load_counted(file, &part.numbers, options, counters, cancel)?;
            for (&at, tensor) in part.positions.iter().zip(loaded) {
                set_slot(&mut locations, at, (TensorLocation::Host(tensor.memory), tensor.header));
            }
        }
    }
    // The hash of the whole file is compared without tensors, too.
    if selection.is_empty() {
        load_counted(file, selection, options, counters, cancel)?;
    }
    Streams::hand_over_all(streams).map_err(|error| error.with_file("loading", file.uri()))?;
    let mut names = devices.names();
    if found.contains(&None) || names.is_empty() {
        names.push("cpu".to_owned());
    }
    file.report_fallbacks(counters);
    counters.publish("load", file.uri(), &names.join(", "), selection.len());
    let missing = || Error::Bug("a tensor that was not loaded".to_owned());
    let loaded = locations.into_iter().map(|location| location.ok_or_else(missing));
    let (locations, headers) = loaded.collect::<Result<Vec<_>>>()?.into_iter().unzip();
    Ok((LoadedTensors::new(file, selection, locations, blocks), headers))
}

/// Tensors on devices. Copies may be under way until the streams are handed over or dropped.
struct OnDevices<T> {
    tensors: Vec<T>,
    // Dropped before the blocks: copies end before the memory that they use is freed.
    streams: Vec<Streams>,
    /// The blocks of each device.
    blocks: Vec<UniquePtr<torch::TorchBlocks>>,
}

/// Loads tensors to devices into new blocks, given the device of each. Returns each tensor with its
/// position in the selection. `first`: the position of the first device in the list of blocks.
fn load_on_devices(
    file: &TensorFile,
    part: &TensorSubset,
    (devices, of, separate_memory, first): (&CallDevices, Vec<usize>, bool, usize),
    (options, counters, cancel): (&LoadOptions, &Counters, &dyn Cancel),
) -> Result<OnDevices<(usize, (TensorLocation, CompactHeader))>> {
    let planned = DeviceLoad::new(file, &part.numbers, &of, separate_memory)?;
    // The number of the first block of each device.
    let first_of = |device| planned.block_devices().partition_point(|of| *of < device);
    let starts: Vec<usize> = (0..devices.devices.len()).map(first_of).collect();
    let OnDevices { tensors: headers, blocks, streams } =
        into_new_blocks(file, &planned, &starts, devices, (options, counters, cancel))?;
    let mut loaded = Vec::with_capacity(part.positions.len());
    let tensors = part.positions.iter().zip(&part.numbers).zip(of.iter().zip(planned.locations()));
    for (((&at, &number), (&device, block_location)), header) in tensors.zip(headers) {
        let block = block_location.block - starts.get(device).copied().unwrap_or(0);
        let location = match file.entry(number)?.is_meta() {
            true => TensorLocation::Zeros(first + device),
            false => TensorLocation::Block(first + device, block, block_location.offset),
        };
        loaded.push((at, (location, header)));
    }
    Ok(OnDevices { tensors: loaded, streams, blocks })
}

/// Runs a planned load into new blocks. `starts` has the number of each device's first block.
fn into_new_blocks(
    file: &TensorFile,
    planned: &DeviceLoad<'_>,
    starts: &[usize],
    devices: &CallDevices,
    (options, counters, cancel): (&LoadOptions, &Counters, &dyn Cancel),
) -> Result<OnDevices<CompactHeader>> {
    let lens = planned.block_lens();
    let blocks = DeviceBlocks::new(lens.len());
    let mut allocations: Vec<Allocation<'_>> = Vec::new();
    for (at, found) in devices.devices.iter().enumerate() {
        let start = starts.get(at).copied().unwrap_or(0);
        let end = starts.get(at + 1).copied().unwrap_or(lens.len());
        allocations.push(Allocation::new(found, start, lens.get(start..end).unwrap_or(&[])));
    }
    // The devices take turns, so that reads for one device do not wait until all memory of another
    // is allocated.
    let mut turn = 0;
    let mut allocate = || {
        for _ in 0..allocations.len() {
            let at = turn % allocations.len().max(1);
            turn += 1;
            if let Some(one) = allocations.get_mut(at).filter(|one| !one.is_done()) {
                one.step(&blocks)?;
                break;
            }
        }
        Ok(allocations.iter().any(|one| !one.is_done()))
    };
    let run = devices.run(planned, &blocks, (options, counters, cancel), &mut allocate);
    let (tensors, streams) = run.map_err(|error| error.with_file("loading", file.uri()))?;
    let blocks = allocations.into_iter().map(|one| one.allocator.into_blocks()).collect();
    Ok(OnDevices { tensors, streams, blocks })
}

/// The most bytes that the driver is asked for at once: fewer calls than for each tensor, which hold
/// a lock that copies need, too.
const RESERVED: u64 = 1 << 30;

fn sum(lens: &[u64]) -> u64 {
    lens.iter().fold(0, |sum, len| sum.saturating_add(*len))
}

/// The allocation of the blocks of one device.
struct Allocation<'d> {
    device: &'d CallDevice,
    /// The number of the first block.
    start: usize,
    /// Bytes of each block.
    lens: &'d [u64],
    /// The number of blocks that are allocated already.
    done: usize,
    /// Bytes that the driver has given for the next blocks.
    reserved: u64,
    allocator: TorchAllocator,
}

impl<'d> Allocation<'d> {
    fn new(device: &'d CallDevice, start: usize, lens: &'d [u64]) -> Self {
        let allocator = TorchAllocator::new(device.index);
        Allocation { device, start, lens, done: 0, reserved: 0, allocator }
    }

    fn is_done(&self) -> bool {
        self.done >= self.lens.len()
    }

    /// Allocates the next blocks.
    fn step(&mut self, blocks: &DeviceBlocks) -> Result<()> {
        let end = self.done + blocks_at_once(self.lens.get(self.done..).unwrap_or(&[]));
        let lens = self.lens.get(self.done..end).unwrap_or(&[]);
        let (now, rest) = (sum(lens), sum(self.lens.get(self.done..).unwrap_or(&[])));
        if self.reserved < now && rest > now {
            self.reserved = self.allocator.reserve(now, rest.min(RESERVED));
        }
        self.reserved = self.reserved.saturating_sub(now);
        let memory = self.allocator.allocate(self.done, lens)?;
        // Work that was queued on the stream before may still use the memory.
        let after = Some(Arc::clone(&self.device.device).record_event(self.device.consumer)?);
        for (at, memory) in (self.start + self.done..).zip(memory) {
            blocks.insert(at, DeviceBlock { memory, after: after.clone() })?;
        }
        self.done = end;
        Ok(())
    }
}

/// Refuses tensors of dtypes that torch does not have.
pub(crate) fn check_type(entry: &Entry) -> Result<()> {
    if entry.dtype.is_in_torch() {
        return Ok(());
    }
    let dtype_name = entry.dtype.safetensors().map_or(entry.dtype.name(), |(name, ..)| name);
    Err(Error::Unsupported(format!("tensor `{}`: torch has no dtype for {dtype_name}", entry.name)))
}

/// Returns how many of the first blocks to allocate together. Not all of them, so that the first
/// reads do not wait for the last block.
fn blocks_at_once(lens: &[u64]) -> usize {
    const LEN: u64 = 256 << 20;
    const MOST: usize = 1024;
    let mut bytes = 0u64;
    let fits = |len: &&u64| {
        bytes = bytes.saturating_add(**len);
        bytes <= LEN
    };
    lens.iter().take(MOST).take_while(fits).count().max(1).min(lens.len())
}
