//! The reads of a call: what is read of each tensor, and the one function that reads it.
//!
//! A whole tensor is one extent. Of a slice, long contiguous ranges are read straight to their
//! place, and short ones together with the bytes between them. Pieces of encryption are read and
//! decrypted as a whole, and so are tensors whose hashes are verified.

use std::ops::Range;
use std::sync::Arc;

use super::selection::Selection;
use super::slice_rules::RangeRules;
use crate::cancel::Cancel;
use crate::codec::crypt::PIECE_LEN;
use crate::codec::decrypt::Decryptor;
use crate::codec::hash::Verify;
use crate::codec::{CodecTensors, CompactHeader, HeaderCallback, TensorCodec};
use crate::engine::completion::TensorReceiver;
use crate::engine::destination::Destination;
use crate::engine::destination::direct_storage::DirectStorage;
use crate::engine::load_options::LoadOptions;
use crate::engine::plan::{Extent, ExtentUse, ReadPlan, SliceRanges};
use crate::engine::read::{ReadRequest, read};
use crate::error::{Error, Result};
use crate::fallible::collect_all;
use crate::format::catalog::Entry;
use crate::io::{ReadAt, WantedRead, as_refs};
use crate::numbers::TensorNumber;
use crate::stats::Counters;
use crate::sys::to_usize;

/// The most ranges that are planned and read together, and the approximate bytes of them: a file may
/// claim any number of both.
const MAX_RANGES: usize = 64 << 10;
const MAX_RANGES_LEN: u64 = 16 << 30;
/// The most bytes of a file that a slice may span if it is handed out while others are read, as all
/// of it is planned at once.
const MAX_SPAN: u64 = 8 << 40;

/// The options and the counters of every read of a call.
#[derive(Clone, Copy)]
pub struct Run<'r> {
    /// The options of the load.
    pub options: &'r LoadOptions,
    /// Counters of the work done.
    pub counters: &'r Counters,
    /// Ends the call early.
    pub cancel: &'r dyn Cancel,
    /// Takes tensors as they are complete, if they are handed out one by one.
    pub receiver: Option<&'r dyn TensorReceiver>,
}

impl<'r> Run<'r> {
    /// A read without a receiver.
    pub fn new(options: &'r LoadOptions, counters: &'r Counters, cancel: &'r dyn Cancel) -> Self {
        Run { options, counters, cancel, receiver: None }
    }
}

/// Reads a plan into a destination, and returns the destination. Meanwhile this thread calls
/// `meanwhile` until that returns false.
pub fn drain<D: Destination>(
    (sources, plan): (&[Arc<dyn ReadAt>], &ReadPlan<'_>),
    codec: &TensorCodec<'_>,
    (to, direct): (D, Option<&DirectStorage<'_>>),
    run: &Run<'_>,
    meanwhile: &mut dyn FnMut() -> Result<bool>,
) -> Result<D> {
    let Run { options, counters, cancel, receiver } = *run;
    let files = as_refs(sources);
    let request = ReadRequest { files: &files, plan, codec, options, receiver, direct };
    read(&request, to, counters, cancel, meanwhile)
}

/// The reads of a selection's tensors.
pub struct Reads<'s> {
    /// The tensors.
    pub selection: &'s Selection<'s>,
    /// The announcement of the reads.
    _wanted: Vec<WantedRead>,
    slices: Vec<Option<SliceRanges>>,
    /// True for tensors whose data are used in place: only their headers are read. May be empty.
    in_place: Vec<bool>,
    rules: RangeRules,
    verify: Verify,
    /// True if data are decrypted.
    decrypts: bool,
    /// True if the files can be read in any order.
    seekable: bool,
    /// True if the data of a tensor are never cut.
    uncut: bool,
}

/// The destination of the tensors of a call.
pub struct To<'t, 'd, D> {
    /// Their memory.
    pub destination: D,
    /// The device of each tensor; may be empty if there is one.
    pub devices: &'t [usize],
    /// True if the destination takes only a piece of encryption at a time.
    pub in_pieces: bool,
    /// Opens the files for a device that reads them itself.
    pub direct: Option<&'t OpenDirect<'d>>,
}

/// Opens the files of a plan for a device that reads them itself; None if it does not.
pub type OpenDirect<'d> = dyn Fn(&ReadPlan<'_>) -> Result<Option<DirectStorage<'d>>> + 'd;

impl<'t, D> To<'t, '_, D> {
    /// Host memory.
    pub fn host(destination: D) -> Self {
        To { destination, devices: &[], in_pieces: false, direct: None }
    }
}

