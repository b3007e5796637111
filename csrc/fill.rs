//! Loads into existing tensors, on any device. One of the few modules that may use `unsafe`.
#![allow(unsafe_code)]

use std::mem::MaybeUninit;

use tensorizer::TensorFile;
use tensorizer::cancel::Cancel;
use tensorizer::codec::CompactHeader;
use tensorizer::device::{CPU, DeviceBlocks, DeviceIndex, DeviceMemory, Streams};
use tensorizer::error::{Error, Result};
use tensorizer::stats::Counters;
use tensorizer::{DeviceLoad, LoadOptions, load_into_uninit, to_usize};

use crate::devices::{CallDevices, TensorSubset, set_slot};
use crate::tensor::{expect_like, refused};
use crate::torch::{self, thrown};

/// Fills existing tensors in place, each on its device. All are checked before any is changed:
/// dtype, shape, row-major order in memory, and that no two overlap. Counts the work in `counters`.
///
/// # Safety
/// No other code reads or writes the tensors during the call.
pub unsafe fn load_into_tensors(
    file: &TensorFile,
    selection: &[usize],
    out: &torch::TensorList,
    options: &LoadOptions,
    counters: &Counters,
    cancel: &dyn Cancel,
) -> Result<Vec<CompactHeader>> {
    let found = ToFill::check(file, selection, out)?;
    let mut headers: Vec<Option<CompactHeader>> = selection.iter().map(|_| None).collect();
    let mut devices = CallDevices::default();
    let mut of_each = Vec::with_capacity(found.len());
    for tensor in &found {
        let device_position = devices.position_of(tensor.device, Err)?;
        if device_position.is_none() && tensor.device != CPU {
            return Err(Error::Bug(format!("host memory of device {}", tensor.device)));
        }
        of_each.push(device_position);
    }
    // Dropping the streams waits for copies: after an error, too, all copies have ended when this
    // returns.
    let mut streams: Vec<Streams> = Vec::new();
    for part in TensorSubset::divide(file, selection, &of_each) {
        let tensors = part.positions.iter().filter_map(|&at| found.get(at));
        let filled = if part.on_devices {
            let tensors = tensors.filter_map(|one| Some((one, (*of_each.get(one.at)?)?)));
            // SAFETY: the caller promises that no other code uses the tensors during the call, and
            // `out` keeps them alive. The streams are handed over or dropped before this returns.
            let run =
                unsafe { fill_on_devices(file, tensors, &devices, options, counters, cancel) };
            let (filled, of_run) = run?;
            streams.extend(of_run);
            for &at in &part.positions {
                if found.get(at).is_some_and(|one| one.meta) {
                    out.fill_zero(at).map_err(thrown)?;
                }
            }
            filled
        } else {
            // SAFETY: the caller promises that no other code uses the tensors during the call.
            // These are in host memory; `check` has found that each is contiguous and that no two
            // overlap.
            let memory = tensors.map(|tensor| unsafe { tensor.memory() }).collect();
            load_into_uninit(file, &part.numbers, memory, options, counters, cancel)?
        };
        for (&at, header) in part.positions.iter().zip(filled) {
            set_slot(&mut headers, at, header);
        }
    }
    let mut names = devices.names();
    if of_each.contains(&None) {
        names.insert(0, "cpu".to_owned());
    }
    Streams::hand_over_all(streams).map_err(|error| error.with_file("loading", file.uri()))?;
    file.report_fallbacks(counters);
    counters.publish("load", file.uri(), &names.join(", "), selection.len());
    let missing = || Error::Bug("a tensor that was not filled".to_owned());
    headers.into_iter().map(|header| header.ok_or_else(missing)).collect()
}

/// Fills tensors, each given with the position of its device in `devices`. Copies may be under way
/// until the streams are handed over or dropped.
///
/// # Safety
/// The tensors exist, and no other code reads or writes them until the streams are handed over or
/// dropped.
unsafe fn fill_on_devices<'t>(
    file: &TensorFile,
    tensors: impl Iterator<Item = (&'t ToFill, usize)>,
    devices: &CallDevices,
    options: &LoadOptions,
    counters: &Counters,
    cancel: &dyn Cancel,
) -> Result<(Vec<CompactHeader>, Vec<Streams>)> {
    let (mut numbers, mut of, mut blocks) = (Vec::new(), Vec::new(), Vec::new());
    for (tensor, device) in tensors {
        let len = if tensor.meta { 0 } else { tensor.len };
        numbers.push(tensor.number);
        of.push(device);
        // SAFETY: the caller promises that the tensor exists and that no other code uses it;
        // `check` has found that it is contiguous.
        blocks.push(unsafe { DeviceMemory::new(tensor.address, len) });
    }
    let planned = DeviceLoad::into_blocks(file, &numbers, of)?;
    let blocks = DeviceBlocks::from_memory(blocks)?;
    let run = devices.run(&planned, &blocks, (options, counters, cancel), &mut || Ok(false));
    run.map_err(|error| error.with_file("loading", file.uri()))
}

/// A tensor that is to be filled.
struct ToFill {
    at: usize,
    number: usize,
    device: DeviceIndex,
    address: usize,
    len: usize,
    /// True if the file has no data of the tensor, which becomes zeros.
    meta: bool,
}

impl ToFill {
    /// Returns the tensor's host memory, which need not be initialised.
    ///
    /// # Safety
    /// The memory is host memory, and no other code uses it during `'a`.
    unsafe fn memory<'a>(&self) -> &'a mut [MaybeUninit<u8>] {
        if self.len == 0 {
            return &mut [];
        }
        let start = std::ptr::with_exposed_provenance_mut(self.address);
        // SAFETY: the tensor has `len` bytes from this address on, in host memory that no other
        // code uses during `'a`: the caller promises it.
        unsafe { std::slice::from_raw_parts_mut(start, self.len) }
    }

    /// Checks that tensors fit the entries of the file and do not overlap. Returns them with their
    /// memory.
    fn check(file: &TensorFile, selection: &[usize], out: &torch::TensorList) -> Result<Vec<Self>> {
        let mut found = Vec::with_capacity(selection.len());
        for (at, &number) in selection.iter().enumerate() {
            let entry = file.entry(number)?;
            let info = out.info(at).map_err(|e| refused(&entry.name, &e))?;
            expect_like(entry, &info)?;
            let len = entry
                .memory_len()
                .map(to_usize)
                .ok_or_else(|| Error::Bug(format!("size of `{}`", entry.name)))?;
            let (device, meta) = (info.device, entry.is_meta());
            let address = out.writable(at).map_err(thrown)?;
            found.push(ToFill { at, number, device, address, len, meta });
        }
        let mut ranges: Vec<(DeviceIndex, usize, usize)> = found
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
