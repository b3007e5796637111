//! Loads that end in torch's memory, on whatever device. One of the few doors to `unsafe`.
#![allow(unsafe_code)]

use std::mem::MaybeUninit;
use std::sync::Arc;

use tensorizer::TensorFile;
use tensorizer::cancel::Cancel;
use tensorizer::codec::KeptHeader;
use tensorizer::device::{
    self, Block, Blocks, CPU, Consumer, Device, DeviceMemory, Index, Streams,
};
use tensorizer::environment::GDS;
use tensorizer::error::{Error, Result};
use tensorizer::format::catalog::Entry;
use tensorizer::mem::pinned::Pool;
use tensorizer::stats::Counters;
use tensorizer::{
    Allocate as _, Destination, DeviceLoad, LoadOptions, load_counted, load_into_uninit,
};

use crate::allocator::TorchAllocator;
use crate::tensor::{Loaded, Place, expect_like, refused};
use crate::torch::{self, thrown};

/// Where new tensors are to be.
#[derive(Clone, Copy)]
pub struct Where {
    /// The device.
    pub device: Index,
    /// Whether each tensor on a device has memory of its own, instead of a part of a block.
    pub apart: bool,
}

/// Loads tensors, given by number, into new memory. Where a device cannot be reached from here,
/// they are in host memory, and torch has to copy them. Counts what it does.
pub fn load_tensors(
    file: &TensorFile,
    selection: &[usize],
    to: Where,
    options: &LoadOptions,
    counters: &Counters,
    cancel: &dyn Cancel,
) -> Result<(Loaded, Vec<KeptHeader>)> {
    for &number in selection {
        check_type(file.entry(number)?)?;
    }
    let found = device::find(to.device).unwrap_or_else(|error| {
        counters.fallback(&format!("through host memory and torch: {error}"));
        None
    });
    let Some(device) = found else {
        let loaded = load_counted(file, selection, options, counters, cancel)?;
        counters.publish("load", file.uri(), "cpu", selection.len());
        let (places, headers): (Vec<_>, Vec<_>) =
            loaded.into_iter().map(|tensor| (Place::Host(tensor.memory), tensor.header)).unzip();
        return Ok((Loaded::new(file, selection, places, None), headers));
    };
    let consumer = Consumer(torch::current_stream(to.device).map_err(thrown)?);
    // A graph that is being captured refuses here, before memory is taken.
    drop(Arc::clone(&device).stream(consumer)?);

    let planned = DeviceLoad::new(file, selection, to.apart)?;
    let lens = planned.block_lens()?;
    let blocks = Blocks::new(lens.len())?;
    let mut allocator = TorchAllocator::new(to.device);
    let mut next = 0;
    let mut allocate = || {
        let end = next + together(lens.get(next..).unwrap_or(&[]));
        let memory = allocator.allocate(next, lens.get(next..end).unwrap_or(&[]))?;
        // Work that was put on the stream before may still use the memory.
        let after = Some(Arc::clone(&device).mark(consumer)?);
        for (at, memory) in (next..end).zip(memory) {
            blocks.put(at, Block { memory, after: after.clone() })?;
        }
        next = end;
        Ok(next < lens.len())
    };
    let to = (&device, consumer, &blocks);
    let (headers, streams) = run(file, &planned, to, options, counters, cancel, &mut allocate)?;
    let list = allocator.into_blocks();
    streams.hand_over().map_err(|error| error.with_file("loading", file.uri()))?;
    counters.publish("load", file.uri(), device.name(), selection.len());
    let places = selection.iter().zip(planned.places()?).map(|(&number, place)| {
        let zeros = file.entry(number)?.is_meta();
        Ok(if zeros { Place::Zeros } else { Place::Block(place.block, place.offset) })
    });
    Ok((Loaded::new(file, selection, places.collect::<Result<_>>()?, Some(list)), headers))
}

