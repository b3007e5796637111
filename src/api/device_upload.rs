//! The transfer of a load's bytes to devices: read straight to their locations, gathered, or copied
//! from host memory.

use std::sync::Arc;

use super::file::TensorFile;
use super::load::load_counted;
use super::load_options::LoadOptions;
use super::slice_rules::{MAX_GROUP_LEN, RangeRules};
use super::slices::{MAX_RANGES, PlainCodec, extent, ranges_of};
use crate::cancel::Cancel;
use crate::codec::CompactHeader;
use crate::codec::hash::Verify;
use crate::engine::plan::{BlockLayout, BlockLocation, Extent};
use crate::engine::read::{ReadRequest, read, read_while};
use crate::engine::target::device::{DeviceTarget, StagedDevice};
use crate::engine::target::direct::DirectStorage;
use crate::engine::target::gather_to_device::{DeviceCoalescedRead, DeviceGatherTarget};
use crate::error::Result;
use crate::fallible::{LISTS, try_collect, try_collect_results, try_push};
use crate::format::catalog::Entry;
use crate::io::{MemorySource, ReadAt, as_refs};
use crate::mem::device::{Consumer, Device, DeviceBlocks, Event, Streams};
use crate::mem::pinned::Pool;
use crate::stats::Counters;

/// A device to which bytes go.
pub struct DestinationDevice<'d> {
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
    pub devices: &'d [DestinationDevice<'d>],
    /// Their memory: the blocks of the plan.
    pub memory: &'d DeviceBlocks,
    /// True to let the device read local files itself (GPUDirect Storage), if it supports that and
    /// is the only device.
    pub direct_storage: bool,
}

/// State that the reads of one load to devices share.
#[derive(Clone, Copy)]
pub struct DeviceUpload<'u> {
    /// The devices and their memory.
    pub to: &'u Destination<'u>,
    /// The device of each block; empty if there is one device.
    pub device_of_block: &'u [usize],
    /// The copy streams of each device.
    pub streams: &'u [Streams],
    /// Load options.
    pub options: &'u LoadOptions,
    /// Counters of the work done.
    pub counters: &'u Counters,
    /// Ends the load early.
    pub cancel: &'u dyn Cancel,
}

