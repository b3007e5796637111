//! Loads of slices, which read only the bytes of the slices.
//!
//! Long contiguous ranges are read straight to their destination. Short ranges are read together
//! with the bytes between them. Pieces of encryption are read and decrypted as a whole. A tensor
//! whose hashes are verified is read as a whole, and then cut.

use std::mem::MaybeUninit;
use std::ops::Range;
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, Ordering};

use super::file::TensorFile;
use super::headers::visit_headers_once;
use super::load_options::LoadOptions;
use super::selection::Selection;
use super::slice_rules::{MAX_GROUP_LEN, RangeRules};
use super::tensor::Tensor;
use crate::cancel::Cancel;
use crate::codec::crypt::{DecryptionOptions, PIECE_LEN};
use crate::codec::decrypt::Decryptor;
use crate::codec::hash::{Digests, Verify};
use crate::engine::plan::{Extent, SliceRanges};
use crate::engine::read::{Codec, HeaderInfo, ReadRequest, read};
use crate::engine::target::gather::{CoalescedRead, GatherTarget};
use crate::engine::target::host::HostTarget;
use crate::error::{Error, Result};
use crate::fallible::{LISTS, try_collect, try_collect_results, try_push};
use crate::format::catalog::{Entry, WholeTensor};
use crate::io::{ReadAt, as_refs};
use crate::stats::Counters;

/// Maximum bytes of whole tensors that are in memory while slices are cut from them.
pub const MAX_HELD: u64 = 256 << 20;

/// The function that loads whole tensors.
pub type LoadWhole<'l> =
    &'l dyn Fn(&TensorFile, &[usize], &LoadOptions, &Counters, &dyn Cancel) -> Result<Vec<Tensor>>;

/// The most ranges that are planned and read together.
pub const MAX_RANGES: usize = 64 << 10;

/// A slice: a range of indices for each dimension.
pub type Slice = Box<[Range<u64>]>;

impl TensorFile {
    /// Returns the same file with slices of some of its tensors as its only tensors, in the order
    /// given and under the names of the tensors. A tensor may have several slices.
    pub fn sliced(&self, slices: Vec<(usize, Slice)>) -> Result<Self> {
        self.with_slices(slices.into_iter().map(|(number, slice)| (number, Some(slice))))
    }

    /// Does the same; tensors without a slice are taken whole.
    #[doc(hidden)]
    pub fn with_slices(
        &self,
        slices: impl IntoIterator<Item = (usize, Option<Slice>)>,
    ) -> Result<Self> {
        let entries = slices.into_iter().map(|(number, slice)| {
            let entry = self.entry(number)?;
            let Some(slice) = slice else { return Ok(entry.clone()) };
            let shape: Box<[u64]> =
                slice.iter().map(|range| range.end.saturating_sub(range.start)).collect();
            if SliceRanges::new(entry.dtype.size(), &entry.shape, &slice).is_none()
                || entry.whole.is_some()
            {
                return Err(Error::InvalidArgument(format!(
                    "invalid slice {slice:?} of tensor `{}`, whose shape is {:?}",
                    entry.name, entry.shape
                )));
            }
            let whole = Some(Arc::new(WholeTensor { shape: entry.shape.clone(), slice }));
            Ok(Entry { shape, whole, ..entry.clone() })
        });
        self.with_parts(try_collect_results(entries, LISTS)?)
    }
}

/// Returns the contiguous ranges of an entry that is a slice; none if the tensor has no data.
pub fn ranges_of(entry: &Entry) -> Result<SliceRanges> {
    let ranges = match &entry.whole {
        Some(_) if entry.is_meta() => SliceRanges::new(1, &[0], std::slice::from_ref(&(0..0))),
        Some(whole) => SliceRanges::new(entry.dtype.size(), &whole.shape, &whole.slice),
        None => None,
    };
    ranges.ok_or_else(|| Error::Bug(format!("the slice of `{}`", entry.name)))
}

/// Loads slices, in the order of the file, each into memory of its length.
pub fn load_slices(
    selection: &Selection<'_>,
    mut destinations: Vec<&mut [MaybeUninit<u8>]>,
    options: &LoadOptions,
    counters: &Counters,
    cancel: &dyn Cancel,
    load_whole: LoadWhole<'_>,
) -> Result<()> {
    let file = selection.file;
    for (entry, to) in selection.entries.iter().zip(&mut destinations) {
        if entry.is_meta() {
            to.fill(MaybeUninit::new(0));
            *to = &mut [];
        }
    }
    let ranges =
        try_collect_results(selection.entries.iter().map(|entry| ranges_of(entry)), LISTS)?;
    let load = SliceLoad { selection, ranges: &ranges, options, counters, cancel, load_whole };
    let verified = options.verify != Verify::Nothing;
    match file.decryption() {
        None if !verified => load.read_plain(destinations),
        Some(key) if !verified && file.is_seekable() => load.gather_decrypted(key, destinations),
        _ => load.cut_from_wholes(destinations),
    }
}

