//! A fast path for one small tensor of a local file: a read on the calling thread, without a plan.

use std::sync::Arc;

use super::file::TensorFile;
use super::load_options::LoadOptions;
use super::tensor::Tensor;
use crate::cancel::Cancel;
use crate::codec::CompactHeader;
use crate::codec::hash::Verify;
use crate::environment::READERS;
use crate::error::{Error, Result};
use crate::fallible::{LISTS, try_with_capacity, try_zeroed};
use crate::format::catalog::Entry;
use crate::format::tensors::header::TensorHeader;
use crate::io::read_exact_at;
use crate::mem::{Arena, Buffers, as_uninit};
use crate::stats::{Counters, Stage};

/// Maximum bytes of a tensor with its header for this path. Reading them takes less time than
/// planning would.
const MOST: u64 = 64 << 10;

/// Loads the only tensor of a call, if it is small and its bytes are used as they are in a local
/// file. None if the load has to be planned.
pub fn load_small(
    file: &TensorFile,
    numbers: &[usize],
    options: &LoadOptions,
    counters: &Counters,
    cancel: &dyn Cancel,
) -> Result<Option<Vec<Tensor>>> {
    let &[number] = numbers else { return Ok(None) };
    let entry = file.entry(number)?;
    let plain = options.verify == Verify::Nothing && !file.is_encrypted() && !entry.strided;
    let is_whole = entry.whole.is_none() && entry.memory_len() == Some(entry.data_len);
    let small = (1..=MOST).contains(&entry.data_len)
        && entry.end().saturating_sub(entry.header_offset) <= MOST;
    let sources = file.sources();
    let source = sources.get(entry.file).filter(|source| source.file().is_some());
    let Some(source) = source.filter(|_| plain && is_whole && small && !options.map) else {
        return Ok(None);
    };
    READERS.value()?;
    if options.readers.is_some() || options.memory.or_environment()?.bytes().is_some() {
        return Ok(None);
    }
    cancel.check()?;
    let (mut raw, mut arena) = (
        try_zeroed(size(entry.data_offset - entry.header_offset)?, what)?,
        Arena::new(size(entry.data_len)?)?,
    );
    let mut buffers = Buffers::from_slice(&mut raw);
    buffers.push(as_uninit(arena.bytes_mut()));
    counters.time(Stage::Read, || {
        read_exact_at(&**source, entry.header_offset, &mut buffers, &what, cancel)
    })?;
    let header = header_of(file, entry, &raw)?;
    counters.reading("page cache");
    counters.bytes(entry.data_len);
    counters.threads(1, 1);
    let memory = arena.freeze(&[(0, size(entry.data_len)?)])?.pop();
    let memory = memory.ok_or_else(|| Error::Bug("a block without a buffer".to_owned()))?;
    let mut loaded = try_with_capacity(1, LISTS)?;
    loaded.push(Tensor { number, header, memory, entries: Arc::clone(file.shared_entries()) });
    Ok(Some(loaded))
}

/// Checks that a header agrees with the index, and returns the part of it that is retained.
fn header_of(file: &TensorFile, entry: &Entry, raw: &[u8]) -> Result<CompactHeader> {
    if raw.is_empty() {
        return Ok(CompactHeader::none());
    }
    file.check_header(entry, raw)?;
    let header = TensorHeader::parse(raw, entry, false).map_err(|e| e.in_file(file.uri()))?;
    Ok(CompactHeader::of(&header, false).0)
}

fn what() -> String {
    "tensors".to_owned()
}

fn size(len: u64) -> Result<usize> {
    usize::try_from(len).map_err(|_| Error::Bug("the size of a small tensor".to_owned()))
}
