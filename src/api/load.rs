//! Loads to host memory.

use std::collections::BTreeMap;
use std::mem::MaybeUninit;
use std::sync::{Arc, Mutex, PoisonError};

use super::file::TensorFile;
use super::headers::{HeaderCodec, try_key};
use super::load_options::LoadOptions;
use super::selection::Selection;
use super::slices::load_slices;
use super::small_tensor::load_small;
use super::tensor::Tensor;
use crate::cancel::Cancel;
use crate::codec::CompactHeader;
use crate::engine::plan::{Extent, LargeTensors, MemoryLayout};
use crate::engine::read::{ReadRequest, read};
use crate::engine::target::host::{FileImage, HostTarget, ImageMemory};
use crate::engine::workers;
use crate::error::{Error, Result};
use crate::fallible::{
    LISTS, out_of_memory, try_collect, try_collect_results, try_push, try_repeat, try_with_capacity,
};
use crate::format::catalog::{Entry, Format};
use crate::io::as_refs;
use crate::mem::{Arena, HostBuffer, SliceRemainder, as_uninit, zero_fill};
use crate::stats::{Counters, Stage};

/// Tensors of a mapped file are used in place if they have this alignment, or that of their element
/// size if it is larger. Code that torch generates assumes this alignment. It also applies to
/// storages, whatever their elements. Safetensors files guarantee only the alignment of the element
/// size, and their own library uses tensors in place with that.
const MAPPED_ALIGNMENT: u64 = 16;
/// Minimum total bytes for mapping; fewer bytes are read, because the number of mappings of a
/// process is limited.
const MAPPED_FROM: u64 = 1 << 20;

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
    let verify = file.verify_hub_checksums(options, cancel)?;
    let sliced = selection.is_sliced();
    let options = &LoadOptions { map: options.map && !sliced, verify, ..*options };
    let load = || match load_small(file, numbers, options, counters, cancel)? {
        Some(loaded) => Ok(loaded),
        None => load_selected(&selection, numbers, options, counters, cancel),
    };
    file.with_intact_copies(cancel, load)
}

/// Loads tensors that were checked before.
fn load_selected(
    selection: &Selection<'_>,
    numbers: &[usize],
    options: &LoadOptions,
    counters: &Counters,
    cancel: &dyn Cancel,
) -> Result<Vec<Tensor>> {
    let (file, sliced) = (selection.file, selection.is_sliced());
    let mut memory = LoadMemory::new(selection, options)?;
    let headers = if sliced {
        let bytes = try_collect(memory.bytes()?.into_iter().map(as_uninit), LISTS)?;
        load_slices(selection, bytes, options, counters, cancel, &load_counted)?;
        no_headers(selection)?
    } else {
        memory.load(selection, options, counters, cancel)?
    };
    let buffers = selection.to_caller_order(memory.freeze()?)?;
    let loaded = numbers.iter().zip(headers).zip(buffers);
    let tensor = |((&number, header), memory)| {
        let entries = Arc::clone(file.shared_entries());
        Tensor { number, header, memory, entries }
    };
    try_collect(loaded.map(tensor), LISTS)
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
    let destinations = try_collect(destinations.into_iter().map(as_uninit), LISTS)?;
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
    let mut destinations = selection.to_file_order(destinations)?;
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
    let verify = file.verify_hub_checksums(options, cancel)?;
    let options = &LoadOptions { map: false, verify, ..*options };
    for (entry, destination) in selection.entries.iter().zip(&mut destinations) {
        if entry.is_meta() {
            destination.fill(MaybeUninit::new(0));
        }
    }
    file.with_intact_copies(cancel, || {
        let lent = destinations.iter_mut().map(|bytes| &mut **bytes);
        fill(&selection, try_collect(lent, LISTS)?, options, counters, cancel)
    })
}

