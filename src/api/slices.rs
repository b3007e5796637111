//! Loads of slices, which read only the bytes of the slices.
//!
//! Long contiguous ranges (runs) are read straight to their destination. Short ones are read with
//! the bytes between them, and so are pieces of encryption, which are decrypted as a whole. A
//! tensor whose hashes are to be verified is read as a whole, and then cut.

use std::mem::MaybeUninit;
use std::ops::Range;
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, Ordering};

use super::file::TensorFile;
use super::headers::see_headers;
use super::load_options::LoadOptions;
use super::selection::Selection;
use super::slice_rules::{ROUND_LEN, RunRules};
use super::tensor::Tensor;
use crate::cancel::Cancel;
use crate::codec::crypt::{DecryptionOptions, PIECE_LEN};
use crate::codec::decrypt::Decryptor;
use crate::codec::hash::{Digests, Verify};
use crate::engine::plan::{Extent, Runs};
use crate::engine::read::{Begun, Codec, Reading, read};
use crate::engine::target::gather::{Gather, Span};
use crate::engine::target::host::Host;
use crate::error::{Error, Result};
use crate::fallible::{LISTS, collected, listed, push};
use crate::format::catalog::{Entry, Whole};
use crate::io::{ReadAt, as_refs};
use crate::stats::Counters;

/// The most bytes of whole tensors that are held while slices are cut from them.
pub const HELD: u64 = 256 << 20;

/// The function that loads whole tensors.
pub type LoadWhole<'l> =
    &'l dyn Fn(&TensorFile, &[usize], &LoadOptions, &Counters, &dyn Cancel) -> Result<Vec<Tensor>>;

/// The most ranges that are planned and read together.
pub const ROUND: usize = 64 << 10;

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
            if Runs::new(entry.dtype.size(), &entry.shape, &slice).is_none()
                || entry.whole.is_some()
            {
                return Err(Error::InvalidArgument(format!(
                    "{slice:?} is no slice of tensor `{}`, whose shape is {:?}",
                    entry.name, entry.shape
                )));
            }
            let whole = Some(Arc::new(Whole { shape: entry.shape.clone(), slice }));
            Ok(Entry { shape, whole, ..entry.clone() })
        });
        self.with_parts(collected(entries, LISTS)?)
    }
}

/// Returns the contiguous ranges of an entry that is a slice; none if the tensor has no data.
pub fn runs_of(entry: &Entry) -> Result<Runs> {
    let runs = match &entry.whole {
        Some(_) if entry.is_meta() => Runs::new(1, &[0], std::slice::from_ref(&(0..0))),
        Some(whole) => Runs::new(entry.dtype.size(), &whole.shape, &whole.slice),
        None => None,
    };
    runs.ok_or_else(|| Error::Bug(format!("the slice of `{}`", entry.name)))
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
    let runs = collected(selection.entries.iter().map(|entry| runs_of(entry)), LISTS)?;
    let load = SliceLoad { selection, runs: &runs, options, counters, cancel, load_whole };
    let verified = options.verify != Verify::Nothing;
    match file.decryption() {
        None if !verified => load.read_plain(destinations),
        Some(key) if !verified && file.is_seekable() => load.gather_decrypted(key, destinations),
        _ => load.cut_wholes(destinations),
    }
}

/// A load of slices, each with the contiguous ranges of its bytes.
struct SliceLoad<'s> {
    selection: &'s Selection<'s>,
    runs: &'s [Runs],
    options: &'s LoadOptions,
    counters: &'s Counters,
    cancel: &'s dyn Cancel,
    load_whole: LoadWhole<'s>,
}