impl<'s> Reads<'s> {
    /// Prepares the reads of a selection, and announces them to the local copies of its files.
    pub fn new(selection: &'s Selection<'s>, options: &LoadOptions) -> Result<Self> {
        let wanted = selection.announce();
        let slices = if selection.is_sliced() {
            collect_all(selection.entries.iter().map(|entry| ranges_of(entry)))?
        } else {
            Vec::new()
        };
        Ok(Reads {
            selection,
            _wanted: wanted,
            slices,
            in_place: Vec::new(),
            rules: RangeRules::of(selection, options)?,
            verify: options.verify,
            decrypts: selection.file.decryption().is_some(),
            seekable: selection.file.is_seekable(),
            uncut: selection.file.has_long_pieces(),
        })
    }

    /// Leaves out the data of tensors that are used in place.
    pub fn without(self, in_place: Vec<bool>) -> Self {
        Reads { in_place, ..self }
    }

    /// Returns the bytes of each tensor in memory, and the file position of the first of them.
    pub fn sizes(&self) -> Vec<(u64, u64)> {
        let sizes = self.selection.entries.iter().enumerate().map(|(tensor, entry)| {
            let ranges = self.slices.get(tensor).and_then(Option::as_ref);
            let first = ranges.and_then(|ranges| ranges.starts().next()).unwrap_or(0);
            (entry.memory_len().unwrap_or(u64::MAX), entry.data_offset.saturating_add(first))
        });
        sizes.collect()
    }

    /// Reads all tensors but those that `skipped` names, and returns their headers in the order of
    /// the file. Meanwhile this thread calls `meanwhile` until that returns false.
    pub fn read<D: Destination>(
        &self,
        to: To<'_, '_, D>,
        run: &Run<'_>,
        skipped: &dyn Fn(usize) -> bool,
        meanwhile: &mut dyn FnMut() -> Result<bool>,
    ) -> Result<Vec<CompactHeader>> {
        let selection = self.selection;
        let uncut = self.decrypts.then_some(self.uncut);
        let codec = tensor_codec(selection, self.verify, uncut, &|_, _| Ok(()));
        let sources = selection.file.sources();
        let To { destination, devices, in_pieces, direct } = to;
        let options = self.options_of(run, in_pieces)?;
        let run = &Run { options: &options, ..*run };
        let mut destination = Some(destination);
        let mut read_now = |plan: &ReadPlan<'_>| {
            run.cancel.check()?;
            let to = destination.take().ok_or_else(|| Error::Bug("no destination".to_owned()))?;
            let direct = direct.map(|open| open(plan)).transpose()?.flatten();
            let to = (to, direct.as_ref());
            destination = Some(drain((&sources, plan), &codec, to, run, meanwhile)?);
            Ok(())
        };
        let mut planned = Planned {
            plan: ReadPlan::new(&self.slices, devices, self.uncut),
            ranges: 0,
            len: 0,
            together: run.receiver.is_some(),
            read: &mut read_now,
        };
        let mut at = 0;
        while at < selection.entries.len() {
            let tensors = at..self.group_end(at, skipped);
            at = tensors.end;
            let in_place = self.in_place.get(tensors.start) == Some(&true);
            if in_place && !skipped(tensors.start) {
                self.add_header(tensors, &mut planned);
            } else if !skipped(tensors.start) {
                self.add(tensors, in_pieces, &mut planned)?;
            }
        }
        planned.flush()?;
        codec.into_headers()
    }

    /// Returns the options of a read. A verified tensor that slices are cut from needs memory while
    /// its bytes wait for their hash; a read with a receiver has reserved it before.
    fn options_of(&self, run: &Run<'_>, staged: bool) -> Result<LoadOptions> {
        let held = self.selection.held(self.verify);
        if held == 0 || run.receiver.is_some() {
            return Ok(*run.options);
        }
        let least = self.selection.file.minimum_memory(true, staged)?;
        let (_, memory) = run.options.memory.or_environment()?.tensors(held, held, least)?;
        Ok(LoadOptions { memory, ..*run.options })
    }

    /// Returns the end of the slices of one tensor, from `first` on, that are all skipped or all
    /// read.
    fn group_end(&self, first: usize, skipped: &dyn Fn(usize) -> bool) -> usize {
        let tensor_of = |(tensor, entry): (usize, &&Entry)| {
            // An empty tensor has the position of the next one.
            let position = (entry.file, entry.header_offset, entry.data_offset, entry.data_len);
            let unread = skipped(tensor) || self.in_place.get(tensor) == Some(&true);
            entry.whole.as_ref().map(|_| (position, unread))
        };
        let mut entries = self.selection.entries.iter().enumerate().skip(first).map(tensor_of);
        let of_first = entries.next().flatten();
        first + 1 + entries.take_while(|of| of.is_some() && *of == of_first).count()
    }

    /// Adds the header of a tensor whose data are used in place, if it has one.
    fn add_header(&self, tensors: Range<usize>, planned: &mut Planned<'_, '_>) {
        let entry = self.selection.entries.get(tensors.start).filter(|one| one.whole.is_none());
        if let Some(&&Entry { file, header_offset, data_offset, .. }) = entry
            && header_offset < data_offset
        {
            let extent = Extent { file, header_offset, data_offset, data_len: 0 };
            let tensors = TensorNumber::range(tensors);
            planned.plan.push(extent, ExtentUse { tensors, start: 0, gathered: false });
        }
    }

    /// Adds the extents of a tensor, or of slices of one tensor.
    fn add(
        &self,
        tensors: Range<usize>,
        in_pieces: bool,
        planned: &mut Planned<'_, '_>,
    ) -> Result<()> {
        let Some(&entry) = self.selection.entries.get(tensors.start) else { return Ok(()) };
        let whole = Extent {
            file: entry.file,
            header_offset: entry.header_offset,
            data_offset: entry.data_offset,
            data_len: entry.data_len,
        };
        let long = self.uncut && entry.data_len > PIECE_LEN;
        let numbers = TensorNumber::range(tensors.clone());
        let all = || ExtentUse { tensors: numbers.clone(), start: 0, gathered: true };
        if entry.whole.is_none() {
            if whole.end() > whole.header_offset {
                planned.plan.push(whole, ExtentUse { gathered: long && in_pieces, ..all() });
            }
            return Ok(());
        }
        let slices = self.slices.get(tensors.clone()).unwrap_or(&[]).iter().flatten();
        let slices = || slices.clone().filter(|ranges| ranges.total() > 0);
        if slices().next().is_none() {
            return Ok(());
        }
        let (encrypted, seekable) = (self.decrypts, self.seekable);
        if self.verify != Verify::Nothing || (encrypted && long) {
            planned.plan.push(whole, all());
        } else if encrypted || !seekable {
            if encrypted {
                planned.plan.push(Extent { data_len: 0, ..whole }, all());
            }
            let unit = if encrypted { PIECE_LEN } else { 1 };
            let gap = if seekable { unit } else { u64::MAX };
            let spans = slices().flat_map(|ranges| ranges.coalesced(gap));
            for span in united(spans, unit, entry.data_len) {
                planned.push(entry, &span, &all())?;
            }
        } else {
            for (tensor, ranges) in tensors.clone().zip(self.slices.get(tensors).unwrap_or(&[])) {
                let Some(ranges) = ranges else { continue };
                let gathered = !self.rules.are_long(ranges);
                let gap = if gathered { self.rules.gap } else { 0 };
                for span in ranges.coalesced(gap).filter(|_| ranges.total() > 0) {
                    let number = TensorNumber::range(tensor..tensor + 1);
                    let of = ExtentUse { tensors: number, start: 0, gathered };
                    planned.push(entry, &span, &of)?;
                }
            }
        }
        if planned.is_full() { planned.flush() } else { Ok(()) }
    }
}