/// Fills the memory of each tensor.
fn fill(
    selection: &Selection<'_>,
    destinations: Vec<&mut [MaybeUninit<u8>]>,
    options: &LoadOptions,
    counters: &Counters,
    cancel: &dyn Cancel,
) -> Result<Vec<CompactHeader>> {
    if selection.is_sliced() {
        load_slices(selection, destinations, options, counters, cancel, &load_counted)?;
        return no_headers(selection);
    }
    if selection.file.decryption().is_none() {
        let target = HostTarget::new(destinations, Vec::new());
        return read_to_host(selection, target, options, counters, cancel)?.0.into_headers();
    }
    let mut bytes = try_collect(destinations.into_iter().map(zero_fill), LISTS)?;
    let lent = try_collect(bytes.iter_mut().map(|bytes| as_uninit(bytes)), LISTS)?;
    let loaded =
        read_to_host(selection, HostTarget::new(lent, Vec::new()), options, counters, cancel);
    let loaded = loaded.and_then(|(headers, undecrypted)| {
        let bytes = try_collect(bytes.iter_mut().map(|bytes| &mut **bytes), LISTS)?;
        decrypt_wholes(&headers, &undecrypted, bytes, counters, cancel)?;
        headers.into_headers()
    });
    if loaded.is_err() {
        // Data that could not be authenticated are wiped.
        bytes.into_iter().for_each(|bytes| bytes.fill(0));
    }
    loaded
}

/// Returns empty headers, one for each tensor: slices are loaded without headers.
pub fn no_headers(selection: &Selection<'_>) -> Result<Vec<CompactHeader>> {
    try_collect(selection.entries.iter().map(|_| CompactHeader::none()), LISTS)
}

/// Reads to host memory. Returns the tensors that are still to be decrypted as a whole.
fn read_to_host<'s>(
    selection: &'s Selection<'s>,
    mut target: HostTarget<'_>,
    options: &LoadOptions,
    counters: &Counters,
    cancel: &dyn Cancel,
) -> Result<(HeaderCodec<'s>, Vec<usize>)> {
    try_key(selection, cancel)?;
    let headers = HeaderCodec::new(selection, options.verify, &|_, _| Ok(()))?;
    let sources = selection.file.sources();
    let reading = ReadRequest {
        files: &as_refs(&sources),
        extents: &selection.extents()?,
        codec: &headers,
        verify: options.verify,
        decrypts: headers.decrypts(),
        readers: options.readers,
        memory: options.memory,
        shares_cache: options.shares_cache,
        receiver: None,
    };
    let undecrypted = read(&reading, &mut target, counters, cancel)?;
    Ok((headers, undecrypted))
}

/// Decrypts tensors, each as a whole, several at once.
fn decrypt_wholes(
    headers: &HeaderCodec<'_>,
    undecrypted: &[usize],
    bytes: Vec<&mut [u8]>,
    counters: &Counters,
    cancel: &dyn Cancel,
) -> Result<()> {
    let queue = bytes.into_iter().enumerate();
    let queue = queue.filter(|(tensor, _)| undecrypted.binary_search(tensor).is_ok());
    let queue = try_collect(queue, LISTS)?;
    let threads = crate::cpu_count().min(queue.len());
    let queue = Mutex::new(queue);
    workers::run(threads, cancel, |control| {
        while !control.stopped() {
            let next = queue.lock().unwrap_or_else(PoisonError::into_inner).pop();
            let Some((tensor, bytes)) = next else { break };
            counters.time(Stage::Decrypt, || headers.decrypt_and_verify(tensor, bytes, control))?;
            counters.bytes(bytes.len() as u64);
        }
        Ok(())
    })
}

/// Host memory for the tensors of a load, in the order of the file.
struct LoadMemory {
    blocks: Vec<Arena>,
    layout: MemoryLayout,
    /// Mappings of the beginnings of files in which tensors are used in place, by file number.
    mappings: BTreeMap<usize, Arena>,
    tensors: Vec<TensorLocation>,
}

/// The location of a tensor's bytes.
enum TensorLocation {
    /// In a block.
    Block { block: usize, at: usize, len: usize },
    /// In the mapping of its file, which also has its header.
    Mapped { file: usize, header: usize, at: usize, len: usize },
}

