//! Loads to the memory of devices.

use super::device_upload::{Destination, DestinationDevice, DeviceUpload};
use super::file::TensorFile;
use super::headers::{HeaderCodec, try_key};
use super::load::no_headers;
use super::load_options::LoadOptions;
use super::selection::Selection;
use super::slice_rules::RangeRules;
use super::slices::{MAX_HELD, are_plain, direct_ranges, whole_tensor_len};
use crate::cancel::Cancel;
use crate::codec::CompactHeader;
use crate::engine::plan::{BlockLayout, BlockLocation, Extent, LargeTensors, MemoryLayout};
use crate::engine::read::ReadRequest;
use crate::error::Result;
use crate::fallible::{LISTS, out_of_memory, try_collect, try_push, try_repeat, try_with_capacity};
use crate::io::as_refs;
use crate::mem::device::Streams;
use crate::mem::pinned::min_buffers;
use crate::stats::{Counters, PAGEABLE};

/// A load to devices: the tensors, and their locations in blocks of device memory.
pub struct DeviceLoad<'f> {
    selection: Selection<'f>,
    layout: MemoryLayout,
    /// The device of each block, as an index into the destination's devices; empty if there is one
    /// device.
    device_of_block: Vec<usize>,
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
        let extents = selection.extents()?;
        let lens = selection.entries.iter().map(|entry| entry.loaded_len());
        let tensors = try_collect(extents.into_iter().zip(lens), LISTS)?;
        let layout = |tensors: &[(Extent, u64)]| {
            let layout = if separate_memory {
                MemoryLayout::one_block_each(tensors.iter().map(|(_, len)| *len))
            } else {
                MemoryLayout::new(tensors, LargeTensors::OwnBlocks)
            };
            let too_large = || out_of_memory(u64::MAX, format!("the tensors of `{}`", file.uri()));
            layout.ok_or_else(too_large)
        };
        if device_of.is_empty() {
            return Ok(DeviceLoad {
                layout: layout(&tensors)?,
                selection,
                device_of_block: Vec::new(),
            });
        }
        let device_of_tensor =
            selection.to_file_order(try_collect(device_of.iter().copied(), LISTS)?)?;
        let mut locations = try_repeat(BlockLocation::default(), tensors.len(), LISTS)?;
        let (mut blocks, mut device_of_block) = (Vec::new(), Vec::new());
        for device in 0..device_of_tensor.iter().max().map_or(0, |most| most + 1) {
            let own = device_of_tensor
                .iter()
                .enumerate()
                .filter(|(_, of)| **of == device)
                .map(|(at, _)| at);
            let own = try_collect(own, LISTS)?;
            let own_tensors = own.iter().filter_map(|&at| tensors.get(at).copied());
            let layout = layout(&try_collect(own_tensors, LISTS)?)?;
            let first = blocks.len();
            for (&at, location) in own.iter().zip(&layout.locations) {
                if let Some(slot) = locations.get_mut(at) {
                    *slot = BlockLocation { block: first + location.block, ..*location };
                }
            }
            for block in layout.blocks {
                try_push(&mut blocks, block, LISTS)?;
                try_push(&mut device_of_block, device, LISTS)?;
            }
        }
        Ok(DeviceLoad {
            selection,
            layout: MemoryLayout::from_blocks(blocks, locations),
            device_of_block,
        })
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
        let mut blocks = try_repeat(BlockLayout { len: 0, image: None }, numbers.len(), LISTS)?;
        let mut locations = try_with_capacity(numbers.len(), LISTS)?;
        for (entry, &block) in selection.entries.iter().zip(selection.order()) {
            locations.push(BlockLocation { block, offset: 0 });
            if let Some(slot) = blocks.get_mut(block) {
                slot.len = entry.loaded_len();
            }
        }
        Ok(DeviceLoad {
            selection,
            layout: MemoryLayout::from_blocks(blocks, locations),
            device_of_block: device_of,
        })
    }

    /// Returns the index of each block's device; empty if there is one device.
    pub fn block_devices(&self) -> &[usize] {
        &self.device_of_block
    }

    /// Returns the bytes of each block.
    pub fn block_lens(&self) -> Result<Vec<u64>> {
        try_collect(self.layout.blocks.iter().map(|block| block.len), LISTS)
    }

    /// Returns the location of each tensor, in the order of their numbers.
    pub fn locations(&self) -> Result<Vec<BlockLocation>> {
        self.selection.to_caller_order(try_collect(self.layout.locations.iter().copied(), LISTS)?)
    }

    /// Runs the load. Copies may still be under way when it returns; the consumer's stream waits
    /// for them once the returned streams are handed over. Tensors without data are left alone.
    /// Meanwhile it calls `allocate` on this thread until that returns false, because all blocks
    /// are allocated.
    pub fn run(
        &self,
        to: &Destination<'_>,
        options: &LoadOptions,
        counters: &Counters,
        cancel: &dyn Cancel,
        allocate: &mut dyn FnMut() -> Result<bool>,
    ) -> Result<(Vec<CompactHeader>, Vec<Streams>)> {
        let file = self.selection.file;
        self.selection.check()?;
        let verify = file.verify_hub_checksums(options, cancel)?;
        let options = &LoadOptions { verify, ..*options };
        file.with_intact_copies(cancel, || self.load(to, options, counters, cancel, allocate))
    }

    /// Runs the load after the checks.
    fn load(
        &self,
        to: &Destination<'_>,
        options: &LoadOptions,
        counters: &Counters,
        cancel: &dyn Cancel,
        allocate: &mut dyn FnMut() -> Result<bool>,
    ) -> Result<(Vec<CompactHeader>, Vec<Streams>)> {
        let selection = &self.selection;
        let file = selection.file;
        let open = |one: &DestinationDevice<'_>| Streams::open(one.device, one.consumer);
        let streams = to.devices.iter().map(open).collect::<Result<Vec<_>>>()?;
        let upload = DeviceUpload {
            to,
            device_of_block: &self.device_of_block,
            streams: &streams,
            options,
            counters,
            cancel,
        };
        if selection.is_sliced() {
            while allocate()? {}
            self.slices(&upload)?;
            return Ok((no_headers(selection)?, streams));
        }
        try_key(selection, cancel)?;
        let headers = HeaderCodec::new(selection, options.verify, &|_, _| Ok(()))?;
        let several = to.devices.len() > 1;
        let headers = if (headers.decrypts() || several) && !file.is_seekable() {
            // A stream cannot be read a second time if direct reads to the devices fail.
            counters.fallback(if several {
                "through host memory: a source that can only be read front to back is read once \
                 for all devices"
            } else {
                "decrypted in host memory: the source can only be read front to back, and only once"
            });
            while allocate()? {}
            let loaded = upload.through_host(file, selection.numbers(), &self.layout.locations)?;
            selection.to_caller_order(loaded)?
        } else {
            let undecrypted = self.read(&headers, &upload, allocate)?;
            if !undecrypted.is_empty() {
                // Copies that are under way must not overwrite these bytes later.
                upload.finish()?;
                counters.fallback(
                    "decrypted in host memory: the file was encrypted in pieces of an unusual \
                     length",
                );
                self.parts_through_host(&undecrypted, &upload)?;
            }
            headers.into_headers()?
        };
        if to.devices.iter().any(|one| one.pool.is_pageable()) {
            counters.fallback(PAGEABLE);
        }
        Ok((headers, streams))
    }

    /// Loads slices. Long contiguous ranges are read straight to their locations, and short ones
    /// are gathered. Slices that are verified or encrypted are loaded to host memory first, some at
    /// a time.
    fn slices(&self, upload: &DeviceUpload<'_>) -> Result<()> {
        let file = self.selection.file;
        let rules = RangeRules::of(&self.selection, upload.options)?;
        let (mut extents, mut locations) = (Vec::new(), Vec::new());
        let mut others: Vec<usize> = Vec::new();
        let tensors = self.selection.entries.iter().zip(&self.layout.locations).enumerate();
        for (tensor, (entry, location)) in tensors {
            if let Some(ranges) = direct_ranges(file, entry, upload.options.verify, &rules)? {
                for (extent, start) in ranges {
                    try_push(&mut extents, extent, LISTS)?;
                    let offset = location.offset + start;
                    try_push(&mut locations, BlockLocation { offset, ..*location }, LISTS)?;
                }
                continue;
            }
            try_push(&mut others, tensor, LISTS)?;
        }
        let sources = file.sources();
        upload.copy(&as_refs(&sources), &extents, &locations)?;
        if !are_plain(file, upload.options.verify) {
            return self.parts_through_host(&others, upload);
        }
        let slice = |&tensor: &usize| {
            let entry = self.selection.entries.get(tensor);
            entry.copied().zip(self.layout.locations.get(tensor).copied())
        };
        upload.gather(file, &try_collect(others.iter().filter_map(slice), LISTS)?, &rules)
    }

    /// Loads tensors to host memory and copies them to the device, some at a time.
    fn parts_through_host(&self, tensors: &[usize], upload: &DeviceUpload<'_>) -> Result<()> {
        if tensors.is_empty() {
            return Ok(());
        }
        let len = |&tensor: &usize| {
            self.selection.entries.get(tensor).map_or(0, |entry| whole_tensor_len(entry))
        };
        let largest = tensors.iter().map(len).max().unwrap_or(0);
        // Readers to host memory serve all devices, but each device has staging buffers of its own.
        let others = upload.to.devices.iter().skip(1).map(|one| {
            let len = one.pool.buffer_len() as u64;
            len.saturating_mul(min_buffers(len))
        });
        let min_memory =
            self.selection.file.minimum_memory(true, true)?.saturating_add(others.sum());
        let (most, memory) =
            upload.options.memory.or_environment()?.tensors(MAX_HELD, largest, min_memory)?;
        let options = LoadOptions { memory, ..*upload.options };
        let upload = &DeviceUpload { options: &options, ..*upload };
        let mut remaining = tensors;
        while !remaining.is_empty() {
            let mut held = 0u64;
            let fits = |tensor: &&usize| {
                held = held.saturating_add(len(tensor));
                held <= most
            };
            let count = remaining.iter().take_while(fits).count().max(1);
            let (now, later) = remaining.split_at(count);
            let (all, locations) = (self.selection.numbers(), &self.layout.locations);
            let numbers = try_collect(now.iter().filter_map(|&at| all.get(at).copied()), LISTS)?;
            let locations =
                try_collect(now.iter().filter_map(|&at| locations.get(at).copied()), LISTS)?;
            upload.through_host(self.selection.file, &numbers, &locations)?;
            remaining = later;
        }
        Ok(())
    }

    fn read(
        &self,
        headers: &HeaderCodec<'_>,
        upload: &DeviceUpload<'_>,
        allocate: &mut dyn FnMut() -> Result<bool>,
    ) -> Result<Vec<usize>> {
        let sources = self.selection.file.sources();
        let extents = self.selection.extents()?;
        let request = ReadRequest {
            files: &as_refs(&sources),
            extents: &extents,
            codec: headers,
            verify: upload.options.verify,
            decrypts: headers.decrypts(),
            readers: upload.options.readers,
            memory: upload.options.memory,
            shares_cache: upload.options.shares_cache,
            receiver: None,
        };
        upload.read(&request, (&self.layout.blocks, &self.layout.locations), allocate)
    }
}

#[cfg(all(test, feature = "models"))]
mod models;
#[cfg(all(test, not(feature = "models")))]
mod tests;
