//! Loads that end in torch's memory, on whatever device. One of the few doors to `unsafe`.
#![allow(unsafe_code)]

use std::sync::Arc;

use tensorizer::TensorFile;
use tensorizer::cancel::Cancel;
use tensorizer::codec::KeptHeader;
use tensorizer::device::{self, CPU, Consumer, Device, DeviceMemory, Index};
use tensorizer::engine::plan::{Target, blocks};
use tensorizer::engine::upload::{Destination, Uploaded, copy, upload};
use tensorizer::environment::GDS;
use tensorizer::error::{Error, Result};
use tensorizer::format::index::Entry;
use tensorizer::mem::pinned::Pool;
use tensorizer::stats::{Counters, PAGEABLE};
use tensorizer::{LoadOptions, load, load_into};

use crate::tensor::{Loaded, Place, expect_like};
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
/// they are in host memory, and torch has to copy them.
pub fn load_tensors(
    file: &TensorFile,
    selection: &[usize],
    to: Where,
    options: &LoadOptions,
    cancel: &dyn Cancel,
) -> Result<(Loaded, Vec<KeptHeader>)> {
    let counters = Counters::default();
    let found = device::find(to.device).unwrap_or_else(|error| {
        counters.fallback(&format!("through host memory and torch: {error}"));
        None
    });
    let Some(device) = found else {
        let loaded = load(file, selection, options, cancel)?;
        counters.bytes(loaded.iter().map(|tensor| tensor.memory.bytes().len() as u64).sum());
        counters.publish("load", file.uri(), "cpu", selection.len());
        let (places, headers): (Vec<_>, Vec<_>) = loaded
            .into_iter()
            .map(|tensor| ((tensor.number, Place::Host(tensor.memory)), tensor.header))
            .unzip();
        return Ok((Loaded::new(file, places.into_iter(), None)?, headers));
    };
    let consumer = Consumer(torch::current_stream(to.device).map_err(thrown)?);
    // A graph that is being captured refuses here, before memory is taken.
    drop(Arc::clone(&device).stream(consumer)?);

    let entries = selection.iter().map(|&number| file.entry(number)).collect::<Result<Vec<_>>>()?;
    let (block_lens, places) = in_file_order(&entries, to.apart);
    let list = torch::new_blocks(to.device, &block_lens)
        .map_err(|e| out_of_memory(&e).with_file("loading", file.uri()))?;
    let tensors = list.as_ref().ok_or_else(|| Error::Bug("no blocks".to_owned()))?;
    let targets = targets(&places)?;
    let memory = block_lens.iter().enumerate().map(|(at, &len)| {
        // SAFETY: a new tensor of so many bytes that nobody else knows; `run` waits for all copies
        // before it returns an error, and the consumer's stream does before the tensor is used.
        Ok(unsafe { DeviceMemory::new(tensors.writable(at).map_err(thrown)?, size(len)?) })
    });
    let blocks = memory.collect::<Result<Vec<_>>>()?;
    let at = (&device, consumer, blocks.as_slice(), targets.as_slice());
    let uploaded = run(file, selection, at, options, &counters, cancel)?;
    let placed =
        selection.iter().zip(&entries).zip(&places).map(|((&number, entry), &(block, offset))| {
            let zeros = entry.is_meta();
            (number, if zeros { Place::Zeros } else { Place::Block(block, offset) })
        });
    Ok((Loaded::new(file, placed, Some(list))?, uploaded.headers))
}

/// A device, who uses it, memory there, and the place of each tensor in it.
type Places<'a> = (&'a Arc<dyn Device>, Consumer, &'a [DeviceMemory], &'a [Target]);

/// Loads to a device, by way of host memory where that is needed.
fn run(
    file: &TensorFile,
    selection: &[usize],
    (device, consumer, blocks, targets): Places<'_>,
    options: &LoadOptions,
    counters: &Counters,
    cancel: &dyn Cancel,
) -> Result<Uploaded> {
    let direct_storage = GDS.value()? != 0;
    let to = &Destination { device, consumer, blocks, targets, direct_storage };
    let pool = Pool::of(device)?;
    let named = |error: Error| error.with_file("loading", file.uri());
    let uploaded = match upload(file, selection, to, pool, options, counters, cancel)
        .map_err(named)?
    {
        Some(uploaded) => uploaded,
        None => {
            counters.fallback("decrypted in host memory: pieces of encryption of unusual length");
            let options = LoadOptions { map: false, ..*options };
            let loaded = load(file, selection, &options, cancel)?;
            let bytes = loaded.iter().map(|tensor| match file.entry(tensor.number) {
                Ok(entry) if !entry.is_meta() => tensor.memory.bytes(),
                _ => &[],
            });
            copy(bytes, to, pool, counters, cancel).map_err(named)?;
            let headers = loaded.into_iter().map(|tensor| tensor.header).collect();
            Uploaded { headers }
        }
    };
    if pool.is_pageable() {
        counters.fallback(PAGEABLE);
    }
    counters.publish("load", file.uri(), to.device.name(), selection.len());
    Ok(uploaded)
}

