//! Loads to the memory of devices.

use super::file::TensorFile;
use super::headers::{Headers, try_key};
use super::load::no_headers;
use super::load_options::LoadOptions;
use super::selection::Selection;
use super::slice_rules::RunRules;
use super::slices::{HELD, are_plain, direct_runs, held_len};
use super::upload::{Destination, OneDevice, Upload};
use crate::cancel::Cancel;
use crate::codec::KeptHeader;
use crate::engine::plan::{Block, Extent, Large, Layout, Place};
use crate::engine::read::Reading;
use crate::error::Result;
use crate::fallible::{LISTS, listed, out_of_memory, push, repeated, with_room};
use crate::io::as_refs;
use crate::mem::device::Streams;
use crate::mem::pinned::min_buffers;
use crate::stats::{Counters, PAGEABLE};

/// A load to devices: the tensors, and their places in blocks of device memory.
pub struct DeviceLoad<'f> {
    selection: Selection<'f>,
    layout: Layout,
    /// The device of each block, by its place in the destination; empty if there is one device.
    device_of: Vec<usize>,
}

impl<'f> DeviceLoad<'f> {
    /// Plans a load of tensors, given by number, into new blocks. `device_of` has the device of
    /// each, by its place among all devices; if it is empty, all go to the only one. With `apart`,
    /// each tensor has a block of its own.
    pub fn new(
        file: &'f TensorFile,
        numbers: &[usize],
        device_of: &[usize],
        apart: bool,
    ) -> Result<Self> {
        let selection = Selection::new(file, numbers)?;
        selection.check()?;
        let extents = selection.extents()?;
        let lens = selection.entries.iter().map(|entry| entry.loaded_len());
        let tensors = listed(extents.into_iter().zip(lens), LISTS)?;
        let layout = |tensors: &[(Extent, u64)]| {
            let layout = if apart {
                Layout::apart(tensors.iter().map(|(_, len)| *len))
            } else {
                Layout::new(tensors, Large::Apart)
            };
            let too_large = || out_of_memory(u64::MAX, format!("the tensors of `{}`", file.uri()));
            layout.ok_or_else(too_large)
        };
        if device_of.is_empty() {
            return Ok(DeviceLoad { layout: layout(&tensors)?, selection, device_of: Vec::new() });
        }
        let of = selection.sort(listed(device_of.iter().copied(), LISTS)?)?;
        let mut places = repeated(Place::default(), tensors.len(), LISTS)?;
        let (mut blocks, mut device_of) = (Vec::new(), Vec::new());
        for device in 0..of.iter().max().map_or(0, |most| most + 1) {
            let own = of.iter().enumerate().filter(|(_, of)| **of == device).map(|(at, _)| at);
            let own = listed(own, LISTS)?;
            let own_tensors = own.iter().filter_map(|&at| tensors.get(at).copied());
            let layout = layout(&listed(own_tensors, LISTS)?)?;
            let first = blocks.len();
            for (&at, place) in own.iter().zip(&layout.places) {
                if let Some(slot) = places.get_mut(at) {
                    *slot = Place { block: first + place.block, ..*place };
                }
            }
            for block in layout.blocks {
                push(&mut blocks, block, LISTS)?;
                push(&mut device_of, device, LISTS)?;
            }
        }
        Ok(DeviceLoad { selection, layout: Layout::of(blocks, places), device_of })
    }

    /// Plans a load of tensors into existing memory: a block each, in the order of their numbers.
    /// `device_of` has the device of each, by its place among all devices; if it is empty, all are
    /// on the only one.
    pub fn into_blocks(
        file: &'f TensorFile,
        numbers: &[usize],
        device_of: Vec<usize>,
    ) -> Result<Self> {
        let selection = Selection::new(file, numbers)?;
        let mut blocks = repeated(Block { len: 0, image: None }, numbers.len(), LISTS)?;
        let mut places = with_room(numbers.len(), LISTS)?;
        for (entry, &block) in selection.entries.iter().zip(selection.order()) {
            places.push(Place { block, offset: 0 });
            if let Some(slot) = blocks.get_mut(block) {
                slot.len = entry.loaded_len();
            }
        }
        Ok(DeviceLoad { selection, layout: Layout::of(blocks, places), device_of })
    }

    /// Returns the device of each block, by its place among all; empty if there is one device.
    pub fn block_devices(&self) -> &[usize] {
        &self.device_of
    }

    /// Returns the bytes of each block.
    pub fn block_lens(&self) -> Result<Vec<u64>> {
        listed(self.layout.blocks.iter().map(|block| block.len), LISTS)
    }

    /// Returns the place of each tensor, in the order of their numbers.
    pub fn places(&self) -> Result<Vec<Place>> {
        self.selection.restore(listed(self.layout.places.iter().copied(), LISTS)?)
    }

    /// Runs the load. Copies may still be under way when it returns; the consumer's stream waits for
    /// them once the returned streams are handed over. Tensors without data are left alone. Meanwhile
    /// it calls `allocate` on this thread, until that returns false: then all blocks are there.
    pub fn run(
        &self,
        to: &Destination<'_>,
        options: &LoadOptions,
        counters: &Counters,
        cancel: &dyn Cancel,
        allocate: &mut dyn FnMut() -> Result<bool>,
    ) -> Result<(Vec<KeptHeader>, Vec<Streams>)> {
        let file = self.selection.file;
        self.selection.check()?;
        let verify = file.prove(options, cancel)?;
        let options = &LoadOptions { verify, ..*options };
        file.with_sound_copies(cancel, || self.load(to, options, counters, cancel, allocate))
    }

