//! Host memory for the tensors of a load.

use std::collections::BTreeMap;

use super::file::TensorFile;
use super::selection::Selection;
use crate::engine::destination::host::{FileImage, HostDestination, RunMemory, TensorMemory};
use crate::engine::load_options::LoadOptions;
use crate::engine::plan::{Extent, LargeTensors, MemoryLayout};
use crate::error::{Error, Result};
use crate::fallible::{collect_all, out_of_memory};
use crate::format::catalog::{Entry, Format};
use crate::mem::{Arena, HostBuffer, SliceRemainder, as_uninit};
use crate::sys::to_usize;

/// Tensors of a mapped file are used in place if they have this alignment, or that of their element
/// size if it is larger. Code that torch generates assumes this alignment. It also applies to
/// storages, whatever their elements. Safetensors files guarantee only the alignment of the element
/// size, and their own library uses tensors in place with that.
const MAPPED_ALIGNMENT: u64 = 16;
/// Minimum total bytes for mapping; fewer bytes are read, because the number of mappings of a
/// process is limited.
const MAPPED_FROM: u64 = 1 << 20;

/// Host memory for the tensors of a load, in the order of the file.
pub struct HostMemory {
    /// The blocks of the layout, then mappings of the beginnings of files in which tensors are used
    /// in place.
    blocks: Vec<Arena>,
    layout: MemoryLayout,
    tensors: Vec<HostLocation>,
}

/// The location of a tensor's bytes.
struct HostLocation {
    block: usize,
    at: usize,
    len: usize,
    /// For a block that is a mapping: the number of its file, and the position of the tensor's header.
    mapped: Option<(usize, usize)>,
}

impl HostMemory {
    /// Allocates the memory.
    pub fn new(selection: &Selection<'_>, options: &LoadOptions) -> Result<Self> {
        let file = selection.file;
        let too_large = || out_of_memory(u64::MAX, format!("the tensors of `{}`", file.uri()));
        let in_place = used_in_place(file, &selection.entries, options);
        let mut own: Vec<(Extent, u64)> = Vec::with_capacity(in_place.len());
        let entries = selection.entries.iter().zip(&in_place);
        for ((entry, in_place), extent) in entries.clone().zip(selection.extents()) {
            if !in_place {
                own.push((extent, entry.memory_len().ok_or_else(too_large)?));
            }
        }
        let layout = MemoryLayout::new(&own, LargeTensors::OneBlock).ok_or_else(too_large)?;
        let blocks = layout.blocks.iter().map(|block| Arena::new(to_usize(block.len)));
        let mut blocks = blocks.collect::<Result<Vec<_>>>()?;
        let mut block_of_file = BTreeMap::new();
        for (file, mapping) in map_tensors(file, &selection.entries, &in_place)? {
            block_of_file.insert(file, blocks.len());
            blocks.push(mapping);
        }
        let mut locations = layout.locations.iter().zip(&own);
        let tensors = entries.map(|(entry, in_place)| {
            if let Some(&block) = block_of_file.get(&entry.file).filter(|_| *in_place) {
                let (at, len) = (to_usize(entry.data_offset), to_usize(entry.data_len));
                let mapped = Some((entry.file, to_usize(entry.header_offset)));
                return Ok(HostLocation { block, at, len, mapped });
            }
            let (location, (_, len)) =
                locations.next().ok_or_else(|| Error::Bug("no place".to_owned()))?;
            let (at, len) = (to_usize(location.offset), to_usize(*len));
            Ok(HostLocation { block: location.block, at, len, mapped: None })
        });
        let tensors = collect_all(tensors)?;
        Ok(HostMemory { blocks, layout, tensors })
    }

