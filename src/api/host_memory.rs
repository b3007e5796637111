//! Host memory for the tensors of a load.

use std::collections::BTreeMap;
use std::ops::Range;

use super::file::TensorFile;
use super::reads::ranges_of;
use super::selection::Selection;
use crate::codec::hash::Verify;
use crate::engine::destination::host::{FileImage, HostDestination, RunMemory, TensorMemory};
use crate::engine::load_options::LoadOptions;
use crate::engine::plan::{Extent, LargeTensors, MemoryLayout, SliceRanges};
use crate::error::{Error, Result};
use crate::fallible::{collect_all, out_of_memory};
use crate::format::catalog::{Entry, Format};
use crate::mem::{Arena, HostBuffer, Mapping, SliceRemainder, as_uninit, zero_fill};
use crate::sys::to_usize;

/// Tensors of a mapped file are used in place if they have this alignment, or that of their element
/// size if it is larger. Code that torch generates assumes this alignment. It also applies to
/// storages, whatever their elements. Safetensors files guarantee only the alignment of the element
/// size, and their own library uses tensors in place with that.
const MAPPED_ALIGNMENT: u64 = 16;
/// Minimum total bytes for mapping; fewer bytes are read, because the number of mappings of a
/// process is limited.
pub const MAPPED_FROM: u64 = 1 << 20;

/// Host memory for the tensors of a load, in the order of the file.
pub struct HostMemory {
    blocks: Vec<Arena>,
    /// The beginnings of files in which tensors are used in place, numbered after the blocks.
    mappings: Vec<Mapping>,
    layout: MemoryLayout,
    tensors: Vec<HostLocation>,
}

/// The location of a tensor's bytes.
struct HostLocation {
    block: usize,
    at: usize,
    len: usize,
    /// For a whole tensor in a mapping: the number of its file, and the position of its header.
    mapped: Option<(usize, usize)>,
    /// True if the file has no bytes of it: they are all zeros.
    is_meta: bool,
}

impl HostMemory {
    /// Allocates the memory. `in_place`: for each tensor that is used in place, its bytes in its
    /// file.
    pub fn new(selection: &Selection<'_>, in_place: &[Option<Range<u64>>]) -> Result<Self> {
        let file = selection.file;
        let too_large = || out_of_memory(u64::MAX, format!("the tensors of `{}`", file.uri()));
        let mut own: Vec<(Extent, u64)> = Vec::with_capacity(in_place.len());
        let entries = selection.entries.iter().zip(in_place);
        for ((entry, in_place), extent) in entries.clone().zip(selection.extents()) {
            if in_place.is_none() {
                own.push((extent, entry.memory_len().ok_or_else(too_large)?));
            }
        }
        let layout = MemoryLayout::new(&own, LargeTensors::OneBlock).ok_or_else(too_large)?;
        let blocks = layout.blocks.iter().map(|block| Arena::new(to_usize(block.len)));
        let blocks = blocks.collect::<Result<Vec<_>>>()?;
        let mappings = map_tensors(file, &selection.entries, in_place)?;
        let block_of_file: BTreeMap<usize, usize> =
            mappings.iter().zip(blocks.len()..).map(|((file, _), block)| (*file, block)).collect();
        let mut locations = layout.locations.iter().zip(&own);
        let tensors = entries.map(|(entry, in_place)| {
            let (is_meta, block) = (entry.is_meta(), block_of_file.get(&entry.file));
            if let Some((range, &block)) = in_place.as_ref().zip(block) {
                let (at, len) = (to_usize(range.start), to_usize(range.end - range.start));
                let mapped = Some((entry.file, to_usize(entry.header_offset)));
                let mapped = mapped.filter(|_| entry.whole.is_none());
                return Ok(HostLocation { block, at, len, mapped, is_meta });
            }
            let (location, (_, len)) =
                locations.next().ok_or_else(|| Error::Bug("no place".to_owned()))?;
            let (at, len) = (to_usize(location.offset), to_usize(*len));
            Ok(HostLocation { block: location.block, at, len, mapped: None, is_meta })
        });
        let tensors = collect_all(tensors)?;
        let mappings = mappings.into_iter().map(|(_, mapping)| mapping).collect();
        Ok(HostMemory { blocks, mappings, layout, tensors })
    }