/// Returns the codec of a selection's tensors. `uncut`: true if their data are never cut; None if
/// they are not decrypted. `on_header` is called with each header.
pub fn tensor_codec<'s>(
    selection: &'s Selection<'s>,
    verify: Verify,
    uncut: Option<bool>,
    on_header: HeaderCallback<'s>,
) -> TensorCodec<'s> {
    let (file, entries) = (selection.file, &*selection.entries);
    let decryption = uncut.zip(file.decryption().zip(file.long_pieces()));
    let decryptor = decryption.map(|(uncut, (options, long_pieces))| {
        Decryptor::new(options, (file.uri(), entries), (uncut, long_pieces))
    });
    TensorCodec::new(CodecTensors {
        uri: file.uri(),
        entries,
        verify,
        encrypted: file.is_encrypted(),
        decryptor,
        check: Box::new(|entry, raw| file.check_header(entry, raw)),
        on_header,
    })
}

/// The extents that are planned and not read yet.
struct Planned<'p, 'r> {
    plan: ReadPlan<'p>,
    /// The number of extents that are parts of tensors, and their bytes.
    ranges: usize,
    len: u64,
    /// True if all parts of a tensor are read together.
    together: bool,
    read: &'r mut dyn FnMut(&ReadPlan<'_>) -> Result<()>,
}