/// A load of slices, each with the contiguous ranges of its bytes.
struct SliceLoad<'s> {
    selection: &'s Selection<'s>,
    ranges: &'s [SliceRanges],
    options: &'s LoadOptions,
    counters: &'s Counters,
    cancel: &'s dyn Cancel,
    load_whole: LoadWhole<'s>,
}

impl SliceLoad<'_> {
    /// Reads long ranges straight to their destination, and short ones with the bytes between them.
    fn read_plain(&self, destinations: Vec<&mut [MaybeUninit<u8>]>) -> Result<()> {
        let SliceLoad { selection, ranges, options, counters, cancel, .. } = *self;
        let file = selection.file;
        let sources = file.sources();
        let files = as_refs(&sources);
        let rules = RangeRules::of(selection, options)?;
        let mut group = RangeGroup::default();
        let read_group = |group: RangeGroup<'_>| {
            cancel.check()?;
            group.read(&files, options, counters, cancel)
        };
        for ((entry, ranges), mut rest) in selection.entries.iter().zip(ranges).zip(destinations) {
            if rules.are_long(ranges) {
                for start in ranges.starts() {
                    group.direct.push(extent(entry, &(start..start + ranges.range_len())));
                    group.direct_memory.push(cut(&mut rest, ranges.range_len())?);
                    if group.is_full() {
                        read_group(std::mem::take(&mut group))?;
                    }
                }
                continue;
            }
            for Range { start, end } in rules.reads(ranges) {
                let to = cut(&mut rest, ranges.before(end) - ranges.before(start))?;
                group.gathered.push(extent(entry, &(start..end)));
                group.reads.push(CoalescedRead { start, ranges, to });
                group.len += end - start;
                if group.is_full() {
                    read_group(std::mem::take(&mut group))?;
                }
            }
        }
        read_group(group)
    }

    /// Reads whole pieces of encryption, and copies the wanted bytes from them.
    fn gather_decrypted(
        &self,
        decryption: &DecryptionOptions,
        destinations: Vec<&mut [MaybeUninit<u8>]>,
    ) -> Result<()> {
        let SliceLoad { selection, ranges, options, counters, cancel, .. } = *self;
        let file = selection.file;
        let decryptor = Decryptor::new(decryption, file.uri(), &selection.entries)?;
        let wholes = wholes(selection)?;
        let numbers = try_collect(0..wholes.entries().len(), LISTS)?;
        let in_chunks = AtomicBool::new(true);
        // If a local copy is damaged, the load starts again: its headers, and so nonces, may be wrong.
        visit_headers_once(&wholes, &numbers, cancel, &|tensor, header| {
            if !decryptor.add_header(tensor, header, cancel)? {
                in_chunks.store(false, Ordering::Relaxed);
            }
            Ok(())
        })?;
        if !in_chunks.into_inner() {
            return self.cut_from_wholes(destinations);
        }
        let (mut extents, mut reads, mut tensor_of_read) = (Vec::new(), Vec::new(), Vec::new());
        for (tensor, ((entry, ranges), mut rest)) in
            selection.entries.iter().zip(ranges).zip(destinations).enumerate()
        {
            for range in whole_pieces(ranges.coalesced(PIECE_LEN), entry.data_len)? {
                let to = cut(&mut rest, ranges.before(range.end) - ranges.before(range.start))?;
                try_push(&mut extents, extent(entry, &range), LISTS)?;
                try_push(&mut tensor_of_read, (tensor, range.start), LISTS)?;
                try_push(&mut reads, CoalescedRead { start: range.start, ranges, to }, LISTS)?;
            }
        }
        let sources = file.sources();
        let reading = ReadRequest {
            files: &as_refs(&sources),
            extents: &extents,
            codec: &EncryptedPiecesCodec { decryptor: &decryptor, reads: &tensor_of_read },
            verify: Verify::Nothing,
            decrypts: true,
            readers: options.readers,
            memory: options.memory,
            shares_cache: options.shares_cache,
            receiver: None,
        };
        read(&reading, &mut GatherTarget::new(reads), counters, cancel).map(drop)
    }

    /// Loads whole tensors, some at a time, and cuts the slices from them.
    fn cut_from_wholes(&self, destinations: Vec<&mut [MaybeUninit<u8>]>) -> Result<()> {
        let SliceLoad { selection, ranges, options, counters, cancel, load_whole } = *self;
        let wholes = wholes(selection)?;
        let largest = wholes.entries().iter().map(whole_tensor_len).max().unwrap_or(0);
        let (most, memory) = options.memory.or_environment()?.tensors(
            MAX_HELD,
            largest,
            wholes.minimum_memory(false, false)?,
        )?;
        let options = LoadOptions { map: false, memory, ..*options };
        // Slices of one tensor follow each other: it is loaded once.
        let tensor_of =
            |entry: &Entry| (entry.file, entry.header_offset, entry.name.stored().to_owned());
        let mut counts: Vec<(usize, usize, u64)> = Vec::new();
        for (at, entry) in wholes.entries().iter().enumerate() {
            let before = at.checked_sub(1).and_then(|before| wholes.entries().get(before));
            match counts.last_mut() {
                Some((_, count, _)) if before.map(tensor_of) == Some(tensor_of(entry)) => {
                    *count += 1
                }
                _ => try_push(&mut counts, (at, 1, whole_tensor_len(entry)), LISTS)?,
            }
        }
        let mut wanted = ranges.iter().zip(destinations);
        let mut remaining = counts.as_slice();
        while !remaining.is_empty() {
            let mut held = 0;
            let more = remaining.iter().take_while(|(_, _, len)| {
                held += len;
                held <= most
            });
            let (now, later) = remaining.split_at(more.count().max(1));
            let numbers = try_collect(now.iter().map(|&(number, _, _)| number), LISTS)?;
            let loaded = load_whole(&wholes, &numbers, &options, counters, cancel)?;
            for (tensor, &(_, count, _)) in loaded.iter().zip(now) {
                for (ranges, to) in wanted.by_ref().take(count) {
                    cut_slice(tensor, ranges, to)?;
                }
            }
            remaining = later;
        }
        Ok(())
    }
}