/// Blocks for new tensors, and the place of each, in the order of the selection. What is adjacent
/// in the file is adjacent in a block.
fn in_file_order(entries: &[&Entry], apart: bool) -> (Vec<u64>, Vec<(usize, u64)>) {
    let mut order: Vec<usize> = (0..entries.len()).collect();
    order.sort_by_key(|&tensor| entries.get(tensor).map(|entry| entry.header_offset));
    let lens: Vec<u64> =
        order.iter().filter_map(|&t| entries.get(t)).map(|entry| entry.data_len).collect();
    let (lens, sorted) = blocks(&lens, apart);
    let mut places = vec![(0, 0); entries.len()];
    for (tensor, place) in order.into_iter().zip(sorted) {
        if let Some(slot) = places.get_mut(tensor) {
            *slot = place;
        }
    }
    (lens, places)
}

fn targets(places: &[(usize, u64)]) -> Result<Vec<Target>> {
    places.iter().map(|&(block, offset)| Ok(Target { block, offset: size(offset)? })).collect()
}

fn size(len: u64) -> Result<usize> {
    usize::try_from(len).map_err(|_| Error::Bug(format!("{len} bytes on a device")))
}

/// What torch's allocator says.
fn out_of_memory(exception: &cxx::Exception) -> Error {
    let what = exception.what().to_owned();
    // The allocator of CUDA, and that of the CPU.
    if what.contains("out of memory") || what.contains("allocate memory") {
        Error::DeviceMemory { what }
    } else {
        Error::Device { device: "torch".to_owned(), what }
    }
}

/// Fills tensors that exist, each on its device, in place. They are checked before any is touched:
/// type, shape, order in memory, and that no two overlap.
///
/// # Safety
/// Nobody else reads or writes the tensors during the call.
pub unsafe fn load_into_tensors(
    file: &TensorFile,
    selection: &[usize],
    out: &torch::TensorList,
    options: &LoadOptions,
    cancel: &dyn Cancel,
) -> Result<Vec<KeptHeader>> {
    let found = Found::check(file, selection, out)?;
    let mut headers: Vec<Option<KeptHeader>> = selection.iter().map(|_| None).collect();
    let mut keep = |at: &[usize], new: Vec<KeptHeader>| {
        for (&at, header) in at.iter().zip(new) {
            if let Some(slot) = headers.get_mut(at) {
                *slot = Some(header);
            }
        }
    };
    let mut devices: Vec<Index> = found.iter().map(|tensor| tensor.device).collect();
    devices.sort_unstable();
    devices.dedup();
    for index in devices {
        let of_device = |tensor: &&Found| tensor.device == index;
        let at: Vec<usize> = found.iter().filter(of_device).map(|tensor| tensor.at).collect();
        let numbers: Vec<usize> = found.iter().filter(of_device).map(|t| t.number).collect();
        let device = device::find(index)?;
        if device.is_none() && index != CPU {
            return Err(Error::Bug(format!("host memory of device {index}")));
        }
        let Some(device) = device else {
            let memory = found.iter().filter(of_device).map(|tensor| {
                if tensor.len == 0 {
                    return &mut [][..];
                }
                let start = std::ptr::with_exposed_provenance_mut(tensor.address);
                // SAFETY: the tensor has `len` bytes in one piece from here on (`check`); the list
                // keeps it alive; no two overlap, and the caller promises that nobody else uses it.
                unsafe { std::slice::from_raw_parts_mut(start, tensor.len) }
            });
            let memory = memory.collect();
            let counters = Counters::default();
            keep(&at, load_into(file, &numbers, memory, options, cancel)?);
            let of_these = found.iter().filter(of_device);
            counters.bytes(of_these.map(|tensor| tensor.len as u64).sum());
            counters.publish("load", file.uri(), "cpu", numbers.len());
            continue;
        };
        let blocks = found.iter().filter(of_device).map(|tensor| {
            let len = if tensor.meta { 0 } else { tensor.len };
            // SAFETY: as above; `run` waits for all copies before it returns an error, and the
            // consumer's stream does before the tensor is used.
            unsafe { DeviceMemory::new(tensor.address, len) }
        });
        let blocks: Vec<DeviceMemory> = blocks.collect();
        let targets: Vec<Target> =
            (0..blocks.len()).map(|block| Target { block, offset: 0 }).collect();
        let consumer = Consumer(torch::current_stream(index).map_err(thrown)?);
        let places = (&device, consumer, blocks.as_slice(), targets.as_slice());
        let counters = Counters::default();
        keep(&at, run(file, &numbers, places, options, &counters, cancel)?.headers);
        for tensor in found.iter().filter(of_device).filter(|tensor| tensor.meta) {
            out.fill_zero(tensor.at).map_err(thrown)?;
        }
    }
    let missing = || Error::Bug("a tensor of no device".to_owned());
    headers.into_iter().map(|header| header.ok_or_else(missing)).collect()
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
    /// Finds the memory of tensors, after checking that they fit and do not overlap.
    fn check(file: &TensorFile, selection: &[usize], out: &torch::TensorList) -> Result<Vec<Self>> {
        let mut found = Vec::with_capacity(selection.len());
        for (at, &number) in selection.iter().enumerate() {
            let entry = file.entry(number)?;
            let info = out.info(at).map_err(thrown)?;
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
