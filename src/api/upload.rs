//! The transfer of a load's bytes to devices: read straight to their places, gathered, or copied
//! from host memory.

use std::sync::Arc;

use super::file::TensorFile;
use super::load::load_counted;
use super::load_options::LoadOptions;
use super::slice_rules::{ROUND_LEN, RunRules};
use super::slices::{Plain, ROUND, extent, runs_of};
use crate::cancel::Cancel;
use crate::codec::KeptHeader;
use crate::codec::hash::Verify;
use crate::engine::plan::{Block, Extent, Place};
use crate::engine::read::{Reading, read, read_while};
use crate::engine::target::device::{Route, ToDevice};
use crate::engine::target::direct::Direct;
use crate::engine::target::gather_to_device::{DeviceSpan, GatherToDevice};
use crate::error::Result;
use crate::fallible::{LISTS, collected, listed, push};
use crate::format::catalog::Entry;
use crate::io::{MemorySource, ReadAt, as_refs};
use crate::mem::device::{Consumer, Device, DeviceBlocks, Event, Streams};
use crate::mem::pinned::Pool;
use crate::stats::Counters;

/// A device to which bytes go.
pub struct OneDevice<'d> {
    /// The device.
    pub device: &'d Arc<dyn Device>,
    /// The stream of the work that uses its memory before and after the load.
    pub consumer: Consumer,
    /// Its staging buffers.
    pub pool: &'d Pool,
}

/// The memory of devices that a load's bytes go to.
pub struct Destination<'d> {
    /// The devices, at least one.
    pub devices: &'d [OneDevice<'d>],
    /// Their memory: the blocks of the plan.
    pub memory: &'d DeviceBlocks,
    /// True if a device is to read local files itself (GPUDirect Storage), if it can and is the only one.
    pub direct_storage: bool,
}

/// State that the reads of one load to devices share.
#[derive(Clone, Copy)]
pub struct Upload<'u> {
    /// The devices and their memory.
    pub to: &'u Destination<'u>,
    /// The device of each block; empty if there is one device.
    pub device_of: &'u [usize],
    /// The copy streams of each device.
    pub streams: &'u [Streams],
    /// Load options.
    pub options: &'u LoadOptions,
    /// Counters of the work done.
    pub counters: &'u Counters,
    /// Ends the load early.
    pub cancel: &'u dyn Cancel,
}

impl Upload<'_> {
    /// Waits for all copies that were begun.
    pub fn finish(&self) -> Result<()> {
        self.streams.iter().try_for_each(Streams::finish)
    }

    /// Returns events that follow all copies that were begun.
    pub fn marks(&self) -> Result<Vec<Arc<dyn Event>>> {
        let of_each = self.streams.iter().map(Streams::marks);
        Ok(of_each.collect::<Result<Vec<_>>>()?.into_iter().flatten().collect())
    }

    /// Reads extents to their places in blocks of this layout. Returns the numbers of those that
    /// could not be decrypted in chunks.
    pub fn read(
        &self,
        what: &Reading<'_>,
        (blocks, places): (&[Block], &[Place]),
        allocate: &mut dyn FnMut() -> Result<bool>,
    ) -> Result<Vec<usize>> {
        let Upload { to, counters, cancel, .. } = *self;
        let (files, extents) = (what.files, what.extents);
        let local = files.iter().all(|source| source.is_local());
        let plain = what.verify == Verify::Nothing && !what.decrypts;
        let direct = match (to.devices, self.streams) {
            _ if !to.direct_storage || !local => None,
            ([one], [streams]) if plain => {
                if what.receiver.is_none() {
                    while allocate()? {}
                }
                let at = (to.memory, places);
                Direct::open(files, extents, at, streams, one.pool, counters, cancel)?
            }
            ([_], _) => {
                counters.fallback("GPUDirect Storage neither verifies nor decrypts");
                None
            }
            _ => {
                counters.fallback("GPUDirect Storage is for one device at a time");
                None
            }
        };
        let target = self.plain_target(places);
        let mut target = ToDevice { blocks, direct: direct.as_ref(), ..target };
        read_while(what, &mut target, counters, cancel, allocate)
    }

    /// Reads extents without headers straight to their places, as they are in the file.
    pub fn copy(&self, files: &[&dyn ReadAt], extents: &[Extent], places: &[Place]) -> Result<()> {
        if extents.is_empty() {
            return Ok(());
        }
        let reading = self.plain_reading(files, extents);
        read(&reading, &mut self.plain_target(places), self.counters, self.cancel).map(drop)
    }

    /// Returns the devices as a target of bytes without headers.
    fn plain_target<'t>(&'t self, places: &'t [Place]) -> ToDevice<'t> {
        let routes = self.to.devices.iter().zip(self.streams);
        let routes = routes.map(|(one, streams)| Route { streams, pool: one.pool, share: None });
        ToDevice {
            memory: self.to.memory,
            blocks: &[],
            places,
            routes: routes.collect(),
            route_of: self.device_of,
            direct: None,
        }
    }

    /// Describes a read of bytes as they are in the file.
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
        let files = as_refs(&sources);
        let (mut extents, mut places, mut spans) = (Vec::new(), Vec::new(), Vec::new());
        let mut len = 0u64;
        for (&(entry, place), runs) in slices.iter().zip(&all) {
            for range in rules.spans(runs) {
                len = len.saturating_add(range.end - range.start);
                push(&mut extents, extent(entry, &range), LISTS)?;
                push(&mut places, place, LISTS)?;
                push(&mut spans, DeviceSpan { start: range.start, runs }, LISTS)?;
                // Bounds what is planned together: a file may claim any number of bytes.
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

    /// Gathers from ranges that are planned together.
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

    /// Loads tensors, given by number in the order of the file, to host memory, and copies them
    /// from there to their places.
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