    /// Returns all memory as a destination.
    pub fn lend(&mut self) -> Result<HostDestination<'_>> {
        let bug = || Error::Bug("an image beyond its block".to_owned());
        let (count, mut images) = (self.blocks.len(), Vec::new());
        let rest = self.mappings.iter_mut().map(|mapping| SliceRemainder::new(mapping.bytes_mut()));
        let mut rest: Vec<SliceRemainder<'_, u8>> = rest.collect();
        let mut mapped: Vec<_> = self.tensors.iter().filter(|at| at.mapped.is_some()).collect();
        mapped.sort_by_key(|location| (location.block, location.at));
        for &HostLocation { block, at, len, mapped, .. } in mapped {
            let (Some(rest), Some((file, header))) = (rest.get_mut(block - count), mapped) else {
                return Err(bug());
            };
            let memory = RunMemory::Full(rest.cut(header, at + len - header)?);
            images.push(FileImage { file, position: header as u64, memory });
        }
        let mut blocks = Vec::with_capacity(count);
        let mut filled = Vec::new();
        for (arena, block) in self.blocks.iter_mut().zip(&self.layout.blocks) {
            let (bytes, of_block) = arena.lend();
            filled.extend(of_block);
            let Some(span) = block.image else {
                blocks.push(Some((SliceRemainder::new(bytes), of_block)));
                continue;
            };
            let bytes = bytes.get_mut(to_usize(span.skip)..).ok_or_else(bug)?;
            let memory = RunMemory::Empty(bytes);
            images.push(FileImage { file: span.file, position: span.start, memory });
            blocks.push(None);
        }
        images.sort_unstable_by_key(|image| (image.file, image.position));
        let tensors = self.tensors.iter().map(|location| {
            let Some((rest, filled)) = blocks.get_mut(location.block).and_then(Option::as_mut)
            else {
                return Ok(SliceRemainder::new(&mut []));
            };
            let bytes = rest.cut(location.at, location.len)?;
            match filled.filter(|_| location.is_meta) {
                // Other memory is zero from the start.
                Some(filled) => {
                    let zeros = zero_fill(bytes);
                    filled.add(zeros);
                    Ok(SliceRemainder::new(as_uninit(zeros)))
                }
                None => Ok(SliceRemainder::new(bytes)),
            }
        });
        let tensors = collect_all(tensors)?;
        Ok(HostDestination::new(TensorMemory::Lent(tensors), images).noting(filled))
    }

    /// Turns the memory into the buffers that tensors own from now on; an error if some of their
    /// bytes were not read.
    pub fn freeze(self) -> Result<Vec<HostBuffer>> {
        let bug = || Error::Bug("a tensor without memory".to_owned());
        let mappings = self.mappings.into_iter().map(Arena::of);
        let blocks: Vec<Arena> = self.blocks.into_iter().chain(mappings).collect();
        let mut ranges = vec![Vec::new(); blocks.len()];
        for location in &self.tensors {
            ranges.get_mut(location.block).ok_or_else(bug)?.push((location.at, location.len));
        }
        let blocks = blocks.into_iter().zip(&ranges);
        let blocks = blocks.map(|(block, ranges)| Ok(block.freeze(ranges)?.into_iter()));
        let mut blocks = blocks.collect::<Result<Vec<_>>>()?;
        let buffers = self.tensors.iter().map(|location| {
            blocks.get_mut(location.block).and_then(Iterator::next).ok_or_else(bug)
        });
        collect_all(buffers)
    }
}

/// Maps the tensors that are used in place.
pub fn mapped_buffers(
    selection: &Selection<'_>,
    in_place: &[Option<Range<u64>>],
) -> Result<Vec<Option<HostBuffer>>> {
    let mut buffers: Vec<Option<HostBuffer>> = in_place.iter().map(|_| None).collect();
    let tensors = selection.entries.iter().zip(in_place).zip(&mut buffers);
    let mut tensors = tensors.filter_map(|((entry, range), slot)| {
        let Range { start, end } = range.clone()?;
        Some((entry.file, (to_usize(start), to_usize(end - start)), slot))
    });
    let mut tensors = tensors.by_ref().peekable();
    for (file, mapping) in map_tensors(selection.file, &selection.entries, in_place)? {
        let of_file = std::iter::from_fn(|| tensors.next_if(|(of, ..)| *of == file));
        let (ranges, slots): (Vec<_>, Vec<_>) = of_file.map(|(_, at, slot)| (at, slot)).unzip();
        for (slot, buffer) in slots.into_iter().zip(Arena::of(mapping).freeze(&ranges)?) {
            *slot = Some(buffer);
        }
    }
    Ok(buffers)
}