    /// Runs the load after the checks.
    fn load(
        &self,
        to: &Destination<'_>,
        options: &LoadOptions,
        counters: &Counters,
        cancel: &dyn Cancel,
        allocate: &mut dyn FnMut() -> Result<bool>,
    ) -> Result<(Vec<KeptHeader>, Vec<Streams>)> {
        let selection = &self.selection;
        let file = selection.file;
        let open = |one: &OneDevice<'_>| Streams::open(one.device, one.consumer);
        let streams = to.devices.iter().map(open).collect::<Result<Vec<_>>>()?;
        let upload =
            Upload { to, device_of: &self.device_of, streams: &streams, options, counters, cancel };
        if selection.is_sliced() {
            while allocate()? {}
            self.slices(&upload)?;
            return Ok((no_headers(selection)?, streams));
        }
        try_key(selection, cancel)?;
        let headers = Headers::new(selection, options.verify, &|_, _| Ok(()))?;
        let several = to.devices.len() > 1;
        let headers = if (headers.decrypts() || several) && !file.is_seekable() {
            // A stream cannot be read again, should the direct way to the devices turn out to be
            // impossible.
            counters.fallback(if several {
                "through host memory: what comes front to back is read once, for all devices"
            } else {
                "decrypted in host memory: what comes front to back is read once"
            });
            while allocate()? {}
            let kept = upload.through_host(file, selection.numbers(), &self.layout.places)?;
            selection.restore(kept)?
        } else {
            let left = self.read(&headers, &upload, allocate)?;
            if !left.is_empty() {
                // Copies that are under way must not overwrite these bytes later.
                upload.finish()?;
                counters
                    .fallback("decrypted in host memory: pieces of encryption of unusual length");
                self.parts_through_host(&left, &upload)?;
            }
            headers.into_kept()?
        };
        if to.devices.iter().any(|one| one.pool.is_pageable()) {
            counters.fallback(PAGEABLE);
        }
        Ok((headers, streams))
    }

    /// Loads slices. Long contiguous ranges are read straight to their places, and short ones are
    /// gathered. Slices that are verified or encrypted come by way of host memory, some at a time.
    fn slices(&self, upload: &Upload<'_>) -> Result<()> {
        let file = self.selection.file;
        let rules = RunRules::of(&self.selection, upload.options)?;
        let (mut extents, mut places) = (Vec::new(), Vec::new());
        let mut others: Vec<usize> = Vec::new();
        let tensors = self.selection.entries.iter().zip(&self.layout.places).enumerate();
        for (tensor, (entry, place)) in tensors {
            if let Some(runs) = direct_runs(file, entry, upload.options.verify, &rules)? {
                for (extent, start) in runs {
                    push(&mut extents, extent, LISTS)?;
                    let offset = place.offset + start;
                    push(&mut places, Place { offset, ..*place }, LISTS)?;
                }
                continue;
            }
            push(&mut others, tensor, LISTS)?;
        }
        let sources = file.sources();
        upload.copy(&as_refs(&sources), &extents, &places)?;
        if !are_plain(file, upload.options.verify) {
            return self.parts_through_host(&others, upload);
        }
        let slice = |&tensor: &usize| {
            let entry = self.selection.entries.get(tensor);
            entry.copied().zip(self.layout.places.get(tensor).copied())
        };
        upload.gather(file, &listed(others.iter().filter_map(slice), LISTS)?, &rules)
    }

    /// Loads tensors to host memory and copies them to the device, some at a time.
    fn parts_through_host(&self, tensors: &[usize], upload: &Upload<'_>) -> Result<()> {
        if tensors.is_empty() {
            return Ok(());
        }
        let len =
            |&tensor: &usize| self.selection.entries.get(tensor).map_or(0, |entry| held_len(entry));
        let largest = tensors.iter().map(len).max().unwrap_or(0);
        // Readers to host memory serve all devices, but each device has staging buffers of its own.
        let others = upload.to.devices.iter().skip(1).map(|one| {
            let len = one.pool.buffer_len() as u64;
            len.saturating_mul(min_buffers(len))
        });
        let least = self.selection.file.least(true, true)?.saturating_add(others.sum());
        let (most, memory) = upload.options.memory.known()?.tensors(HELD, largest, least)?;
        let options = LoadOptions { memory, ..*upload.options };
        let upload = &Upload { options: &options, ..*upload };
        let mut left = tensors;
        while !left.is_empty() {
            let mut held = 0u64;
            let fits = |tensor: &&usize| {
                held = held.saturating_add(len(tensor));
                held <= most
            };
            let count = left.iter().take_while(fits).count().max(1);
            let (now, later) = left.split_at(count);
            let (all, places) = (self.selection.numbers(), &self.layout.places);
            let numbers = listed(now.iter().filter_map(|&at| all.get(at).copied()), LISTS)?;
            let places = listed(now.iter().filter_map(|&at| places.get(at).copied()), LISTS)?;
            upload.through_host(self.selection.file, &numbers, &places)?;
            left = later;
        }
        Ok(())
    }

    fn read(
        &self,
        headers: &Headers<'_>,
        upload: &Upload<'_>,
        allocate: &mut dyn FnMut() -> Result<bool>,
    ) -> Result<Vec<usize>> {
        let sources = self.selection.file.sources();
        let extents = self.selection.extents()?;
        let what = Reading {
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
        upload.read(&what, (&self.layout.blocks, &self.layout.places), allocate)
    }
}

#[cfg(all(test, feature = "models"))]
mod models;
#[cfg(all(test, not(feature = "models")))]
mod tests;