impl LoadMemory {
    fn new(selection: &Selection<'_>, options: &LoadOptions) -> Result<Self> {
        let file = selection.file;
        let too_large = || out_of_memory(u64::MAX, format!("the tensors of `{}`", file.uri()));
        let in_place = used_in_place(file, &selection.entries, options)?;
        let mut own: Vec<(Extent, u64)> = try_with_capacity(in_place.len(), LISTS)?;
        let extents = selection.extents()?;
        for ((entry, extent), _) in
            selection.entries.iter().zip(extents).zip(&in_place).filter(|(_, in_place)| !**in_place)
        {
            own.push((extent, entry.memory_len().ok_or_else(too_large)?));
        }
        let layout = MemoryLayout::new(&own, LargeTensors::OneBlock).ok_or_else(too_large)?;
        let size = |n: u64| usize::try_from(n).map_err(|_| too_large());
        let blocks = layout.blocks.iter().map(|block| Arena::new(size(block.len)?));
        let blocks = try_collect_results(blocks, LISTS)?;
        let mut locations = layout.locations.iter().zip(&own);
        let tensors = selection.entries.iter().zip(&in_place).map(|(entry, in_place)| {
            if *in_place {
                let header = size(entry.header_offset)?;
                let (at, len) = (size(entry.data_offset)?, size(entry.data_len)?);
                return Ok(TensorLocation::Mapped { file: entry.file, header, at, len });
            }
            let (location, (_, len)) =
                locations.next().ok_or_else(|| Error::Bug("no place".to_owned()))?;
            Ok(TensorLocation::Block {
                block: location.block,
                at: size(location.offset)?,
                len: size(*len)?,
            })
        });
        let tensors = try_collect_results(tensors, LISTS)?;
        let mappings = map_tensors(file, &selection.entries, &in_place)?;
        Ok(LoadMemory { blocks, layout, mappings, tensors })
    }

    fn load(
        &mut self,
        selection: &Selection<'_>,
        options: &LoadOptions,
        counters: &Counters,
        cancel: &dyn Cancel,
    ) -> Result<Vec<CompactHeader>> {
        let (headers, undecrypted) =
            read_to_host(selection, self.target()?, options, counters, cancel)?;
        if !undecrypted.is_empty() {
            decrypt_wholes(&headers, &undecrypted, self.bytes()?, counters, cancel)?;
        }
        headers.into_headers()
    }

    /// Returns the bytes of each tensor; none for those that are mapped.
    fn bytes(&mut self) -> Result<Vec<&mut [u8]>> {
        let blocks =
            self.blocks.iter_mut().map(|block| Some(SliceRemainder::new(block.bytes_mut())));
        split_blocks(&self.tensors, try_collect(blocks, LISTS)?)
    }

    /// Returns all memory as a target for the engine.
    fn target(&mut self) -> Result<HostTarget<'_>> {
        let bug = || Error::Bug("an image beyond its block".to_owned());
        let mut images = Vec::new();
        for (&number, mapping) in &mut self.mappings {
            let mut rest = SliceRemainder::new(mapping.bytes_mut());
            for location in &self.tensors {
                let TensorLocation::Mapped { file, header, at, len } = *location else { continue };
                if file == number {
                    let memory = ImageMemory::Mapped(rest.cut(header, at + len - header)?);
                    let image = FileImage { file, position: header as u64, memory };
                    try_push(&mut images, image, LISTS)?;
                }
            }
        }
        let mut blocks = try_with_capacity(self.blocks.len(), LISTS)?;
        for (arena, block) in self.blocks.iter_mut().zip(&self.layout.blocks) {
            let bytes = arena.bytes_mut();
            let Some(span) = block.image else {
                blocks.push(Some(SliceRemainder::new(bytes)));
                continue;
            };
            let skip = usize::try_from(span.skip).map_err(|_| bug())?;
            let bytes = bytes.get_mut(skip..).ok_or_else(bug)?;
            let memory = ImageMemory::Empty(as_uninit(bytes));
            let image = FileImage { file: span.file, position: span.start, memory };
            try_push(&mut images, image, LISTS)?;
            blocks.push(None);
        }
        images.sort_unstable_by_key(|image| (image.file, image.position));
        let tensors = split_blocks(&self.tensors, blocks)?;
        Ok(HostTarget::new(try_collect(tensors.into_iter().map(as_uninit), LISTS)?, images))
    }

    /// Turns the memory into the buffers that tensors own from now on.
    fn freeze(self) -> Result<Vec<HostBuffer>> {
        let mut ranges = try_collect(self.blocks.iter().map(|_| Vec::new()), LISTS)?;
        let mut mapped: BTreeMap<usize, Vec<(usize, usize)>> = BTreeMap::new();
        for location in &self.tensors {
            match *location {
                TensorLocation::Mapped { file, at, len, .. } => {
                    try_push(mapped.entry(file).or_default(), (at, len), LISTS)?;
                }
                TensorLocation::Block { block, at, len } => {
                    let ranges = ranges.get_mut(block);
                    let ranges = ranges.ok_or_else(|| Error::Bug("no block".to_owned()))?;
                    try_push(ranges, (at, len), LISTS)?;
                }
            }
        }
        let blocks = self.blocks.into_iter().zip(&ranges);
        let blocks = blocks.map(|(block, ranges)| Ok(block.freeze(ranges)?.into_iter()));
        let mut blocks = try_collect_results(blocks, LISTS)?;
        let mappings = self.mappings.into_iter().map(|(file, mapping)| {
            let ranges = mapped.get(&file).map_or(&[][..], Vec::as_slice);
            Ok((file, mapping.freeze(ranges)?.into_iter()))
        });
        let mut mappings = mappings.collect::<Result<BTreeMap<_, _>>>()?;
        let buffers = self.tensors.iter().map(|location| {
            let buffer = match location {
                TensorLocation::Mapped { file, .. } => {
                    mappings.get_mut(file).and_then(Iterator::next)
                }
                TensorLocation::Block { block, .. } => {
                    blocks.get_mut(*block).and_then(Iterator::next)
                }
            };
            buffer.ok_or_else(|| Error::Bug("a tensor without memory".to_owned()))
        });
        try_collect_results(buffers, LISTS)
    }
}

