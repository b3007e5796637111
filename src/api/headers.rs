//! Headers of tensors, and the codec of a call's tensors.

use std::sync::atomic::Ordering;

use super::file::TensorFile;
use super::reads::{Run, drain, tensor_codec};
use super::selection::Selection;
use crate::cancel::Cancel;
use crate::codec::CompactHeader;
use crate::codec::crypt::PIECE_LEN;
use crate::codec::decrypt::{cipher, decryption_failed};
use crate::codec::hash::Verify;
use crate::engine::destination::host::{HostDestination, TensorMemory};
use crate::engine::load_options::LoadOptions;
use crate::engine::plan::{ExtentUse, ReadPlan};
use crate::error::Result;
use crate::fallible::try_zeroed;
use crate::format::tensors::header::TensorHeader;
use crate::io::{ReadAt, read_exact_at};
use crate::mem::Buffers;
use crate::numbers::TensorNumber;
use crate::stats::Counters;
use crate::sys::to_usize;

/// Reads only the headers of tensors, given by number.
pub fn read_headers(
    file: &TensorFile,
    numbers: &[usize],
    cancel: &dyn Cancel,
) -> Result<Vec<CompactHeader>> {
    visit_headers(file, numbers, cancel, &|_, _| Ok(()))
}

/// Reads headers as [`read_headers`] does, and passes each to `on_header` as a whole while it is in
/// memory, with the position of its number in `numbers`. If a local copy of the file is damaged,
/// headers are passed once more.
pub fn visit_headers(
    file: &TensorFile,
    numbers: &[usize],
    cancel: &dyn Cancel,
    on_header: &(dyn Fn(usize, &TensorHeader<'_>) -> Result<()> + Sync),
) -> Result<Vec<CompactHeader>> {
    let selection = Selection::new(file, numbers)?;
    let on_header = |tensor: TensorNumber, header: &TensorHeader<'_>| {
        on_header(*tensor.of(&selection.order)?, header)
    };
    file.with_intact_copies(|| {
        let mut plan = ReadPlan::new(&[], &[], false);
        for (tensor, mut extent) in selection.extents().into_iter().enumerate() {
            extent.data_len = 0;
            let tensors = TensorNumber::range(tensor..tensor + 1);
            plan.push(extent, ExtentUse { tensors, start: 0, gathered: false });
        }
        let codec = tensor_codec(&selection, Verify::Nothing, None, &on_header);
        let (options, counters) = (LoadOptions::default(), Counters::default());
        let run = Run::new(&options, &counters, cancel);
        // Only headers are read.
        let to = (HostDestination::new(TensorMemory::Lent(Vec::new()), Vec::new()), None);
        drain((&file.sources(), &plan), &codec, to, &run, &mut || Ok(false))?;
        Ok(selection.to_caller_order(codec.into_headers()?))
    })
}

/// Decrypts the first piece of the smallest tensor, so that a wrong key is found before everything
/// has been read. A key that has worked once is not tried again.
pub fn try_key(selection: &Selection<'_>, cancel: &dyn Cancel) -> Result<()> {
    let file = selection.file;
    let state = file.tensors_state.as_ref().filter(|state| !state.key_fits.load(Ordering::Relaxed));
    let Some((options, state)) = file.decryption().zip(state) else { return Ok(()) };
    let source = file.source(0)?;
    if source.facts().len.is_none() {
        // The source can be read only once.
        return Ok(());
    }
    // Slices are left out: a piece of them may be long compared with what is read.
    let sealed = selection.entries.iter();
    let sealed = sealed.filter(|entry| entry.data_len > 0 && entry.whole.is_none());
    let Some(entry) = sealed.min_by_key(|entry| entry.data_len) else { return Ok(()) };
    let uri = file.uri();
    let raw = read_range(&*source, entry.header_offset, entry.data_offset, cancel)?;
    file.check_header(entry, &raw)?;
    let header = TensorHeader::parse(&raw, entry, true).map_err(|e| e.in_file(uri))?;
    let Some((pieces, key)) = cipher(&header, entry, options, uri, cancel)? else { return Ok(()) };
    let (_, _, end) = pieces.piece(0);
    if end > PIECE_LEN {
        // The piece is too long to be read twice.
        return Ok(());
    }
    let mut bytes =
        read_range(&*source, entry.data_offset, entry.data_offset.saturating_add(end), cancel)?;
    if !pieces.decrypt(0, &mut bytes, &key) {
        return Err(decryption_failed(entry, uri));
    }
    state.key_fits.store(true, Ordering::Relaxed);
    Ok(())
}

fn read_range(source: &dyn ReadAt, start: u64, end: u64, cancel: &dyn Cancel) -> Result<Box<[u8]>> {
    let mut bytes = try_zeroed(to_usize(end.saturating_sub(start)), "tensors")?;
    read_exact_at(source, start, &mut Buffers::from_slice(&mut bytes), "tensors", cancel)?;
    Ok(bytes)
}
