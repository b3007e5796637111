//! Loads to the memory of devices.

use std::sync::Arc;

use super::file::TensorFile;
use super::headers::try_key;
use super::reads::{OpenDirect, Reads, Run, To};
use super::selection::Selection;
use crate::cancel::Cancel;
use crate::codec::CompactHeader;
use crate::codec::hash::Verify;
use crate::engine::destination::device::{DeviceDestination, StagedDevice};
use crate::engine::destination::direct_storage::DirectStorage;
use crate::engine::load_options::LoadOptions;
use crate::engine::plan::{
    BlockLayout, BlockLocation, Extent, LargeTensors, MemoryLayout, ReadPlan,
};
use crate::error::Result;
use crate::fallible::out_of_memory;
use crate::io::as_refs;
use crate::mem::device::{Consumer, Device, DeviceBlocks, Streams};
use crate::mem::pinned::Pool;
use crate::stats::{Counters, PAGEABLE};

/// A device to which bytes go.
pub struct DestinationDevice<'d> {
    /// The device.
    pub device: &'d Arc<dyn Device>,
    /// The stream of the work that uses its memory before and after the load.
    pub consumer: Consumer,
    /// Its staging buffers.
    pub pool: &'d Pool,
}

/// The devices that a load's bytes go to, and their memory.
pub struct DeviceMemoryBlocks<'d> {
    /// The devices, at least one.
    pub devices: &'d [DestinationDevice<'d>],
    /// Their memory: the blocks of the plan.
    pub memory: &'d DeviceBlocks,
    /// True to let the device read local files itself (GPUDirect Storage), if it supports that and
    /// is the only device.
    pub direct_storage: bool,
}

/// The locations of a load's tensors in device memory.
#[derive(Default)]
pub struct DeviceLayout {
    /// The layout of each block; empty if none is an image.
    pub blocks: Vec<BlockLayout>,
    /// The location of each tensor, in the order of the file.
    pub locations: Vec<BlockLocation>,
    /// The device of each block, as an index into the devices; may be empty if there is one.
    pub device_of_block: Vec<usize>,
    /// The device of each tensor; may be empty if there is one.
    pub device_of_tensor: Vec<usize>,
}

/// A load to devices: the tensors, and their locations in blocks of device memory.
pub struct DeviceLoad<'f> {
    selection: Selection<'f>,
    layout: DeviceLayout,
    /// False for existing memory of the caller.
    is_new: bool,
}

impl<'f> DeviceLoad<'f> {
    /// Plans a load of tensors, given by number, into new blocks. `device_of` has the index of each
    /// tensor's device; if it is empty, all tensors go to the only device. With `separate_memory`,
    /// each tensor has a block of its own.
    pub fn new(
        file: &'f TensorFile,
        numbers: &[usize],
        device_of: &[usize],
        separate_memory: bool,
    ) -> Result<Self> {
        let selection = Selection::new(file, numbers)?;
        selection.check()?;
        let lens = selection.entries.iter().map(|entry| entry.loaded_len());
        let tensors: Vec<(Extent, u64)> = selection.extents().into_iter().zip(lens).collect();
        let too_large = || out_of_memory(u64::MAX, format!("the tensors of `{}`", file.uri()));
        let mut device_of = device_of.to_vec();
        device_of.resize(tensors.len(), 0);
        let mut layout = DeviceLayout::default();
        let devices = device_of.iter().max().map_or(0, |most| most + 1);
        layout.device_of_tensor = selection.to_file_order(device_of);
        layout.locations = vec![BlockLocation::default(); tensors.len()];
        for device in 0..devices {
            let own = layout.device_of_tensor.iter().enumerate();
            let own: Vec<usize> = own.filter(|(_, of)| **of == device).map(|(at, _)| at).collect();
            let own_tensors = own.iter().filter_map(|&at| tensors.get(at).copied());
            let planned = if separate_memory {
                MemoryLayout::one_block_each(own_tensors.map(|(_, len)| len))
            } else {
                MemoryLayout::new(&own_tensors.collect::<Vec<_>>(), LargeTensors::OwnBlocks)
            };
            let planned = planned.ok_or_else(too_large)?;
            let first = layout.blocks.len();
            for (&at, location) in own.iter().zip(&planned.locations) {
                if let Some(slot) = layout.locations.get_mut(at) {
                    *slot = BlockLocation { block: first + location.block, ..*location };
                }
            }
            layout.device_of_block.extend(planned.blocks.iter().map(|_| device));
            layout.blocks.extend(planned.blocks);
        }
        Ok(DeviceLoad { selection, layout, is_new: true })
    }