/// Refuses tensors of types that torch has not.
pub(crate) fn check_type(entry: &Entry) -> Result<()> {
    if entry.dtype.is_of_torch() {
        return Ok(());
    }
    let known = entry.dtype.safetensors().map_or(entry.dtype.name(), |(name, _)| name);
    Err(Error::Unsupported(format!("tensor `{}`: torch has no dtype for {known}", entry.name)))
}

/// Loads to a device. Copies may be under way until the streams are handed over or dropped.
fn run(
    file: &TensorFile,
    planned: &DeviceLoad<'_>,
    (device, consumer, memory): (&Arc<dyn Device>, Consumer, &Blocks),
    options: &LoadOptions,
    counters: &Counters,
    cancel: &dyn Cancel,
    allocate: &mut dyn FnMut() -> Result<bool>,
) -> Result<(Vec<KeptHeader>, Streams)> {
    let direct_storage = GDS.value()? != 0;
    let pool = Pool::of(device)?;
    let to = Destination { device, consumer, memory, direct_storage, pool };
    planned
        .run(&to, options, counters, cancel, allocate)
        .map_err(|e| e.with_file("loading", file.uri()))
}

/// The number of first blocks that are allocated together: the first reads do not wait for all.
fn together(lens: &[u64]) -> usize {
    const LEN: u64 = 256 << 20;
    const MOST: usize = 1024;
    let mut bytes = 0u64;
    let fits = |len: &&u64| {
        bytes = bytes.saturating_add(**len);
        bytes <= LEN
    };
    lens.iter().take(MOST).take_while(fits).count().max(1).min(lens.len())
}

/// Fills tensors that exist, each on its device, in place. They are checked before any is touched:
/// type, shape, order in memory, and that no two overlap. Counts what it does.
///
/// # Safety
/// Nobody else reads or writes the tensors during the call.
pub unsafe fn load_into_tensors(
    file: &TensorFile,
    selection: &[usize],
    out: &torch::TensorList,
    options: &LoadOptions,
    counters: &Counters,
    cancel: &dyn Cancel,
) -> Result<Vec<KeptHeader>> {
    let found = Found::check(file, selection, out)?;
    let mut headers: Vec<Option<KeptHeader>> = selection.iter().map(|_| None).collect();
    let mut devices: Vec<Index> = found.iter().map(|tensor| tensor.device).collect();
    devices.sort_unstable();
    devices.dedup();
    // Whatever fails, copies to all devices have ended when this returns.
    let mut under_way: Vec<Streams> = Vec::new();
    let mut names: Vec<String> = Vec::new();
    for index in devices {
        let found: Vec<&Found> = found.iter().filter(|tensor| tensor.device == index).collect();
        let filled = match device::find(index)? {
            Some(device) => {
                // SAFETY: the caller's promise.
                let filled =
                    unsafe { fill_on_device(file, &found, &device, options, counters, cancel) };
                let (filled, streams) = filled?;
                under_way.push(streams);
                names.push(device.name().to_owned());
                for tensor in found.iter().filter(|tensor| tensor.meta) {
                    out.fill_zero(tensor.at).map_err(thrown)?;
                }
                filled
            }
            None if index == CPU => {
                names.push("cpu".to_owned());
                // SAFETY: as above.
                unsafe { fill_in_host(file, &found, options, counters, cancel) }?
            }
            None => return Err(Error::Bug(format!("host memory of device {index}"))),
        };
        for (tensor, header) in found.iter().zip(filled) {
            if let Some(slot) = headers.get_mut(tensor.at) {
                *slot = Some(header);
            }
        }
    }
    Streams::hand_over_all(under_way).map_err(|error| error.with_file("loading", file.uri()))?;
    counters.publish("load", file.uri(), &names.join(", "), selection.len());
    let missing = || Error::Bug("a tensor of no device".to_owned());
    headers.into_iter().map(|header| header.ok_or_else(missing)).collect()
}