impl Planned<'_, '_> {
    /// Adds a range of a tensor's data, and reads what is planned if that is enough.
    fn push(&mut self, entry: &Entry, span: &Range<u64>, of: &ExtentUse) -> Result<()> {
        let len = span.end - span.start;
        if self.together && len > MAX_SPAN {
            return Err(Error::Unsupported(format!(
                "a slice of tensor `{}` spans {len} bytes of the file: expected at most {MAX_SPAN} \
                 where tensors are handed out one by one",
                entry.name
            )));
        }
        for start in (span.start..span.end).step_by(to_usize(MAX_RANGES_LEN)) {
            let data_len = MAX_RANGES_LEN.min(span.end - start);
            let data_offset = entry.data_offset + start;
            let extent =
                Extent { file: entry.file, header_offset: data_offset, data_offset, data_len };
            self.plan.push(extent, ExtentUse { start, ..of.clone() });
            self.ranges += 1;
            self.len = self.len.saturating_add(data_len);
            if !self.together && self.is_full() {
                self.flush()?;
            }
        }
        Ok(())
    }

    fn is_full(&self) -> bool {
        self.ranges >= MAX_RANGES || self.len >= MAX_RANGES_LEN
    }

    fn flush(&mut self) -> Result<()> {
        (self.read)(&self.plan)?;
        self.plan.extents.clear();
        self.plan.uses.clear();
        (self.ranges, self.len) = (0, 0);
        Ok(())
    }
}

/// Returns the contiguous ranges of an entry that is a slice, none if the tensor has no data; None
/// for a whole tensor.
pub fn ranges_of(entry: &Entry) -> Result<Option<SliceRanges>> {
    let Some(whole) = &entry.whole else { return Ok(None) };
    let ranges = if entry.is_meta() {
        SliceRanges::new(1, &[0], std::slice::from_ref(&(0..0)))
    } else {
        SliceRanges::new(entry.dtype.size(), &whole.shape, &whole.slice)
    };
    ranges.map(Some).ok_or_else(|| Error::Bug(format!("the slice of `{}`", entry.name)))
}

/// Extends ranges to multiples of `unit`, and unites those that overlap or touch.
fn united(ranges: impl Iterator<Item = Range<u64>>, unit: u64, data_len: u64) -> Vec<Range<u64>> {
    let whole = |range: Range<u64>| {
        let end = range.end.checked_next_multiple_of(unit).unwrap_or(u64::MAX);
        range.start - range.start % unit..end.min(data_len)
    };
    let mut ranges: Vec<Range<u64>> = ranges.map(whole).collect();
    ranges.sort_unstable_by_key(|range| range.start);
    let mut united: Vec<Range<u64>> = Vec::new();
    for range in ranges {
        match united.last_mut().filter(|last| range.start <= last.end) {
            Some(last) => last.end = last.end.max(range.end),
            None => united.push(range),
        }
    }
    united
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::api::file::TensorFile;
    use crate::api::save_all::save;
    use crate::api::save_options::{SaveOptions, SaveTensor};
    use crate::cancel::Never;

    #[test]
    fn slices_of_one_tensor_are_read_together_unless_some_are_skipped() {
        let folder = tempfile::tempdir().unwrap();
        let path = folder.path().join("f.tensors");
        let tensors = vec![
            SaveTensor::new("a", &[6], &[0u8; 6]).unwrap(),
            SaveTensor::new("b", &[2], &[1u8; 2]).unwrap(),
        ];
        save(&path, tensors, SaveOptions::default(), &Never).unwrap();
        let rows = |range: Range<u64>| -> Box<[Range<u64>]> { std::iter::once(range).collect() };
        let slices = vec![(0, rows(0..2)), (0, rows(1..4)), (0, rows(4..6)), (1, rows(0..1))];
        let file = TensorFile::open(&path).unwrap().sliced(slices).unwrap();
        let selection = Selection::new(&file, &[0, 1, 2, 3]).unwrap();
        let reads = Reads::new(&selection, &LoadOptions::default()).unwrap();
        let groups = |skipped: &dyn Fn(usize) -> bool| {
            let mut ends = vec![0];
            while ends.last().is_some_and(|end| *end < 4) {
                ends.push(reads.group_end(*ends.last().unwrap(), skipped));
            }
            ends
        };
        assert_eq!(groups(&|_| false), [0, 3, 4]);
        assert_eq!(groups(&|tensor| tensor == 1), [0, 1, 2, 3, 4]);
    }

    #[test]
    fn ranges_unite_at_the_units_they_share() {
        let united = |ranges: &[Range<u64>], unit| united(ranges.iter().cloned(), unit, 95);
        assert_eq!(united(&[50..60, 3..4, 12..13, 61..70], 1), [3..4, 12..13, 50..60, 61..70]);
        assert_eq!(united(&[50..60, 3..4, 12..13, 91..94], 10), [0..20, 50..60, 90..95]);
    }
}