/// Returns the bytes of each tensor in the given blocks; none for tensors that are elsewhere.
fn split_blocks<'a>(
    tensors: &[TensorLocation],
    mut blocks: Vec<Option<SliceRemainder<'a>>>,
) -> Result<Vec<&'a mut [u8]>> {
    let bytes = tensors.iter().map(|location| {
        let TensorLocation::Block { block, at, len } = *location else { return Ok(&mut [][..]) };
        let rest = blocks.get_mut(block).and_then(Option::as_mut);
        rest.map_or(Ok(&mut [][..]), |rest| rest.cut(at, len))
    });
    try_collect_results(bytes, LISTS)
}

fn used_in_place(
    file: &TensorFile,
    entries: &[&Entry],
    options: &LoadOptions,
) -> Result<Vec<bool>> {
    let share = |pair: &[&Entry]| matches!(pair, [one, next] if one.file == next.file && one.end() > next.header_offset);
    let map = options.map && !file.is_encrypted() && !entries.windows(2).any(share);
    let sources = file.sources();
    let local: Vec<bool> = sources.iter().map(|source| map && source.is_local()).collect();
    let min_alignment = if file.format() == Format::Safetensors { 1 } else { MAPPED_ALIGNMENT };
    let could = entries.iter().map(|entry| {
        let alignment = min_alignment.max(entry.dtype.size());
        local.get(entry.file) == Some(&true)
            && entry.data_len > 0
            && entry.data_offset.is_multiple_of(alignment)
    });
    let could = try_collect(could, LISTS)?;
    let total: u64 =
        entries.iter().zip(&could).filter(|(_, could)| **could).map(|(e, _)| e.data_len).sum();
    if total < MAPPED_FROM { try_repeat(false, entries.len(), LISTS) } else { Ok(could) }
}

/// Maps files from their start to the end of the last tensor in them that is used in place.
fn map_tensors(
    file: &TensorFile,
    entries: &[&Entry],
    in_place: &[bool],
) -> Result<BTreeMap<usize, Arena>> {
    let mut ends: BTreeMap<usize, u64> = BTreeMap::new();
    for (entry, _) in entries.iter().zip(in_place).filter(|(_, in_place)| **in_place) {
        let end = ends.entry(entry.file).or_default();
        *end = entry.end().max(*end);
    }
    let mappings = ends.into_iter().map(|(number, end)| {
        let source = file.source(number)?;
        let bug = || Error::Bug("a mapping of no file".to_owned());
        let handle = source.file().ok_or_else(bug)?;
        let uri = source.uri().to_owned();
        // If the file has shrunk since it was opened, the load must fail here, and not with SIGBUS
        // when the mapping is touched.
        let size = handle.metadata().map_err(|e| Error::io("examining", &uri, e))?.len();
        if size < end {
            let what = "mapping".to_owned();
            return Err(Error::Truncated { uri, what, start: 0, end, size });
        }
        Ok((number, Arena::map_file(&handle, end, &uri)?))
    });
    mappings.collect()
}
