//! The Rust functions behind the torch operators. They take an address and names, return tensors,
//! and report errors as text. One of the few modules that may use `unsafe`.
#![allow(unsafe_code)]

use std::collections::HashSet;
use std::sync::{Arc, OnceLock};

use tensorizer::crypt::{DecryptionOptions, EncryptionOptions, Key, Secret};
use tensorizer::device::{self, CPU, DeviceIndex};
use tensorizer::environment::{Guard, run_guarded};
use tensorizer::error::{Error, Result};
use tensorizer::format::catalog::Entry;
use tensorizer::io::OpenOptions;
use tensorizer::io::uri::{check_tensors_name, create};
use tensorizer::stats::Counters;
use tensorizer::{IterateOptions, LoadOptions, Order, SaveOptions, TensorFile, Verify, save_to};
use zeroize::Zeroizing;

use crate::fill::load_into_tensors;
use crate::guard::guard;
use crate::iterate::{self, TorchTensors};
use crate::load::{LoadDestination, load_tensors};
use crate::tensor::{LoadedTensors, to_save};
use crate::torch::{OpOptions, TensorList};

/// Called at intervals during every operator, and told if that saves; an error ends it. The Python
/// module sets it to check for Ctrl-C.
pub static INTERRUPT: OnceLock<fn(bool) -> Result<()>> = OnceLock::new();

/// A wrapper around the body of every operator. The Python module sets it to release the GIL: a
/// caller that holds the GIL must not keep it from threads that need it for a moment.
pub static UNLOCKED: OnceLock<Guard> = OnceLock::new();

/// Runs the body of an operator in the wrapper that was set; a panic becomes an error.
fn operator<T>(body: impl FnOnce() -> Result<T>) -> Result<T> {
    run_guarded(UNLOCKED.get(), || guard(body))
}

fn interrupt() -> Result<()> {
    INTERRUPT.get().map_or(Ok(()), |hook| hook(false))
}

fn interrupt_of_save() -> Result<()> {
    INTERRUPT.get().map_or(Ok(()), |hook| hook(true))
}

impl From<OpOptions> for LoadOptions {
    fn from(options: OpOptions) -> Self {
        LoadOptions {
            readers: usize::try_from(options.readers).ok().filter(|&readers| readers > 0),
            verify: Verify::all_if(options.verify),
            ..LoadOptions::default()
        }
    }
}

/// Makes a key of the bytes of an operator's argument, which are wiped; None if there are none.
fn take_key(bytes: Vec<u8>) -> Result<Option<Key>> {
    let bytes = Zeroizing::new(bytes);
    if bytes.is_empty() {
        return Ok(None);
    }
    Key::new(&bytes).map(Some)
}

/// Opens the file that an operator loads from.
fn open(uri: &str, options: &mut OpOptions) -> Result<TensorFile> {
    let key = take_key(std::mem::take(&mut options.key))?;
    let file = TensorFile::open_uri(uri, &interrupt)?;
    match key {
        None => Ok(file),
        Some(key) => file.decrypt(Arc::new(DecryptionOptions::new(Secret::Key(key))), &interrupt),
    }
}

/// Returns the numbers of the named tensors of a file, or of all.
fn selected(file: &TensorFile, names: &[String], all: bool) -> Result<Vec<usize>> {
    if all { Ok((0..file.entries().len()).collect()) } else { file.select(names) }
}

pub fn op_load(
    uri: &str,
    names: Vec<String>,
    all: bool,
    mut options: OpOptions,
) -> Result<Box<LoadedTensors>> {
    operator(|| {
        let file = open(uri, &mut options)?;
        loaded(&file, &selected(&file, &names, all)?, false, options)
    })
}

/// Returns dtype and shape of a tensor in the form that graphs carry: `float32[40,30]`.
fn describe(entry: &Entry) -> String {
    let shape: Vec<String> = entry.shape.iter().map(u64::to_string).collect();
    format!("{}[{}]", entry.dtype.name(), shape.join(","))
}

pub fn op_describe(uri: &str, names: Vec<String>) -> Result<Vec<String>> {
    operator(|| {
        let file = TensorFile::open_uri(uri, &interrupt)?;
        file.select(&names)?.into_iter().map(|number| file.entry(number).map(describe)).collect()
    })
}

