//! Loads to the memory of devices.

use std::sync::Arc;

use super::file::TensorFile;
use super::headers::{Headers, try_key};
use super::load::{load_counted, no_headers};
use super::load_options::LoadOptions;
use super::selection::Selection;
use super::slice_rules::{ROUND_LEN, RunRules};
use super::slices::{HELD, Plain, ROUND, are_plain, direct_runs, extent, held_len, runs_of};
use crate::cancel::Cancel;
use crate::codec::KeptHeader;
use crate::codec::hash::Verify;
use crate::engine::plan::{Block, Extent, Large, Layout, Place};
use crate::engine::read::{Reading, read, read_while};
use crate::engine::target::device::ToDevice;
use crate::engine::target::direct::Direct;
use crate::engine::target::gather_to_device::{DeviceSpan, GatherToDevice};
use crate::error::Result;
use crate::fallible::{LISTS, collected, listed, out_of_memory, push, repeated, with_room};
use crate::format::catalog::Entry;
use crate::io::{MemorySource, ReadAt, borrowed};
use crate::mem::device::{Blocks, Consumer, Device, Streams};
use crate::mem::pinned::Pool;
use crate::stats::{Counters, PAGEABLE};

/// A load to a device: which tensors, and where in blocks of its memory they go.
pub struct DeviceLoad<'f> {
    selection: Selection<'f>,
    layout: Layout,
}

/// Where a load's bytes go.
pub struct Destination<'d> {
    /// The device.
    pub device: &'d Arc<dyn Device>,
    /// The stream of what uses its memory before and after.
    pub consumer: Consumer,
    /// Its memory, a block each as [`DeviceLoad::block_lens`] has them.
    pub memory: &'d Blocks,
    /// True if the device is to read local files by itself, where it can.
    pub direct_storage: bool,
    /// Its staging buffers.
    pub pool: &'d Pool,
}

impl<'f> DeviceLoad<'f> {
    /// A load of tensors, given by number, into new blocks. With `apart`, each has a block of its own.
    pub fn new(file: &'f TensorFile, numbers: &[usize], apart: bool) -> Result<Self> {
        let selection = Selection::new(file, numbers)?;
        selection.check()?;
        let lens = selection.entries.iter().map(|entry| entry.loaded_len());
        let layout = if apart {
            Layout::apart(lens)
        } else {
            let tensors = listed(selection.extents()?.into_iter().zip(lens), LISTS)?;
            Layout::new(&tensors, Large::Apart)
        };
        let too_large = || out_of_memory(u64::MAX, format!("the tensors of `{}`", file.uri()));
        let layout = layout.ok_or_else(too_large)?;
        Ok(DeviceLoad { selection, layout })
    }

    /// A load of tensors into memory that exists: a block each, in the order of their numbers.
    pub fn into_blocks(file: &'f TensorFile, numbers: &[usize]) -> Result<Self> {
        let selection = Selection::new(file, numbers)?;
        let mut blocks = repeated(Block { len: 0, image: None }, numbers.len(), LISTS)?;
        let mut places = with_room(numbers.len(), LISTS)?;
        for (entry, &block) in selection.entries.iter().zip(selection.order()) {
            places.push(Place { block, offset: 0 });
            if let Some(slot) = blocks.get_mut(block) {
                slot.len = entry.loaded_len();
            }
        }
        Ok(DeviceLoad { selection, layout: Layout::of(blocks, places) })
    }

    /// Bytes of each block.
    pub fn block_lens(&self) -> Result<Vec<u64>> {
        listed(self.layout.blocks.iter().map(|block| block.len), LISTS)
    }

    /// The place of each tensor, in the order of their numbers.
    pub fn places(&self) -> Result<Vec<Place>> {
        self.selection.restore(listed(self.layout.places.iter().copied(), LISTS)?)
    }

    /// Loads. Copies may still be under way when it returns; the consumer's stream waits for them once
    /// they are handed over. Tensors without data are left alone. Meanwhile it calls `allocate` on
    /// this thread, until that says that all blocks are there.
    pub fn run(
        &self,
        to: &Destination<'_>,
        options: &LoadOptions,
        counters: &Counters,
        cancel: &dyn Cancel,
        allocate: &mut dyn FnMut() -> Result<bool>,
    ) -> Result<(Vec<KeptHeader>, Streams)> {
        let file = self.selection.file;
        self.selection.check()?;
        let verify = file.prove(options, cancel)?;
        let options = &LoadOptions { verify, ..*options };
        file.with_sound_copies(cancel, || self.load(to, options, counters, cancel, allocate))
    }

