//! The read path: source → plan → buffer → transform → tensor.

use std::collections::HashSet;

use crate::api::file::TensorFile;
use crate::cancel::Cancel;
use crate::codec::KeptHeader;
use crate::engine::fill::{Slot, fill};
use crate::engine::plan::pack;
use crate::error::{Error, Result};
use crate::format::index::Entry;
use crate::io::source::{MemorySource, ReadAt};
use crate::mem::{Arena, HostBuffer};

/// How to load. The default reads with the source's own number of readers and verifies nothing.
#[derive(Debug, Clone, Copy, Default)]
pub struct LoadOptions {
    /// Threads that read at once, where the source allows more than one.
    pub readers: Option<usize>,
    /// Which stored hashes every tensor is compared with.
    pub verify: Verify,
    /// Whether tensors are used in place in a private, copy-on-write mapping of their file, whose
    /// bytes come into memory when they are first touched. Other sources than files, and tensors
    /// whose data are not aligned, are read in any case.
    ///
    /// Such a file must not be written to or cut short while such tensors live: they would show
    /// other bytes, or touching them would end the process (SIGBUS).
    pub map: bool,
}

/// Which of the hashes in a file are compared. A tensor without one is an error.
#[derive(Debug, Clone, Copy, Default, PartialEq, Eq)]
pub enum Verify {
    /// None.
    #[default]
    Nothing,
    /// CRC-32, which finds damage by accident and costs little.
    Crc32,
    /// All that are there: CRC-32 and SHA-256.
    All,
}

impl Verify {
    /// All or nothing.
    pub fn all_if(wanted: bool) -> Self {
        if wanted { Verify::All } else { Verify::Nothing }
    }
}

/// A tensor whose bytes have arrived.
pub struct LoadedTensor {
    /// Its number in the file.
    pub number: usize,
    /// Its header, which agrees with the index.
    pub header: KeptHeader,
    /// Its bytes.
    pub memory: HostBuffer,
}

/// Tensors in a mapped file are used in place from this alignment on, or their element size's;
/// code that torch generates assumes as much.
const MAPPED_ALIGNMENT: u64 = 16;
/// Less than this is read in any case: each mapping costs one of the few that a process may have.
const MAPPED_FROM: u64 = 1 << 20;

/// Loads tensors, given by number, into memory of their own.
pub fn load(
    file: &TensorFile,
    selection: &[usize],
    options: &LoadOptions,
    cancel: &dyn Cancel,
) -> Result<Vec<LoadedTensor>> {
    check_selection(file, selection)?;
    let entries = selection.iter().map(|&number| file.entry(number)).collect::<Result<Vec<_>>>()?;
    let in_place = used_in_place(file, &entries, options);

    let lens = entries.iter().zip(&in_place).map(
        |(entry, &mapped)| {
            if mapped { Some(0) } else { entry.memory_len() }
        },
    );
    let (packed, packed_len) = pack(lens).ok_or_else(|| Error::OutOfMemory {
        bytes: u64::MAX,
        what: format!("the tensors of `{}`", file.uri()),
        error: std::io::Error::from(std::io::ErrorKind::OutOfMemory),
    })?;
    let mut arena = Arena::new(packed_len)?;
    let mut mapping = map_tensors(file, &entries, &in_place)?;

    let mapped: &[u8] = mapping.as_mut().map_or(&[][..], |m| &*m.bytes_mut());
    let slots = slots(arena.bytes_mut(), &packed, mapped, &entries, &in_place)?;
    let (of_file, of_mapping) = (file.source(), MemorySource::new(mapped, file.uri()));
    let source: &dyn ReadAt = if mapped.is_empty() { &*of_file } else { &of_mapping };
    let headers = fill(file, source, &entries, slots, options, cancel)?;

    let mapped = match mapping {
        Some(mapping) => mapping.freeze(&mapped_ranges(&entries, &in_place)?)?,
        None => Vec::new(),
    };
    let (mut read, mut mapped) = (arena.freeze(&packed)?.into_iter(), mapped.into_iter());
    let memory = in_place.iter().map(|&in_place| {
        // Every tensor has a place in the packed block; that of a mapped one is empty.
        let packed = read.next();
        if in_place { mapped.next() } else { packed }
    });
    let loaded =
        selection.iter().zip(headers).zip(memory).filter_map(|((&number, header), memory)| {
            Some(LoadedTensor { number, header, memory: memory? })
        });
    Ok(loaded.collect())
}