    /// Plans a load of tensors into existing memory: a block each, in the order of their numbers.
    /// `device_of` has the index of each tensor's device; if it is empty, all are on the only
    /// device.
    pub fn into_blocks(
        file: &'f TensorFile,
        numbers: &[usize],
        device_of: Vec<usize>,
    ) -> Result<Self> {
        let selection = Selection::new(file, numbers)?;
        let lens = selection.entries.iter().map(|entry| entry.loaded_len());
        let blocks = lens.map(|len| BlockLayout { len, image: None }).collect();
        let blocks = selection.to_caller_order(blocks);
        let locations = selection.order.iter().map(|&block| BlockLocation { block, offset: 0 });
        let locations = locations.collect();
        let device_of_tensor = selection.to_file_order(device_of.clone());
        let device_of_block = device_of;
        let layout = DeviceLayout { blocks, locations, device_of_block, device_of_tensor };
        Ok(DeviceLoad { selection, layout, is_new: false })
    }

    /// Returns the index of each block's device; empty if there is one device.
    pub fn block_devices(&self) -> &[usize] {
        &self.layout.device_of_block
    }

    /// Returns the bytes of each block.
    pub fn block_lens(&self) -> Vec<u64> {
        self.layout.blocks.iter().map(|block| block.len).collect()
    }

    /// Returns the location of each tensor, in the order of their numbers.
    pub fn locations(&self) -> Vec<BlockLocation> {
        self.selection.to_caller_order(self.layout.locations.clone())
    }

    /// Runs the load. Copies may still be under way when it returns; the consumer's stream waits
    /// for them once the returned streams are handed over. Tensors without data are left alone.
    /// Meanwhile it calls `allocate` on this thread until that returns false, because all blocks
    /// are allocated.
    pub fn run(
        &self,
        to: &DeviceMemoryBlocks<'_>,
        options: &LoadOptions,
        counters: &Counters,
        cancel: &dyn Cancel,
        allocate: &mut dyn FnMut() -> Result<bool>,
    ) -> Result<(Vec<CompactHeader>, Vec<Streams>)> {
        let selection = &self.selection;
        selection.check()?;
        let during = self.is_new.then_some(selection);
        let verify = selection.file.compare_files(during, options, cancel)?;
        let options = &LoadOptions { verify, ..*options };
        selection.file.with_intact_copies(|| {
            let open = |one: &DestinationDevice<'_>| Streams::open(one.device, one.consumer);
            let streams = to.devices.iter().map(open).collect::<Result<Vec<_>>>()?;
            try_key(selection, cancel)?;
            if to.direct_storage {
                // The trial read needs memory.
                while allocate()? {}
            }
            let run = Run::new(options, counters, cancel);
            let read = (&self.layout, &*streams);
            let reads = Reads::new(selection, options)?;
            let headers = read_to_devices(&reads, to, read, &run, &|_| false, allocate)?;
            selection.file.agree(options, cancel)?;
            Ok((selection.to_caller_order(headers), streams))
        })
    }
}

/// Reads tensors but those that `skipped` names, and returns their headers in the order of the file.
pub fn read_to_devices(
    reads: &Reads<'_>,
    to: &DeviceMemoryBlocks<'_>,
    (layout, streams): (&DeviceLayout, &[Streams]),
    run: &Run<'_>,
    skipped: &dyn Fn(usize) -> bool,
    allocate: &mut dyn FnMut() -> Result<bool>,
) -> Result<Vec<CompactHeader>> {
    let routes = to.devices.iter().zip(streams);
    let destination = DeviceDestination {
        memory: to.memory,
        blocks: &layout.blocks,
        locations: &layout.locations,
        devices: routes.map(|(one, streams)| StagedDevice::new(streams, one.pool)).collect(),
        device_of_block: &layout.device_of_block,
        in_order: run.receiver.is_some(),
        any_order: false,
    };
    let selection = reads.selection;
    let decrypts = selection.file.decryption().is_some();
    let open = |plan: &ReadPlan<'_>| {
        let sources = selection.file.sources();
        let files = as_refs(&sources);
        let ([one], [streams]) = (to.devices, streams) else {
            run.counters.fallback("GPUDirect Storage is for one device at a time");
            return Ok(None);
        };
        if run.options.verify != Verify::Nothing || decrypts {
            run.counters.fallback("GPUDirect Storage neither verifies nor decrypts");
            return Ok(None);
        }
        let at = (to.memory, &*layout.locations);
        DirectStorage::open(&files, plan, at, streams, one.pool, run.counters, run.cancel)
    };
    let wanted =
        to.direct_storage && selection.file.sources().iter().all(|one| one.facts().is_local);
    let destination = To {
        destination,
        devices: &layout.device_of_tensor,
        in_pieces: true,
        direct: wanted.then_some(&open as &OpenDirect<'_>),
    };
    let headers = reads.read(destination, run, skipped, allocate)?;
    if to.devices.iter().any(|one| one.pool.is_pageable()) {
        run.counters.fallback(PAGEABLE);
    }
    Ok(headers)
}

#[cfg(all(test, feature = "models"))]
mod models;

#[cfg(all(test, not(feature = "models")))]
mod tests;