    /// The same for what was checked.
    fn load(
        &self,
        to: &Destination<'_>,
        options: &LoadOptions,
        counters: &Counters,
        cancel: &dyn Cancel,
        allocate: &mut dyn FnMut() -> Result<bool>,
    ) -> Result<(Vec<KeptHeader>, Streams)> {
        let selection = &self.selection;
        let file = selection.file;
        let streams = Streams::open(to.device, to.consumer)?;
        let upload = Upload { to, streams: &streams, options, counters, cancel };
        if selection.is_sliced() {
            while allocate()? {}
            self.slices(&upload)?;
            return Ok((no_headers(selection)?, streams));
        }
        try_key(selection, cancel)?;
        let headers = Headers::new(selection, options.verify, &|_, _| Ok(()))?;
        let headers = if headers.decrypts() && !file.is_seekable() {
            // It can be read only once, so that nothing may turn out to be impossible later.
            counters.fallback("decrypted in host memory: what comes front to back is read once");
            while allocate()? {}
            let kept = upload.through_host(file, selection.numbers(), &self.layout.places)?;
            selection.restore(kept)?
        } else {
            let left = self.read(&headers, &upload, allocate)?;
            if !left.is_empty() {
                // Bytes that were copied there meanwhile must not come later.
                streams.finish()?;
                counters
                    .fallback("decrypted in host memory: pieces of encryption of unusual length");
                self.parts_through_host(&left, &upload)?;
            }
            headers.into_kept()?
        };
        if to.pool.is_pageable() {
            counters.fallback(PAGEABLE);
        }
        Ok((headers, streams))
    }

    /// Loads slices: those of long contiguous ranges as they come, and those of short ones gathered. What
    /// is verified or encrypted comes by way of host memory, some at a time.
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
        upload.copy(&borrowed(&sources), &extents, &places)?;
        if !are_plain(file, upload.options.verify) {
            return self.parts_through_host(&others, upload);
        }
        let slice = |&tensor: &usize| {
            let entry = self.selection.entries.get(tensor);
            entry.copied().zip(self.layout.places.get(tensor).copied())
        };
        upload.gather(file, &listed(others.iter().filter_map(slice), LISTS)?, &rules)
    }

    /// Brings tensors to host memory and from there to the device, some at a time.
    fn parts_through_host(&self, tensors: &[usize], upload: &Upload<'_>) -> Result<()> {
        if tensors.is_empty() {
            return Ok(());
        }
        let len =
            |&tensor: &usize| self.selection.entries.get(tensor).map_or(0, |entry| held_len(entry));
        let largest = tensors.iter().map(len).max().unwrap_or(0);
        let least = self.selection.file.least(true, true)?;
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
            files: &borrowed(&sources),
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

/// State that the reads of one load to a device share.
#[derive(Clone, Copy)]
pub struct Upload<'u> {
    /// The device and its memory.
    pub to: &'u Destination<'u>,
    /// The way there.
    pub streams: &'u Streams,
    /// Load options.
    pub options: &'u LoadOptions,
    /// Count what is done.
    pub counters: &'u Counters,
    /// Ends it.
    pub cancel: &'u dyn Cancel,
}