/// Ranges that are planned and read together. A slice may have more ranges than fit into memory as
/// one plan.
#[derive(Default)]
struct RangeGroup<'r> {
    direct: Vec<Extent>,
    direct_memory: Vec<&'r mut [MaybeUninit<u8>]>,
    gathered: Vec<Extent>,
    reads: Vec<CoalescedRead<'r>>,
    /// Bytes of the ranges that are gathered from.
    len: u64,
}

impl RangeGroup<'_> {
    fn is_full(&self) -> bool {
        self.direct.len() + self.gathered.len() >= MAX_RANGES || self.len >= MAX_GROUP_LEN
    }

    fn read(
        self,
        files: &[&dyn ReadAt],
        options: &LoadOptions,
        counters: &Counters,
        cancel: &dyn Cancel,
    ) -> Result<()> {
        let reading = |extents| ReadRequest {
            files,
            extents,
            codec: &PlainCodec,
            verify: Verify::Nothing,
            decrypts: false,
            readers: options.readers,
            memory: options.memory,
            shares_cache: options.shares_cache,
            receiver: None,
        };
        if !self.direct.is_empty() {
            let mut target = HostTarget::new(self.direct_memory, Vec::new());
            read(&reading(&self.direct), &mut target, counters, cancel)?;
        }
        if !self.gathered.is_empty() {
            read(&reading(&self.gathered), &mut GatherTarget::new(self.reads), counters, cancel)?;
        }
        Ok(())
    }
}

/// Cuts the first `len` bytes off the rest of a slice's memory.
fn cut<'a>(rest: &mut &'a mut [MaybeUninit<u8>], len: u64) -> Result<&'a mut [MaybeUninit<u8>]> {
    let bug = || Error::Bug("a slice beyond its memory".to_owned());
    let len = usize::try_from(len).map_err(|_| bug())?;
    let (now, later) = std::mem::take(rest).split_at_mut_checked(len).ok_or_else(bug)?;
    *rest = later;
    Ok(now)
}

/// True if slices are cut from the bytes of the file as they are.
pub fn are_plain(file: &TensorFile, verify: Verify) -> bool {
    verify == Verify::Nothing && file.decryption().is_none() && file.is_seekable()
}