/// Returns for each tensor that is used in place its bytes in its file; None for others. Tensors of
/// which some bytes are another's, too, are not: each may be written to.
pub fn used_in_place(
    selection: &Selection<'_>,
    options: &LoadOptions,
) -> Result<Vec<Option<Range<u64>>>> {
    let (file, entries) = (selection.file, &selection.entries);
    let none = vec![None; entries.len()];
    if !options.map || file.is_encrypted() {
        return Ok(none);
    }
    let sources = file.sources();
    let local: Vec<bool> = sources.iter().map(|source| source.facts().is_local).collect();
    let verified = options.verify != Verify::Nothing;
    let min_alignment = if file.format() == Format::Safetensors { 1 } else { MAPPED_ALIGNMENT };
    let found = entries.iter().map(|entry| {
        let Some(range) = range_of(entry)?.filter(|_| !verified || entry.whole.is_none()) else {
            return Ok(None);
        };
        let alignment = min_alignment.max(entry.dtype.size());
        let is_aligned = range.start.is_multiple_of(alignment) && !range.is_empty();
        Ok(Some(range).filter(|_| is_aligned && local.get(entry.file) == Some(&true)))
    });
    let found = collect_all(found)?;
    let all = entries.iter().zip(&found).map(|(entry, range)| {
        let (start, end) = match range {
            Some(range) => (range.start, range.end),
            // Of some slices, only a part of this is read.
            None => (entry.data_offset, entry.end()),
        };
        (entry.file, start, end, range.is_some())
    });
    let mut all: Vec<_> = all.filter(|(_, start, end, _)| start < end).collect();
    all.sort_unstable();
    let (mut in_file, mut reached, mut reached_mapped) = (None, 0, 0);
    let shares = all.iter().any(|&(file, start, end, mapped)| {
        if in_file != Some(file) {
            (in_file, reached, reached_mapped) = (Some(file), 0, 0);
        }
        let shares = start < if mapped { reached } else { reached_mapped };
        reached = end.max(reached);
        reached_mapped = if mapped { end.max(reached_mapped) } else { reached_mapped };
        shares
    });
    let mapped = all.iter().filter(|(.., mapped)| *mapped);
    let total = mapped.fold(0u64, |sum, (_, start, end, _)| sum.saturating_add(end - start));
    Ok(if total < MAPPED_FROM || shares { none } else { found })
}

/// The range of a file that has the bytes of a tensor; None if there are several.
fn range_of(entry: &Entry) -> Result<Option<Range<u64>>> {
    let Some(ranges) = ranges_of(entry)? else {
        return Ok(Some(entry.data_offset..entry.end()));
    };
    let one = |ranges: &SliceRanges| ranges.gap().is_none().then(|| ranges.starts().next())?;
    Ok(one(&ranges).map(|first| {
        let start = entry.data_offset.saturating_add(first);
        start..start.saturating_add(ranges.total())
    }))
}

/// Maps files from their start to the end of the last tensor in them that is used in place.
fn map_tensors(
    file: &TensorFile,
    entries: &[&Entry],
    in_place: &[Option<Range<u64>>],
) -> Result<Vec<(usize, Mapping)>> {
    let mut ends: BTreeMap<usize, u64> = BTreeMap::new();
    for (entry, range) in entries.iter().zip(in_place) {
        if let Some(range) = range {
            let end = ends.entry(entry.file).or_default();
            *end = range.end.max(*end);
        }
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
        Ok((number, Mapping::of_file(&handle, end, uri)?))
    });
    mappings.collect()
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::api::load::load;
    use crate::api::save_all::save;
    use crate::api::save_options::{SaveOptions, SaveTensor};
    use crate::cancel::Never;

    #[test]
    fn slices_that_overlap_are_read_and_others_used_in_place() {
        let folder = tempfile::tempdir().unwrap();
        let path = folder.path().join("f.tensors");
        let data: Vec<u16> = (0..600_000u32).map(|at| (at % 60_000) as u16).collect();
        let tensors = vec![SaveTensor::new("w", &[300_000, 2], &data[..]).unwrap()];
        save(&path, tensors, SaveOptions::default(), &Never).unwrap();
        let file = TensorFile::open(&path).unwrap();
        let options = LoadOptions { map: true, ..LoadOptions::default() };
        let slices = [
            (vec![(0..150_000, 0..2), (150_000..300_000, 0..2)], true),
            (vec![(0..300_000, 0..2), (1..300_000, 0..2)], false),
            (vec![(0..300_000, 0..2), (0..300_000, 1..2)], false),
        ];
        for (slices, in_place) in slices {
            let boxes = slices.iter().map(|(rows, columns)| -> (usize, Box<[Range<u64>]>) {
                (0, [rows.clone(), columns.clone()].into())
            });
            let cut = file.sliced(boxes.collect()).unwrap();
            let numbers: Vec<usize> = (0..slices.len()).collect();
            let selection = Selection::new(&cut, &numbers).unwrap();
            let found = used_in_place(&selection, &options).unwrap();
            assert!(found.iter().all(|range| range.is_some() == in_place), "{found:?}");
            let loaded = load(&cut, &numbers, &options, &Never).unwrap();
            for ((rows, columns), tensor) in slices.iter().zip(&loaded) {
                let rows = data.chunks(2).take(to_usize(rows.end)).skip(to_usize(rows.start));
                let expected: Vec<u16> = rows
                    .flat_map(|row| &row[to_usize(columns.start)..to_usize(columns.end)])
                    .copied()
                    .collect();
                assert!(tensor.as_slice::<u16>().unwrap() == expected, "{slices:?} {columns:?}");
            }
        }
    }
}