pub fn op_load_checked(
    uri: &str,
    names: Vec<String>,
    expected: Vec<String>,
    mut options: OpOptions,
) -> Result<Box<LoadedTensors>> {
    operator(|| {
        if names.len() != expected.len() {
            let (names, expected) = (names.len(), expected.len());
            return Err(Error::InvalidArgument(format!(
                "expected as many entries in `expected` as names, found {names} names and \
                 {expected} entries"
            )));
        }
        let file = open(uri, &mut options)?;
        let selection = file.select(&names)?;
        for ((&number, name), expected) in selection.iter().zip(&names).zip(&expected) {
            let found = describe(file.entry(number)?);
            if found != *expected {
                return Err(Error::InvalidArgument(format!(
                    "tensor `{name}`: expected {expected}, as when the graph was traced, but \
                     `{uri}` holds {found} now: trace or compile it again"
                )));
            }
        }
        // Tensors that a graph gets from an operator may not share memory.
        loaded(&file, &selection, true, options)
    })
}

/// Loads tensors, given by number. With `separate_memory`, they share no block of a device's memory.
pub fn loaded(
    file: &TensorFile,
    selection: &[usize],
    separate_memory: bool,
    options: OpOptions,
) -> Result<Box<LoadedTensors>> {
    let destination = LoadDestination { devices: &[options.device], separate_memory };
    let (options, counters) = (options.into(), Counters::default());
    let loaded = load_tensors(file, selection, destination, &options, &counters, &interrupt)?;
    Ok(Box::new(loaded.0))
}

pub fn op_load_into(
    uri: &str,
    names: Vec<String>,
    out: &TensorList,
    mut options: OpOptions,
) -> Result<()> {
    operator(|| {
        let file = open(uri, &mut options)?;
        let selection = file.select(&names)?;
        let (options, counters) = (options.into(), Counters::default());
        // SAFETY: the caller of the operator lends `out` for the length of the call, and does not
        // use it meanwhile.
        unsafe { load_into_tensors(&file, &selection, out, &options, &counters, &interrupt) }
            .map(drop)
    })
}

/// Begins to load the named tensors of a file, or all, one by one. Returns the iterator's number.
/// `device`: see [`iterate::device_of`].
pub fn op_iterate(
    uri: &str,
    names: Vec<String>,
    all: bool,
    buffer_bytes: u64,
    ready: bool,
    device: &str,
    mut options: OpOptions,
) -> Result<i64> {
    operator(|| {
        let file = open(uri, &mut options)?;
        let numbers = selected(&file, &names, all)?;
        let order = if ready { Order::Ready } else { Order::File };
        let index = options.device;
        let options = IterateOptions { load: options.into(), buffer_bytes, order, complete: false };
        Ok(iterate::register(TorchTensors::new(&file, &numbers, index, &options)?, device))
    })
}

/// Returns the next tensors of an iterator; none at the end.
pub fn op_iterate_next(iterator: i64) -> Result<Box<LoadedTensors>> {
    operator(|| iterate::next(iterator, &interrupt).map(Box::new))
}

/// Ends the load of an iterator. Closing again does nothing.
pub fn op_iterate_close(iterator: i64) -> Result<()> {
    operator(|| {
        iterate::close(iterator);
        Ok(())
    })
}

/// True if the core itself can fill and read memory of a device, without a copy by torch.
pub fn reaches(device: DeviceIndex) -> bool {
    device == CPU || device::find(device).is_ok_and(|found| found.is_some())
}

pub fn op_names(uri: &str) -> Result<Vec<String>> {
    operator(|| {
        Ok(TensorFile::open_uri(uri, &interrupt)?
            .entries()
            .iter()
            .map(|entry| entry.name.stored().to_owned())
            .collect())
    })
}

pub fn op_save(uri: &str, names: Vec<String>, tensors: &TensorList, key: Vec<u8>) -> Result<()> {
    operator(|| {
        let mut seen = HashSet::new();
        if let Some(name) = names.iter().find(|name| !seen.insert(*name)) {
            return Err(Error::InvalidArgument(format!("tensor `{name}` is given twice")));
        }
        let encryption = take_key(key)?
            .map(|key| Arc::new(EncryptionOptions { key, derivation: None, manifest: false }));
        let options = SaveOptions { encryption, ..SaveOptions::default() };
        check_tensors_name(uri, true)?;
        let tensors = to_save(&names, tensors)?;
        let to = create(uri, &OpenOptions::from_environment()?, &interrupt_of_save)?;
        save_to(to, tensors, options, &interrupt_of_save)
    })
}
