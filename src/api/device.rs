//! Loads to the memory of devices.

use std::sync::Arc;

use super::file::TensorFile;
use super::headers::{Headers, try_key};
use super::load::{load_counted, no_headers};
use super::load_options::LoadOptions;
use super::selection::Selection;
use super::slices::{HELD, Plain, direct_runs, held_len};
use crate::cancel::Cancel;
use crate::codec::KeptHeader;
use crate::codec::hash::Verify;
use crate::engine::cold;
use crate::engine::plan::{Block, Extent, Large, Layout, Place};
use crate::engine::read::{Reading, read};
use crate::engine::target::device::ToDevice;
use crate::engine::target::direct::Direct;
use crate::error::Result;
use crate::fallible::{LISTS, listed, out_of_memory, push, repeated, with_room};
use crate::io::{MemorySource, ReadAt, borrowed};
use crate::mem::device::{Consumer, Device, DeviceMemory, Streams};
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
    /// Who uses its memory before and after.
    pub consumer: Consumer,
    /// Its memory, a block each as [`DeviceLoad::block_lens`] has them.
    pub memory: &'d [DeviceMemory],
    /// Whether to have the device read local files by itself, if it can.
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
    /// they are handed over. Tensors without data are left alone.
    pub fn run(
        &self,
        to: &Destination<'_>,
        options: &LoadOptions,
        counters: &Counters,
        cancel: &dyn Cancel,
    ) -> Result<(Vec<KeptHeader>, Streams)> {
        let selection = &self.selection;
        let file = selection.file;
        selection.check()?;
        let verify = file.prove(options, cancel)?;
        let options = &LoadOptions { verify, ..*options };
        file.with_sound_copies(cancel, || self.load(to, options, counters, cancel))
    }

    /// The same for what was checked.
    fn load(
        &self,
        to: &Destination<'_>,
        options: &LoadOptions,
        counters: &Counters,
        cancel: &dyn Cancel,
    ) -> Result<(Vec<KeptHeader>, Streams)> {
        let selection = &self.selection;
        let file = selection.file;
        let streams = Streams::open(to.device, to.consumer)?;
        if selection.is_sliced() {
            self.slices(to, &streams, options, counters, cancel)?;
            return Ok((no_headers(selection)?, streams));
        }
        try_key(selection, cancel)?;
        let headers = Headers::new(selection, options.verify, &|_, _| Ok(()))?;
        let headers = if headers.decrypts() && !file.is_seekable() {
            // It can be read only once, so that nothing may turn out to be impossible later.
            let all = listed(0..selection.entries.len(), LISTS)?;
            counters.fallback("decrypted in host memory: what comes front to back is read once");
            let kept = self.through_host(&all, to, &streams, options, counters, cancel)?;
            selection.restore(kept)?
        } else {
            let left = self.read(&headers, to, &streams, options, counters, cancel)?;
            if !left.is_empty() {
                // What was copied there meanwhile must not come later.
                streams.finish()?;
                counters
                    .fallback("decrypted in host memory: pieces of encryption of unusual length");
                self.parts_through_host(&left, to, &streams, options, counters, cancel)?;
            }
            headers.into_kept()?
        };
        if to.pool.is_pageable() {
            counters.fallback(PAGEABLE);
        }
        Ok((headers, streams))
    }

    /// Loads slices: those of long runs as they come, others by way of host memory, some at a time.
    fn slices(
        &self,
        to: &Destination<'_>,
        streams: &Streams,
        options: &LoadOptions,
        counters: &Counters,
        cancel: &dyn Cancel,
    ) -> Result<()> {
        let file = self.selection.file;
        let (mut extents, mut places) = (Vec::new(), Vec::new());
        let mut others: Vec<usize> = Vec::new();
        let tensors = self.selection.entries.iter().zip(&self.layout.places).enumerate();
        for (tensor, (entry, place)) in tensors {
            if let Some(runs) = direct_runs(file, entry, options.verify)? {
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
        self.copy(&borrowed(&sources), &extents, &places, to, streams, options, counters, cancel)?;
        self.parts_through_host(&others, to, streams, options, counters, cancel)
    }

    /// Brings tensors to host memory and from there to the device, some at a time.
    fn parts_through_host(
        &self,
        tensors: &[usize],
        to: &Destination<'_>,
        streams: &Streams,
        options: &LoadOptions,
        counters: &Counters,
        cancel: &dyn Cancel,
    ) -> Result<()> {
        if tensors.is_empty() {
            return Ok(());
        }
        let len =
            |&tensor: &usize| self.selection.entries.get(tensor).map_or(0, |entry| held_len(entry));
        let largest = tensors.iter().map(len).max().unwrap_or(0);
        let least = self.selection.file.least(true, true)?;
        let (most, memory) = options.memory.known()?.tensors(HELD, largest, least)?;
        let options = &LoadOptions { memory, ..*options };
        let mut left = tensors;
        while !left.is_empty() {
            let mut held = 0u64;
            let fits = |tensor: &&usize| {
                held = held.saturating_add(len(tensor));
                held <= most
            };
            let count = left.iter().take_while(fits).count().max(1);
            let (now, later) = left.split_at(count);
            self.through_host(now, to, streams, options, counters, cancel)?;
            left = later;
        }
        Ok(())
    }

    /// Reads bytes as they are to places of their own.
    #[allow(clippy::too_many_arguments)]
    fn copy(
        &self,
        files: &[&dyn ReadAt],
        extents: &[Extent],
        places: &[Place],
        to: &Destination<'_>,
        streams: &Streams,
        options: &LoadOptions,
        counters: &Counters,
        cancel: &dyn Cancel,
    ) -> Result<()> {
        let mut target = ToDevice {
            memory: to.memory,
            blocks: &self.layout.blocks,
            places,
            streams,
            pool: to.pool,
            around_the_cache: &|_| None,
            reader_memory: 0,
            direct: None,
            share: None,
        };
        let reading = Reading {
            files,
            extents,
            codec: &Plain,
            verify: Verify::Nothing,
            decrypts: false,
            readers: options.readers,
            memory: options.memory,
        };
        read(&reading, &mut target, counters, cancel).map(drop)
    }

    #[allow(clippy::too_many_arguments)]
    fn read(
        &self,
        headers: &Headers<'_>,
        to: &Destination<'_>,
        streams: &Streams,
        options: &LoadOptions,
        counters: &Counters,
        cancel: &dyn Cancel,
    ) -> Result<Vec<usize>> {
        let sources = self.selection.file.sources();
        let files = borrowed(&sources);
        let extents = self.selection.extents()?;
        let places = self.layout.places.as_slice();
        let local = files.iter().all(|source| source.file().is_some());
        let plain = options.verify == Verify::Nothing && !headers.decrypts();
        let direct = if !to.direct_storage || !local {
            None
        } else if plain {
            let at = (to.memory, places);
            Direct::open(&files, &extents, at, streams, to.pool, counters, cancel)?
        } else {
            counters.fallback("GPUDirect Storage neither verifies nor decrypts");
            None
        };
        if direct.is_none() {
            counters.reading(if local { "page cache" } else { "" });
        }
        let around = cold::wants_direct_reads(&files, &extents)?;
        let mut target = ToDevice {
            memory: to.memory,
            blocks: &self.layout.blocks,
            places,
            streams,
            pool: to.pool,
            around_the_cache: &|source| {
                if around { cold::around_the_cache(source, counters) } else { None }
            },
            reader_memory: if around { cold::READER_MEMORY } else { 0 },
            direct: direct.as_ref(),
            share: None,
        };
        let reading = Reading {
            files: &files,
            extents: &extents,
            codec: headers,
            verify: options.verify,
            decrypts: headers.decrypts(),
            readers: options.readers,
            memory: options.memory,
        };
        read(&reading, &mut target, counters, cancel)
    }

    /// Brings tensors, as they are numbered in the order of the file, to host memory, and from there to
    /// the device.
    fn through_host(
        &self,
        tensors: &[usize],
        to: &Destination<'_>,
        streams: &Streams,
        options: &LoadOptions,
        counters: &Counters,
        cancel: &dyn Cancel,
    ) -> Result<Vec<KeptHeader>> {
        let all = self.selection.numbers();
        let numbers = listed(tensors.iter().filter_map(|&at| all.get(at).copied()), LISTS)?;
        let options = LoadOptions { map: false, ..*options };
        let loaded = load_counted(self.selection.file, &numbers, &options, counters, cancel)?;
        let data = loaded.iter().map(|tensor| match self.selection.file.entry(tensor.number()) {
            Ok(entry) if !entry.is_meta() => tensor.memory.bytes(),
            _ => &[],
        });
        let uri = self.selection.file.uri();
        let sources = listed(data.map(|bytes| MemorySource::new(bytes, uri)), LISTS)?;
        let files = listed(sources.iter().map(|source| source as &dyn ReadAt), LISTS)?;
        let extents = files.iter().enumerate().map(|(file, source)| Extent {
            file,
            data_len: source.capabilities().len.unwrap_or(0),
            ..Extent::default()
        });
        let extents = listed(extents, LISTS)?;
        let places = tensors.iter().filter_map(|&tensor| self.layout.places.get(tensor).copied());
        let places = listed(places, LISTS)?;
        // The bytes were counted when they were loaded.
        let uncounted = Counters::default();
        let options = &LoadOptions { readers: Some(1), ..options };
        self.copy(&files, &extents, &places, to, streams, options, &uncounted, cancel)?;
        listed(loaded.into_iter().map(|tensor| tensor.header), LISTS)
    }
}

#[cfg(all(test, feature = "models"))]
mod models;
#[cfg(all(test, not(feature = "models")))]
mod tests;