impl SliceLoad<'_> {
    /// Reads long ranges straight to their destination, and short ones with the bytes between them.
    fn read_plain(&self, destinations: Vec<&mut [MaybeUninit<u8>]>) -> Result<()> {
        let SliceLoad { selection, runs, options, counters, cancel, .. } = *self;
        let file = selection.file;
        let sources = file.sources();
        let files = as_refs(&sources);
        let rules = RunRules::of(selection, options)?;
        let mut round = Round::default();
        let read_round = |round: Round<'_>| {
            cancel.check()?;
            round.read(&files, options, counters, cancel)
        };
        for ((entry, runs), mut rest) in selection.entries.iter().zip(runs).zip(destinations) {
            if rules.are_long(runs) {
                for start in runs.starts() {
                    round.direct.push(extent(entry, &(start..start + runs.run())));
                    round.to_direct.push(cut(&mut rest, runs.run())?);
                    if round.is_full() {
                        read_round(std::mem::take(&mut round))?;
                    }
                }
                continue;
            }
            for Range { start, end } in rules.spans(runs) {
                let to = cut(&mut rest, runs.before(end) - runs.before(start))?;
                round.gathered.push(extent(entry, &(start..end)));
                round.spans.push(Span { start, runs, to });
                round.len += end - start;
                if round.is_full() {
                    read_round(std::mem::take(&mut round))?;
                }
            }
        }
        read_round(round)
    }

    /// Reads whole pieces of encryption, and copies the wanted bytes from them.
    fn gather_decrypted(
        &self,
        decryption: &DecryptionOptions,
        destinations: Vec<&mut [MaybeUninit<u8>]>,
    ) -> Result<()> {
        let SliceLoad { selection, runs, options, counters, cancel, .. } = *self;
        let file = selection.file;
        let decryptor = Decryptor::new(decryption, file.uri(), &selection.entries)?;
        let wholes = wholes(selection)?;
        let numbers = listed(0..wholes.entries().len(), LISTS)?;
        let in_chunks = AtomicBool::new(true);
        see_headers(&wholes, &numbers, cancel, &|tensor, header| {
            if !decryptor.header(tensor, header, cancel)? {
                in_chunks.store(false, Ordering::Relaxed);
            }
            Ok(())
        })?;
        if !in_chunks.into_inner() {
            return self.cut_wholes(destinations);
        }
        let (mut extents, mut spans, mut of) = (Vec::new(), Vec::new(), Vec::new());
        for (tensor, ((entry, runs), mut rest)) in
            selection.entries.iter().zip(runs).zip(destinations).enumerate()
        {
            for span in whole_pieces(runs.spans(PIECE_LEN), entry.data_len)? {
                let to = cut(&mut rest, runs.before(span.end) - runs.before(span.start))?;
                push(&mut extents, extent(entry, &span), LISTS)?;
                push(&mut of, (tensor, span.start), LISTS)?;
                push(&mut spans, Span { start: span.start, runs, to }, LISTS)?;
            }
        }
        let sources = file.sources();
        let reading = Reading {
            files: &as_refs(&sources),
            extents: &extents,
            codec: &Sealed { decryptor: &decryptor, spans: &of },
            verify: Verify::Nothing,
            decrypts: true,
            readers: options.readers,
            memory: options.memory,
            shares_cache: options.shares_cache,
            receiver: None,
        };
        read(&reading, &mut Gather::new(spans), counters, cancel).map(drop)
    }

    /// Loads whole tensors, some at a time, and cuts the slices from them.
    fn cut_wholes(&self, destinations: Vec<&mut [MaybeUninit<u8>]>) -> Result<()> {
        let SliceLoad { selection, runs, options, counters, cancel, load_whole } = *self;
        let wholes = wholes(selection)?;
        let largest = wholes.entries().iter().map(held_len).max().unwrap_or(0);
        let (most, memory) =
            options.memory.known()?.tensors(HELD, largest, wholes.least(false, false)?)?;
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
                _ => push(&mut counts, (at, 1, held_len(entry)), LISTS)?,
            }
        }
        let mut wanted = runs.iter().zip(destinations);
        let mut left = counts.as_slice();
        while !left.is_empty() {
            let mut held = 0;
            let more = left.iter().take_while(|(_, _, len)| {
                held += len;
                held <= most
            });
            let (now, later) = left.split_at(more.count().max(1));
            let numbers = listed(now.iter().map(|&(number, _, _)| number), LISTS)?;
            let loaded = load_whole(&wholes, &numbers, &options, counters, cancel)?;
            for (tensor, &(_, count, _)) in loaded.iter().zip(now) {
                for (runs, to) in wanted.by_ref().take(count) {
                    cut_one(tensor, runs, to)?;
                }
            }
            left = later;
        }
        Ok(())
    }
}

/// Ranges that are planned and read together. A slice may have more of them than there is memory for plans.
#[derive(Default)]
struct Round<'r> {
    direct: Vec<Extent>,
    to_direct: Vec<&'r mut [MaybeUninit<u8>]>,
    gathered: Vec<Extent>,
    spans: Vec<Span<'r>>,
    /// Bytes of the ranges that are gathered from.
    len: u64,
}