/// Loads tensors, given by number, into memory that the caller has. Each destination must have
/// exactly the tensor's length; nothing is written to any of them if one has not.
pub fn load_into(
    file: &TensorFile,
    selection: &[usize],
    mut destinations: Vec<&mut [u8]>,
    options: &LoadOptions,
    cancel: &dyn Cancel,
) -> Result<Vec<KeptHeader>> {
    check_selection(file, selection)?;
    let entries = selection.iter().map(|&number| file.entry(number)).collect::<Result<Vec<_>>>()?;
    if entries.len() != destinations.len() {
        return Err(Error::InvalidArgument(format!(
            "{} tensors to load into {} destinations",
            entries.len(),
            destinations.len()
        )));
    }
    for (entry, destination) in entries.iter().zip(&destinations) {
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
    let slots = entries.iter().zip(&mut destinations).map(|(entry, destination)| {
        if entry.is_meta() {
            destination.fill(0);
        }
        Slot::Read(destination)
    });
    let slots = slots.collect();
    let filled = fill(file, &*file.source(), &entries, slots, options, cancel);
    if filled.is_err() && file.decryption().is_some() {
        // Nothing is left of what could not be authenticated.
        for destination in destinations {
            destination.fill(0);
        }
    }
    filled
}

pub fn check_selection(file: &TensorFile, selection: &[usize]) -> Result<()> {
    let mut seen = HashSet::with_capacity(selection.len());
    for &number in selection {
        if !seen.insert(number) {
            let name = &file.entry(number)?.name;
            return Err(Error::InvalidArgument(format!("tensor `{name}` is asked for twice")));
        }
    }
    let locked = file.prologue().encrypted && file.decryption().is_none();
    if let Some(entry) = file.entries().first().filter(|_| locked) {
        return Err(Error::Crypt(format!(
            "Tensor is encrypted, but decryption was not requested: `{}` in `{}`",
            entry.name,
            file.uri()
        )));
    }
    Ok(())
}

fn used_in_place(file: &TensorFile, entries: &[&Entry], options: &LoadOptions) -> Vec<bool> {
    let map = options.map && !file.prologue().encrypted && file.source().file().is_some();
    let could: Vec<bool> = entries.iter().map(|entry| map && can_be_mapped(entry)).collect();
    let total: u64 =
        entries.iter().zip(&could).filter(|(_, could)| **could).map(|(e, _)| e.data_len).sum();
    if total < MAPPED_FROM { vec![false; entries.len()] } else { could }
}

fn can_be_mapped(entry: &Entry) -> bool {
    entry.data_len > 0 && entry.data_offset.is_multiple_of(MAPPED_ALIGNMENT.max(entry.dtype.size()))
}

/// Maps the file from its start to the end of the last tensor, if any tensor is used in place.
fn map_tensors(file: &TensorFile, entries: &[&Entry], in_place: &[bool]) -> Result<Option<Arena>> {
    let end = entries.iter().map(|entry| entry.end()).max();
    let end = end.filter(|_| in_place.contains(&true));
    let source = file.source();
    let (Some(handle), Some(end)) = (source.file(), end) else {
        return Ok(None);
    };
    // A file that has shrunk since its index was read must fail here, not when it is touched.
    let size = handle.metadata().map_err(|e| Error::io("examining", file.uri(), e))?.len();
    if size < end {
        let what = "mapping".to_owned();
        return Err(Error::Truncated { uri: file.uri().to_owned(), what, start: 0, end, size });
    }
    Arena::map_file(handle, end, file.uri()).map(Some)
}

/// `(offset, len)` in the mapping of each tensor that is used in place, in rising order.
fn mapped_ranges(entries: &[&Entry], in_place: &[bool]) -> Result<Vec<(usize, usize)>> {
    let size =
        |n: u64| usize::try_from(n).map_err(|_| Error::Bug(format!("byte {n} of a mapping")));
    entries
        .iter()
        .zip(in_place)
        .filter(|(_, in_place)| **in_place)
        .map(|(entry, _)| Ok((size(entry.data_offset)?, size(entry.data_len)?)))
        .collect()
}

/// Hands each tensor its part of the block or of the mapping.
fn slots<'a>(
    block: &'a mut [u8],
    packed: &[(usize, usize)],
    mapped: &'a [u8],
    entries: &[&Entry],
    in_place: &[bool],
) -> Result<Vec<Slot<'a>>> {
    let mut ranges = mapped_ranges(entries, in_place)?.into_iter();
    let (mut rest, mut position) = (block, 0);
    let mut slots = Vec::with_capacity(entries.len());
    for (&(start, len), &in_place) in packed.iter().zip(in_place) {
        let bug = || Error::Bug(format!("tensor at {start} of {len} bytes has no place"));
        let (_, after) = rest.split_at_mut_checked(start - position).ok_or_else(bug)?;
        let (mine, after) = after.split_at_mut_checked(len).ok_or_else(bug)?;
        (rest, position) = (after, start + len);
        slots.push(if in_place {
            let (at, len) = ranges.next().ok_or_else(bug)?;
            Slot::InPlace(mapped.get(at..at + len).ok_or_else(bug)?)
        } else {
            Slot::Read(mine)
        });
    }
    Ok(slots)
}
