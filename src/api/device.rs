//! Loads to the memory of devices.

use std::sync::Arc;

use super::file::TensorFile;
use super::headers::{Headers, try_key};
use super::load::{LoadOptions, load_counted};
use super::selection::Selection;
use crate::cancel::Cancel;
use crate::codec::KeptHeader;
use crate::codec::hash::{Digests, Verify};
use crate::engine::cold;
use crate::engine::plan::{Block, Extent, Large, Layout, Place};
use crate::engine::read::{Begun, Catalog, Reading, read};
use crate::engine::target::device::ToDevice;
use crate::engine::target::direct::Direct;
use crate::error::{Error, Result};
use crate::io::source::{MemorySource, ReadAt, borrowed};
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
        selection.check(Verify::Nothing)?;
        let lens = selection.entries.iter().map(|entry| entry.data_len);
        let layout = if apart {
            Some(Layout::apart(lens))
        } else {
            let tensors: Vec<(Extent, u64)> = selection.extents().into_iter().zip(lens).collect();
            Layout::new(&tensors, Large::Apart)
        };
        let layout = layout.ok_or_else(|| Error::Bug("sizes beyond 64 bits".to_owned()))?;
        Ok(DeviceLoad { selection, layout })
    }

    /// A load of tensors into memory that exists: a block each, in the order of their numbers.
    pub fn into_blocks(file: &'f TensorFile, numbers: &[usize]) -> Result<Self> {
        let selection = Selection::new(file, numbers)?;
        let mut blocks = vec![Block { len: 0, image: None }; numbers.len()];
        let mut places = Vec::with_capacity(numbers.len());
        for (entry, &block) in selection.entries.iter().zip(selection.order()) {
            places.push(Place { block, offset: 0 });
            if let Some(slot) = blocks.get_mut(block) {
                slot.len = entry.data_len;
            }
        }
        Ok(DeviceLoad { selection, layout: Layout::of(blocks, places) })
    }

    /// Bytes of each block.
    pub fn block_lens(&self) -> Vec<u64> {
        self.layout.blocks.iter().map(|block| block.len).collect()
    }

    /// The place of each tensor, in the order of their numbers.
    pub fn places(&self) -> Vec<Place> {
        self.selection.restore(self.layout.places.clone())
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
        selection.check(options.verify)?;
        try_key(selection, cancel)?;
        let streams = Streams::open(to.device, to.consumer)?;
        let headers = Headers::new(selection, options.verify, &|_, _| Ok(()));
        let headers = if headers.decrypts() && !file.is_seekable() {
            // It can be read only once, so that nothing may turn out to be impossible later.
            let all: Vec<usize> = (0..selection.entries.len()).collect();
            counters.fallback("decrypted in host memory: what comes front to back is read once");
            let kept = self.through_host(&all, to, &streams, options, counters, cancel)?;
            selection.restore(kept)
        } else {
            let left = self.read(&headers, to, &streams, options, counters, cancel)?;
            if !left.is_empty() {
                // What was copied there meanwhile must not come later.
                streams.finish()?;
                counters
                    .fallback("decrypted in host memory: pieces of encryption of unusual length");
                self.through_host(&left, to, &streams, options, counters, cancel)?;
            }
            headers.into_kept()?
        };
        if to.pool.is_pageable() {
            counters.fallback(PAGEABLE);
        }
        Ok((headers, streams))
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
        let extents = self.selection.extents();
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
            direct: direct.as_ref(),
        };
        let reading = Reading {
            files: &files,
            extents: &extents,
            catalog: headers,
            verify: options.verify,
            decrypts: headers.decrypts(),
            readers: options.readers,
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
        let numbers: Vec<usize> = self.numbers(tensors)?;
        let options = LoadOptions { map: false, ..*options };
        let loaded = load_counted(self.selection.file, &numbers, &options, counters, cancel)?;
        let data = loaded.iter().map(|tensor| match self.selection.file.entry(tensor.number()) {
            Ok(entry) if !entry.is_meta() => tensor.memory.bytes(),
            _ => &[],
        });
        let sources: Vec<MemorySource<&[u8]>> =
            data.map(|bytes| MemorySource::new(bytes, self.selection.file.uri())).collect();
        let files: Vec<&dyn ReadAt> = sources.iter().map(|source| source as &dyn ReadAt).collect();
        let extents = files.iter().enumerate().map(|(file, source)| Extent {
            file,
            data_len: source.traits().len.unwrap_or(0),
            ..Extent::default()
        });
        let extents: Vec<Extent> = extents.collect();
        let places = tensors.iter().filter_map(|&tensor| self.layout.places.get(tensor).copied());
        let places: Vec<Place> = places.collect();
        let mut target = ToDevice {
            memory: to.memory,
            blocks: &self.layout.blocks,
            places: &places,
            streams,
            pool: to.pool,
            around_the_cache: &|_| None,
            direct: None,
        };
        let reading = Reading {
            files: &files,
            extents: &extents,
            catalog: &Plain,
            verify: Verify::Nothing,
            decrypts: false,
            readers: Some(1),
        };
        // The bytes were counted when they were loaded.
        read(&reading, &mut target, &Counters::default(), cancel)?;
        Ok(loaded.into_iter().map(|tensor| tensor.header).collect())
    }

    /// The numbers of tensors in the file.
    fn numbers(&self, tensors: &[usize]) -> Result<Vec<usize>> {
        let numbers = tensors.iter().map(|&tensor| {
            let entry = self.selection.entries.get(tensor);
            let number = entry.and_then(|entry| self.selection.file.find(entry.name.stored()));
            number.ok_or_else(|| Error::Bug(format!("no tensor {tensor}")))
        });
        numbers.collect()
    }
}

/// The catalog of bytes that are only to be copied.
struct Plain;

impl Catalog for Plain {
    fn header(&self, tensor: usize, _raw: &[u8], _cancel: &dyn Cancel) -> Result<Begun> {
        Err(Error::Bug(format!("a header of copy {tensor}")))
    }

    fn decrypt(&self, _: usize, _: u64, _: &mut [u8], _: &dyn Cancel) -> Result<bool> {
        Ok(true)
    }

    fn compare(&self, _: usize, _: &Digests) -> Result<()> {
        Ok(())
    }
}

#[cfg(test)]
mod tests;
