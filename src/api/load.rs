//! Loads to host memory.

use std::mem::MaybeUninit;
use std::sync::Arc;

use super::file::TensorFile;
use super::headers::try_key;
use super::host_memory::{HostMemory, MAPPED_FROM, used_in_place};
use super::reads::{Reads, Run, To};
use super::selection::Selection;
use super::tensor::Tensor;
use crate::cancel::Cancel;
use crate::codec::CompactHeader;
use crate::engine::destination::host::{HostDestination, TensorMemory};
use crate::engine::load_options::LoadOptions;
use crate::error::{Error, Result};
use crate::format::catalog::Entry;
use crate::mem::{SliceRemainder, as_uninit};
use crate::stats::Counters;

/// Loads tensors, given by number, into memory of their own.
pub fn load(
    file: &TensorFile,
    numbers: &[usize],
    options: &LoadOptions,
    cancel: &dyn Cancel,
) -> Result<Vec<Tensor>> {
    load_counted(file, numbers, options, &Counters::default(), cancel)
}

/// Does the same, and counts the work in `counters`.
pub fn load_counted(
    file: &TensorFile,
    numbers: &[usize],
    options: &LoadOptions,
    counters: &Counters,
    cancel: &dyn Cancel,
) -> Result<Vec<Tensor>> {
    let selection = Selection::new(file, numbers)?;
    selection.check()?;
    let verify = file.compare_files(Some(&selection), options, cancel)?;
    let options = &LoadOptions { verify, ..*options };
    file.with_intact_copies(|| {
        let in_place = used_in_place(&selection, options)?;
        let mut memory = HostMemory::new(&selection, &in_place)?;
        let is_read = |(entry, at): &(&&Entry, &Option<_>)| entry.whole.is_some() && at.is_none();
        let read = selection.entries.iter().zip(&in_place).filter(is_read);
        let is_local = file.sources().iter().all(|source| source.facts().is_local);
        if options.map
            && is_local
            && read.map(|(entry, _)| entry.loaded_len()).sum::<u64>() >= MAPPED_FROM
        {
            counters.fallback(
                "slices are read although mapping was asked for: in place are only slices that are \
                 one aligned range of a file, overlap no other tensor, and are neither encrypted \
                 nor verified",
            );
        }
        // Whole tensors have their headers, and may be verified, in the mapping.
        let entries = selection.entries.iter().zip(&in_place);
        let unread = entries.map(|(entry, at)| entry.whole.is_some() && at.is_some()).collect();
        let to = memory.lend()?;
        let headers = read_to_host(&selection, unread, to, options, counters, cancel)?;
        file.agree(options, cancel)?;
        let loaded = headers.into_iter().zip(memory.freeze()?).collect();
        let loaded = numbers.iter().zip(selection.to_caller_order(loaded));
        let tensor = |(&number, (header, memory))| {
            let entries = Arc::clone(file.shared_entries());
            Tensor { number, header, memory, entries }
        };
        Ok(loaded.map(tensor).collect())
    })
}

/// Loads tensors, given by number, into memory of the caller. Each destination must have exactly
/// the tensor's length; if one has not, nothing is written to any of them.
pub fn load_into(
    file: &TensorFile,
    numbers: &[usize],
    destinations: Vec<&mut [u8]>,
    options: &LoadOptions,
    cancel: &dyn Cancel,
) -> Result<Vec<CompactHeader>> {
    let destinations = destinations.into_iter().map(as_uninit).collect();
    load_into_uninit(file, numbers, destinations, options, &Counters::default(), cancel)
}

/// Does the same for memory that need not be initialised; it is, if this returns without an error.
/// Counts the work in `counters`.
pub fn load_into_uninit(
    file: &TensorFile,
    numbers: &[usize],
    destinations: Vec<&mut [MaybeUninit<u8>]>,
    options: &LoadOptions,
    counters: &Counters,
    cancel: &dyn Cancel,
) -> Result<Vec<CompactHeader>> {
    let selection = Selection::new(file, numbers)?;
    selection.check()?;
    if numbers.len() != destinations.len() {
        return Err(Error::InvalidArgument(format!(
            "{} tensors to load into {} destinations",
            numbers.len(),
            destinations.len()
        )));
    }
    let mut destinations = selection.to_file_order(destinations);
    for (entry, destination) in selection.entries.iter().zip(&mut destinations) {
        if entry.memory_len() != Some(destination.len() as u64) {
            return Err(Error::InvalidArgument(format!(
                "tensor `{}` of {} {:?} needs {} bytes, its destination has {}",
                entry.name,
                entry.dtype,
                entry.shape,
                entry.memory_len().unwrap_or(u64::MAX),
                destination.len()
            )));
        }
    }
    // Before memory of the caller is written.
    let verify = file.compare_files(None, options, cancel)?;
    let options = &LoadOptions { map: false, verify, ..*options };
    for (entry, destination) in selection.entries.iter().zip(&mut destinations) {
        if entry.is_meta() {
            destination.fill(MaybeUninit::new(0));
        }
    }
    let headers = file.with_intact_copies(|| {
        let lent = destinations.iter_mut().map(|bytes| SliceRemainder::new(bytes));
        let to = HostDestination::new(TensorMemory::Lent(lent.collect()), Vec::new());
        let loaded = read_to_host(&selection, Vec::new(), to, options, counters, cancel);
        if loaded.is_err() && file.decryption().is_some() {
            // Data that could not be authenticated are wiped.
            destinations.iter_mut().for_each(|bytes| bytes.fill(MaybeUninit::new(0)));
        }
        loaded
    })?;
    Ok(selection.to_caller_order(headers))
}

/// Reads the tensors of a selection, but not the data of those that are used in place, and returns
/// their headers in the order of the file.
fn read_to_host(
    selection: &Selection<'_>,
    in_place: Vec<bool>,
    to: HostDestination<'_>,
    options: &LoadOptions,
    counters: &Counters,
    cancel: &dyn Cancel,
) -> Result<Vec<CompactHeader>> {
    try_key(selection, cancel)?;
    let run = Run::new(options, counters, cancel);
    let reads = Reads::new(selection, options)?.without(in_place);
    reads.read(To::host(to), &run, &|_| false, &mut || Ok(false))
}