    /// Returns all memory as a destination.
    pub fn lend(&mut self) -> Result<HostDestination<'_>> {
        let bug = || Error::Bug("an image beyond its block".to_owned());
        let mut images = Vec::new();
        let count = self.layout.blocks.len();
        let (arenas, mappings) = self.blocks.split_at_mut_checked(count).ok_or_else(bug)?;
        for (number, mapping) in (count..).zip(mappings) {
            let mut rest = SliceRemainder::new(mapping.bytes_mut());
            for &HostLocation { block, at, len, mapped } in &self.tensors {
                if let Some((file, header)) = mapped.filter(|_| block == number) {
                    let memory = RunMemory::Full(rest.cut(header, at + len - header)?);
                    images.push(FileImage { file, position: header as u64, memory });
                }
            }
        }
        let mut blocks = Vec::with_capacity(count);
        for (arena, block) in arenas.iter_mut().zip(&self.layout.blocks) {
            let bytes = arena.bytes_mut();
            let Some(span) = block.image else {
                blocks.push(Some(SliceRemainder::new(bytes)));
                continue;
            };
            let bytes = bytes.get_mut(to_usize(span.skip)..).ok_or_else(bug)?;
            let memory = RunMemory::Empty(as_uninit(bytes));
            images.push(FileImage { file: span.file, position: span.start, memory });
            blocks.push(None);
        }
        images.sort_unstable_by_key(|image| (image.file, image.position));
        let tensors = self.tensors.iter().map(|location| {
            let rest = blocks.get_mut(location.block).and_then(Option::as_mut);
            let bytes = rest.map_or(Ok(&mut [][..]), |rest| rest.cut(location.at, location.len))?;
            Ok(SliceRemainder::new(as_uninit(bytes)))
        });
        let tensors = collect_all(tensors)?;
        Ok(HostDestination::new(TensorMemory::Lent(tensors), images))
    }

    /// Turns the memory into the buffers that tensors own from now on.
    pub fn freeze(self) -> Result<Vec<HostBuffer>> {
        let bug = || Error::Bug("a tensor without memory".to_owned());
        let mut ranges = vec![Vec::new(); self.blocks.len()];
        for location in &self.tensors {
            ranges.get_mut(location.block).ok_or_else(bug)?.push((location.at, location.len));
        }
        let blocks = self.blocks.into_iter().zip(&ranges);
        let blocks = blocks.map(|(block, ranges)| Ok(block.freeze(ranges)?.into_iter()));
        let mut blocks = blocks.collect::<Result<Vec<_>>>()?;
        let buffers = self.tensors.iter().map(|location| {
            blocks.get_mut(location.block).and_then(Iterator::next).ok_or_else(bug)
        });
        collect_all(buffers)
    }
}

/// Returns for each tensor whether it is used in place, in a mapping of its file.
fn used_in_place(file: &TensorFile, entries: &[&Entry], options: &LoadOptions) -> Vec<bool> {
    let share = |pair: &[&Entry]| matches!(pair, [one, next] if one.file == next.file && one.end() > next.header_offset);
    let map = options.map && !file.is_encrypted() && !entries.windows(2).any(share);
    let sources = file.sources();
    let local: Vec<bool> = sources.iter().map(|source| map && source.facts().is_local).collect();
    let min_alignment = if file.format() == Format::Safetensors { 1 } else { MAPPED_ALIGNMENT };
    let could = entries.iter().map(|entry| {
        let alignment = min_alignment.max(entry.dtype.size());
        local.get(entry.file) == Some(&true)
            && entry.data_len > 0
            && entry.data_offset.is_multiple_of(alignment)
    });
    let could: Vec<bool> = could.collect();
    let total: u64 =
        entries.iter().zip(&could).filter(|(_, could)| **could).map(|(e, _)| e.data_len).sum();
    if total < MAPPED_FROM { vec![false; entries.len()] } else { could }
}

/// Maps files from their start to the end of the last tensor in them that is used in place.
fn map_tensors(
    file: &TensorFile,
    entries: &[&Entry],
    in_place: &[bool],
) -> Result<Vec<(usize, Arena)>> {
    let mut ends: BTreeMap<usize, u64> = BTreeMap::new();
    for (entry, _) in entries.iter().zip(in_place).filter(|(_, in_place)| **in_place) {
        let end = ends.entry(entry.file).or_default();
        *end = entry.end().max(*end);
    }
    let mappings = ends.into_iter().map(|(number, end)| {
        let source = file.source(number)?;
        let bug = || Error::Bug("a mapping of no file".to_owned());
        let handle = source.file().ok_or_else(bug)?;
        let uri = source.uri();
        // If the file has shrunk since it was opened, the load must fail here, and not with SIGBUS
        // when the mapping is touched.
        let size = handle.metadata().map_err(|e| Error::io("examining", uri, e))?.len();
        if size < end {
            return Err(Error::truncated(uri, "mapping", 0..end, size));
        }
        Ok((number, Arena::map_file(&handle, end, uri)?))
    });
    mappings.collect()
}