impl Round<'_> {
    fn is_full(&self) -> bool {
        self.direct.len() + self.gathered.len() >= ROUND || self.len >= ROUND_LEN
    }

    fn read(
        self,
        files: &[&dyn ReadAt],
        options: &LoadOptions,
        counters: &Counters,
        cancel: &dyn Cancel,
    ) -> Result<()> {
        let reading = |extents| Reading {
            files,
            extents,
            codec: &Plain,
            verify: Verify::Nothing,
            decrypts: false,
            readers: options.readers,
            memory: options.memory,
            shares_cache: options.shares_cache,
            receiver: None,
        };
        if !self.direct.is_empty() {
            let mut target = Host::new(self.to_direct, Vec::new());
            read(&reading(&self.direct), &mut target, counters, cancel)?;
        }
        if !self.gathered.is_empty() {
            read(&reading(&self.gathered), &mut Gather::new(self.spans), counters, cancel)?;
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
pub fn direct_runs(
    file: &TensorFile,
    entry: &Entry,
    verify: Verify,
    rules: &RunRules,
) -> Result<Option<Vec<(Extent, u64)>>> {
    let runs = runs_of(entry)?;
    let few = runs.total().checked_div(runs.run()).is_some_and(|count| count <= ROUND as u64);
    if !are_plain(file, verify) || !rules.are_long(&runs) || !few {
        return Ok(None);
    }
    let places = (0..).step_by(usize::try_from(runs.run()).unwrap_or(usize::MAX));
    let extents = runs.starts().map(|start| extent(entry, &(start..start + runs.run())));
    Ok(Some(listed(extents.zip(places), LISTS)?))
}

/// Returns a range of a tensor's data as an extent.
pub fn extent(entry: &Entry, range: &Range<u64>) -> Extent {
    let data_offset = entry.data_offset + range.start;
    let data_len = range.end - range.start;
    Extent { file: entry.file, header_offset: data_offset, data_offset, data_len }
}

/// Extends ranges to whole pieces of encryption. Neighbours become one.
fn whole_pieces(spans: impl Iterator<Item = Range<u64>>, data_len: u64) -> Result<Vec<Range<u64>>> {
    let mut pieces: Vec<Range<u64>> = Vec::new();
    for span in spans {
        let start = span.start - span.start % PIECE_LEN;
        let end = span.end.next_multiple_of(PIECE_LEN).min(data_len);
        match pieces.last_mut().filter(|last| start <= last.end) {
            Some(last) => last.end = end,
            None => push(&mut pieces, start..end, LISTS)?,
        }
    }
    Ok(pieces)
}

/// Returns a file of the whole tensors of which slices are wanted, in the order of the file.
fn wholes(selection: &Selection<'_>) -> Result<TensorFile> {
    let entries = selection.entries.iter().map(|entry| {
        let shape = entry.whole.as_ref().map_or_else(|| entry.shape.clone(), |w| w.shape.clone());
        Entry { shape, whole: None, ..(*entry).clone() }
    });
    selection.file.with_parts(listed(entries, LISTS)?)
}

/// Returns the bytes of memory of a tensor that is held as a whole.
pub fn held_len(entry: &Entry) -> u64 {
    entry.data_len.max(entry.loaded_len())
}

/// Copies a slice from a loaded tensor.
fn cut_one(tensor: &Tensor, runs: &Runs, mut rest: &mut [MaybeUninit<u8>]) -> Result<()> {
    let bug = || Error::Bug("a slice beyond its tensor".to_owned());
    for (at, len) in runs.within(&(0..u64::MAX)) {
        let now = cut(&mut rest, len)?;
        let bytes = usize::try_from(at).ok().and_then(|at| tensor.bytes().get(at..));
        let bytes = bytes.and_then(|bytes| bytes.get(..now.len())).ok_or_else(bug)?;
        for (slot, byte) in now.iter_mut().zip(bytes) {
            slot.write(*byte);
        }
    }
    Ok(())
}

/// A codec for bytes that are only read: they have no headers, and are neither decrypted nor verified.
pub struct Plain;

impl Codec for Plain {
    fn header(&self, tensor: usize, _raw: &[u8], _cancel: &dyn Cancel) -> Result<Begun> {
        Err(Error::Bug(format!("a header of {tensor}, which has none")))
    }

    fn decrypt(&self, _: usize, _: u64, _: &mut [u8], _: &dyn Cancel) -> Result<bool> {
        Ok(true)
    }

    fn compare(&self, _: usize, _: &Digests) -> Result<()> {
        Ok(())
    }
}

/// A codec for pieces of encryption of tensors whose headers were read before.
struct Sealed<'s> {
    decryptor: &'s Decryptor<'s>,
    /// The tensor of each span, and the position of the span in it.
    spans: &'s [(usize, u64)],
}

impl Codec for Sealed<'_> {
    fn header(&self, span: usize, raw: &[u8], cancel: &dyn Cancel) -> Result<Begun> {
        Plain.header(span, raw, cancel)
    }

    fn decrypt(
        &self,
        span: usize,
        start: u64,
        bytes: &mut [u8],
        cancel: &dyn Cancel,
    ) -> Result<bool> {
        let found = self.spans.get(span);
        let &(tensor, first) = found.ok_or_else(|| Error::Bug(format!("no span {span}")))?;
        self.decryptor.chunk(tensor, first + start, bytes, cancel)
    }

    fn compare(&self, _: usize, _: &Digests) -> Result<()> {
        Ok(())
    }
}