impl Upload<'_> {
    /// Reads extents to their places in blocks of this layout. Returns those that could not be
    /// decrypted in chunks.
    pub fn read(
        &self,
        what: &Reading<'_>,
        (blocks, places): (&[Block], &[Place]),
        allocate: &mut dyn FnMut() -> Result<bool>,
    ) -> Result<Vec<usize>> {
        let Upload { to, streams, counters, cancel, .. } = *self;
        let (files, extents) = (what.files, what.extents);
        let local = files.iter().all(|source| source.is_local());
        let plain = what.verify == Verify::Nothing && !what.decrypts;
        let direct = if !to.direct_storage || !local {
            None
        } else if plain {
            if what.receiver.is_none() {
                while allocate()? {}
            }
            let at = (to.memory, places);
            Direct::open(files, extents, at, streams, to.pool, counters, cancel)?
        } else {
            counters.fallback("GPUDirect Storage neither verifies nor decrypts");
            None
        };
        let mut target = ToDevice {
            memory: to.memory,
            blocks,
            places,
            streams,
            pool: to.pool,
            direct: direct.as_ref(),
            share: None,
        };
        read_while(what, &mut target, counters, cancel, allocate)
    }

    /// Reads bytes as they are to places of their own.
    fn copy(&self, files: &[&dyn ReadAt], extents: &[Extent], places: &[Place]) -> Result<()> {
        if extents.is_empty() {
            return Ok(());
        }
        let reading = self.plain_reading(files, extents);
        read(&reading, &mut self.plain_target(places), self.counters, self.cancel).map(drop)
    }

    /// The device as a target of bytes without headers.
    fn plain_target<'t>(&'t self, places: &'t [Place]) -> ToDevice<'t> {
        ToDevice {
            memory: self.to.memory,
            blocks: &[],
            places,
            streams: self.streams,
            pool: self.to.pool,
            direct: None,
            share: None,
        }
    }

    /// A read of bytes as they are.
    fn plain_reading<'t>(
        &'t self,
        files: &'t [&'t dyn ReadAt],
        extents: &'t [Extent],
    ) -> Reading<'t> {
        Reading {
            files,
            extents,
            codec: &Plain,
            verify: Verify::Nothing,
            decrypts: false,
            readers: self.options.readers,
            memory: self.options.memory,
            shares_cache: self.options.shares_cache,
            receiver: None,
        }
    }

    /// Gathers slices of a file on their way to their places, some at a time.
    pub fn gather(
        &self,
        file: &TensorFile,
        slices: &[(&Entry, Place)],
        rules: &RunRules,
    ) -> Result<()> {
        let all = collected(slices.iter().map(|(entry, _)| runs_of(entry)), LISTS)?;
        let sources = file.sources();
        let files = borrowed(&sources);
        let (mut extents, mut places, mut spans) = (Vec::new(), Vec::new(), Vec::new());
        let mut len = 0u64;
        for (&(entry, place), runs) in slices.iter().zip(&all) {
            for range in rules.spans(runs) {
                len = len.saturating_add(range.end - range.start);
                push(&mut extents, extent(entry, &range), LISTS)?;
                push(&mut places, place, LISTS)?;
                push(&mut spans, DeviceSpan { start: range.start, runs }, LISTS)?;
                // A source may promise any number of bytes: no more are planned together.
                if spans.len() == ROUND || len >= ROUND_LEN {
                    self.gather_round(&files, &extents, &places, &spans)?;
                    extents.clear();
                    places.clear();
                    spans.clear();
                    len = 0;
                }
            }
        }
        self.gather_round(&files, &extents, &places, &spans)
    }

    /// The same for ranges that are planned together.
    fn gather_round(
        &self,
        files: &[&dyn ReadAt],
        extents: &[Extent],
        places: &[Place],
        spans: &[DeviceSpan<'_>],
    ) -> Result<()> {
        self.cancel.check()?;
        if extents.is_empty() {
            return Ok(());
        }
        let mut target = GatherToDevice::new(self.plain_target(places), spans);
        read(&self.plain_reading(files, extents), &mut target, self.counters, self.cancel).map(drop)
    }

    /// Brings tensors, given by number in the order of the file, to host memory, and from there to
    /// their places.
    pub fn through_host(
        &self,
        file: &TensorFile,
        numbers: &[usize],
        places: &[Place],
    ) -> Result<Vec<KeptHeader>> {
        let options = LoadOptions { map: false, ..*self.options };
        let loaded = load_counted(file, numbers, &options, self.counters, self.cancel)?;
        let data = loaded.iter().map(|tensor| match file.entry(tensor.number()) {
            Ok(entry) if !entry.is_meta() => tensor.memory.bytes(),
            _ => &[],
        });
        let sources = listed(data.map(|bytes| MemorySource::new(bytes, file.uri())), LISTS)?;
        let files = listed(sources.iter().map(|source| source as &dyn ReadAt), LISTS)?;
        let extents = files.iter().enumerate().map(|(file, source)| Extent {
            file,
            data_len: source.capabilities().len.unwrap_or(0),
            ..Extent::default()
        });
        // The bytes were counted when they were loaded.
        let (options, uncounted) =
            (LoadOptions { readers: Some(1), ..options }, Counters::default());
        let copies = Upload { options: &options, counters: &uncounted, ..*self };
        copies.copy(&files, &listed(extents, LISTS)?, places)?;
        listed(loaded.into_iter().map(|tensor| tensor.header), LISTS)
    }
}

#[cfg(all(test, feature = "models"))]
mod models;
#[cfg(all(test, not(feature = "models")))]
mod tests;