/// Fills tensors in host memory.
///
/// # Safety
/// They are there, and nobody else reads or writes them during the call.
unsafe fn fill_in_host(
    file: &TensorFile,
    found: &[&Found],
    options: &LoadOptions,
    counters: &Counters,
    cancel: &dyn Cancel,
) -> Result<Vec<KeptHeader>> {
    let numbers: Vec<usize> = found.iter().map(|tensor| tensor.number).collect();
    // SAFETY: the caller's promise; `check` has found that each tensor has its bytes in one piece and
    // that no two overlap.
    let memory = found.iter().map(|tensor| unsafe { tensor.memory() }).collect();
    load_into_uninit(file, &numbers, memory, options, counters, cancel)
}

/// Fills tensors on a device. Copies may be under way until the streams are handed over or dropped.
///
/// # Safety
/// They are there, and nobody else reads or writes them until then.
unsafe fn fill_on_device(
    file: &TensorFile,
    found: &[&Found],
    device: &Arc<dyn Device>,
    options: &LoadOptions,
    counters: &Counters,
    cancel: &dyn Cancel,
) -> Result<(Vec<KeptHeader>, Streams)> {
    let numbers: Vec<usize> = found.iter().map(|tensor| tensor.number).collect();
    let index = found.first().map_or(CPU, |tensor| tensor.device);
    let blocks = found.iter().map(|tensor| {
        let len = if tensor.meta { 0 } else { tensor.len };
        // SAFETY: the caller's promise; the tensor has its bytes in one piece (`check`).
        unsafe { DeviceMemory::new(tensor.address, len) }
    });
    let consumer = Consumer(torch::current_stream(index).map_err(thrown)?);
    let planned = DeviceLoad::into_blocks(file, &numbers)?;
    let blocks = Blocks::of(blocks.collect())?;
    let to = (device, consumer, &blocks);
    run(file, &planned, to, options, counters, cancel, &mut || Ok(false))
}

/// A tensor that is to be filled.
struct Found {
    at: usize,
    number: usize,
    device: Index,
    address: usize,
    len: usize,
    /// It has no data in the file, and becomes zeros.
    meta: bool,
}

impl Found {
    /// Its memory in the host, which need not be initialised.
    ///
    /// # Safety
    /// It is in host memory, and nobody else uses it as long as this is.
    unsafe fn memory<'a>(&self) -> &'a mut [MaybeUninit<u8>] {
        if self.len == 0 {
            return &mut [];
        }
        let start = std::ptr::with_exposed_provenance_mut(self.address);
        // SAFETY: the tensor has `len` bytes from here on; the caller's promise.
        unsafe { std::slice::from_raw_parts_mut(start, self.len) }
    }

    /// Finds the memory of tensors, after checking that they fit and do not overlap.
    fn check(file: &TensorFile, selection: &[usize], out: &torch::TensorList) -> Result<Vec<Self>> {
        let mut found = Vec::with_capacity(selection.len());
        for (at, &number) in selection.iter().enumerate() {
            let entry = file.entry(number)?;
            let info = out.info(at).map_err(|e| refused(&entry.name, &e))?;
            expect_like(entry, &info)?;
            let len = entry.memory_len().and_then(|len| usize::try_from(len).ok());
            let len = len.ok_or_else(|| Error::Bug(format!("size of `{}`", entry.name)))?;
            let (device, meta) = (info.device, entry.is_meta());
            found.push(Found {
                at,
                number,
                device,
                address: out.writable(at).map_err(thrown)?,
                len,
                meta,
            });
        }
        let mut ranges: Vec<(Index, usize, usize)> = found
            .iter()
            .filter(|tensor| tensor.len > 0)
            .map(|tensor| (tensor.device, tensor.address, tensor.len))
            .collect();
        ranges.sort_unstable();
        let overlap = ranges.windows(2).any(
            |pair| matches!(pair, [(one, a, len), (other, b, _)] if one == other && a + len > *b),
        );
        if overlap {
            let what = "tensors to load into overlap in memory".to_owned();
            return Err(Error::InvalidArgument(what));
        }
        Ok(found)
    }
}