/// Returns the contiguous ranges of a slice that are read straight to their destination, each as an
/// extent and its position in the slice. None if they have to be gathered.
pub fn direct_ranges(
    file: &TensorFile,
    entry: &Entry,
    verify: Verify,
    rules: &RangeRules,
) -> Result<Option<Vec<(Extent, u64)>>> {
    let ranges = ranges_of(entry)?;
    let few = ranges
        .total()
        .checked_div(ranges.range_len())
        .is_some_and(|count| count <= MAX_RANGES as u64);
    if !are_plain(file, verify) || !rules.are_long(&ranges) || !few {
        return Ok(None);
    }
    let offsets = (0..).step_by(usize::try_from(ranges.range_len()).unwrap_or(usize::MAX));
    let extents = ranges.starts().map(|start| extent(entry, &(start..start + ranges.range_len())));
    Ok(Some(try_collect(extents.zip(offsets), LISTS)?))
}

/// Returns a range of a tensor's data as an extent.
pub fn extent(entry: &Entry, range: &Range<u64>) -> Extent {
    let data_offset = entry.data_offset + range.start;
    let data_len = range.end - range.start;
    Extent { file: entry.file, header_offset: data_offset, data_offset, data_len }
}

/// Extends ranges to whole pieces of encryption. Neighbours become one.
fn whole_pieces(reads: impl Iterator<Item = Range<u64>>, data_len: u64) -> Result<Vec<Range<u64>>> {
    let mut pieces: Vec<Range<u64>> = Vec::new();
    for read in reads {
        let start = read.start - read.start % PIECE_LEN;
        let end = read.end.next_multiple_of(PIECE_LEN).min(data_len);
        match pieces.last_mut().filter(|last| start <= last.end) {
            Some(last) => last.end = end,
            None => try_push(&mut pieces, start..end, LISTS)?,
        }
    }
    Ok(pieces)
}

/// Returns the same file with the whole tensors of the selected slices as its only tensors, in the
/// order of the file.
fn wholes(selection: &Selection<'_>) -> Result<TensorFile> {
    let entries = selection.entries.iter().map(|entry| {
        let shape = entry.whole.as_ref().map_or_else(|| entry.shape.clone(), |w| w.shape.clone());
        Entry { shape, whole: None, ..(*entry).clone() }
    });
    selection.file.with_parts(try_collect(entries, LISTS)?)
}

/// Returns the bytes of memory of a tensor that is held as a whole.
pub fn whole_tensor_len(entry: &Entry) -> u64 {
    entry.data_len.max(entry.loaded_len())
}

/// Copies a slice from a loaded tensor.
fn cut_slice(
    tensor: &Tensor,
    ranges: &SliceRanges,
    mut rest: &mut [MaybeUninit<u8>],
) -> Result<()> {
    let bug = || Error::Bug("a slice beyond its tensor".to_owned());
    for (at, len) in ranges.within(&(0..u64::MAX)) {
        let now = cut(&mut rest, len)?;
        let bytes = usize::try_from(at).ok().and_then(|at| tensor.bytes().get(at..));
        let bytes = bytes.and_then(|bytes| bytes.get(..now.len())).ok_or_else(bug)?;
        for (slot, byte) in now.iter_mut().zip(bytes) {
            slot.write(*byte);
        }
    }
    Ok(())
}

/// A codec for bytes that are only read: they have no headers, and are neither decrypted nor
/// verified.
pub struct PlainCodec;

impl Codec for PlainCodec {
    fn header(&self, tensor: usize, _raw: &[u8], _cancel: &dyn Cancel) -> Result<HeaderInfo> {
        Err(Error::Bug(format!("a header was parsed for read {tensor}, which has no header")))
    }

    fn decrypt(&self, _: usize, _: u64, _: &mut [u8], _: &dyn Cancel) -> Result<bool> {
        Ok(true)
    }

    fn compare(&self, _: usize, _: &Digests) -> Result<()> {
        Ok(())
    }
}

/// A codec for pieces of encryption of tensors whose headers were read before.
struct EncryptedPiecesCodec<'s> {
    decryptor: &'s Decryptor<'s>,
    /// The tensor of each read, and the position of the read in it.
    reads: &'s [(usize, u64)],
}

impl Codec for EncryptedPiecesCodec<'_> {
    fn header(&self, read: usize, raw: &[u8], cancel: &dyn Cancel) -> Result<HeaderInfo> {
        PlainCodec.header(read, raw, cancel)
    }

    fn decrypt(
        &self,
        read: usize,
        start: u64,
        bytes: &mut [u8],
        cancel: &dyn Cancel,
    ) -> Result<bool> {
        let found = self.reads.get(read);
        let &(tensor, first) =
            found.ok_or_else(|| Error::Bug(format!("no read {read} in the plan of slices")))?;
        self.decryptor.decrypt_chunk(tensor, first + start, bytes, cancel)
    }

    fn compare(&self, _: usize, _: &Digests) -> Result<()> {
        Ok(())
    }
}