impl DeviceUpload<'_> {
    /// Waits for all copies that were begun.
    pub fn finish(&self) -> Result<()> {
        self.streams.iter().try_for_each(Streams::finish)
    }

    /// Returns events that follow all copies that were begun.
    pub fn copy_events(&self) -> Result<Vec<Arc<dyn Event>>> {
        let of_each = self.streams.iter().map(Streams::marks);
        Ok(of_each.collect::<Result<Vec<_>>>()?.into_iter().flatten().collect())
    }

    /// Reads extents to their locations in blocks of this layout. Returns the numbers of those that
    /// could not be decrypted in chunks.
    pub fn read(
        &self,
        request: &ReadRequest<'_>,
        (blocks, locations): (&[BlockLayout], &[BlockLocation]),
        allocate: &mut dyn FnMut() -> Result<bool>,
    ) -> Result<Vec<usize>> {
        let DeviceUpload { to, counters, cancel, .. } = *self;
        let (files, extents) = (request.files, request.extents);
        let local = files.iter().all(|source| source.is_local());
        let plain = request.verify == Verify::Nothing && !request.decrypts;
        let direct = match (to.devices, self.streams) {
            _ if !to.direct_storage || !local => None,
            ([one], [streams]) if plain => {
                if request.receiver.is_none() {
                    while allocate()? {}
                }
                let at = (to.memory, locations);
                DirectStorage::open(files, extents, at, streams, one.pool, counters, cancel)?
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
        let target = self.plain_target(locations);
        let mut target = DeviceTarget { blocks, direct: direct.as_ref(), ..target };
        read_while(request, &mut target, counters, cancel, allocate)
    }

    /// Reads extents without headers straight to their locations, as they are in the file.
    pub fn copy(
        &self,
        files: &[&dyn ReadAt],
        extents: &[Extent],
        locations: &[BlockLocation],
    ) -> Result<()> {
        if extents.is_empty() {
            return Ok(());
        }
        let reading = self.plain_reading(files, extents);
        read(&reading, &mut self.plain_target(locations), self.counters, self.cancel).map(drop)
    }

    /// Returns the devices as a target of bytes without headers.
    fn plain_target<'t>(&'t self, locations: &'t [BlockLocation]) -> DeviceTarget<'t> {
        let devices = self.to.devices.iter().zip(self.streams);
        let devices =
            devices.map(|(one, streams)| StagedDevice { streams, pool: one.pool, share: None });
        DeviceTarget {
            memory: self.to.memory,
            blocks: &[],
            locations,
            devices: devices.collect(),
            device_of_block: self.device_of_block,
            direct: None,
        }
    }

    /// Describes a read of bytes as they are in the file.
    fn plain_reading<'t>(
        &'t self,
        files: &'t [&'t dyn ReadAt],
        extents: &'t [Extent],
    ) -> ReadRequest<'t> {
        ReadRequest {
            files,
            extents,
            codec: &PlainCodec,
            verify: Verify::Nothing,
            decrypts: false,
            readers: self.options.readers,
            memory: self.options.memory,
            shares_cache: self.options.shares_cache,
            receiver: None,
        }
    }

    /// Gathers slices of a file in staging buffers and copies them to their locations, some at a
    /// time.
    pub fn gather(
        &self,
        file: &TensorFile,
        slices: &[(&Entry, BlockLocation)],
        rules: &RangeRules,
    ) -> Result<()> {
        let all = try_collect_results(slices.iter().map(|(entry, _)| ranges_of(entry)), LISTS)?;
        let sources = file.sources();
        let files = as_refs(&sources);
        let (mut extents, mut locations, mut reads) = (Vec::new(), Vec::new(), Vec::new());
        let mut len = 0u64;
        for (&(entry, location), ranges) in slices.iter().zip(&all) {
            for range in rules.reads(ranges) {
                len = len.saturating_add(range.end - range.start);
                try_push(&mut extents, extent(entry, &range), LISTS)?;
                try_push(&mut locations, location, LISTS)?;
                try_push(&mut reads, DeviceCoalescedRead { start: range.start, ranges }, LISTS)?;
                // Bounds what is planned together: a file may claim any number of bytes.
                if reads.len() == MAX_RANGES || len >= MAX_GROUP_LEN {
                    self.gather_group(&files, &extents, &locations, &reads)?;
                    extents.clear();
                    locations.clear();
                    reads.clear();
                    len = 0;
                }
            }
        }
        self.gather_group(&files, &extents, &locations, &reads)
    }

    /// Gathers from ranges that are planned together.
    fn gather_group(
        &self,
        files: &[&dyn ReadAt],
        extents: &[Extent],
        locations: &[BlockLocation],
        reads: &[DeviceCoalescedRead<'_>],
    ) -> Result<()> {
        self.cancel.check()?;
        if extents.is_empty() {
            return Ok(());
        }
        let mut target = DeviceGatherTarget::new(self.plain_target(locations), reads);
        read(&self.plain_reading(files, extents), &mut target, self.counters, self.cancel).map(drop)
    }

    /// Loads tensors, given by number in the order of the file, to host memory, and copies them
    /// from there to their locations.
    pub fn through_host(
        &self,
        file: &TensorFile,
        numbers: &[usize],
        locations: &[BlockLocation],
    ) -> Result<Vec<CompactHeader>> {
        let options = LoadOptions { map: false, ..*self.options };
        let loaded = load_counted(file, numbers, &options, self.counters, self.cancel)?;
        let data = loaded.iter().map(|tensor| match file.entry(tensor.number()) {
            Ok(entry) if !entry.is_meta() => tensor.memory.bytes(),
            _ => &[],
        });
        let sources = try_collect(data.map(|bytes| MemorySource::new(bytes, file.uri())), LISTS)?;
        let files = try_collect(sources.iter().map(|source| source as &dyn ReadAt), LISTS)?;
        let extents = files.iter().enumerate().map(|(file, source)| Extent {
            file,
            data_len: source.capabilities().len.unwrap_or(0),
            ..Extent::default()
        });
        // The bytes were counted when they were loaded.
        let (options, uncounted) =
            (LoadOptions { readers: Some(1), ..options }, Counters::default());
        let copies = DeviceUpload { options: &options, counters: &uncounted, ..*self };
        copies.copy(&files, &try_collect(extents, LISTS)?, locations)?;
        try_collect(loaded.into_iter().map(|tensor| tensor.header), LISTS)
    }
}
