//! The part of a catalog that one file adds, and reads of its first and last bytes.

use std::collections::{BTreeMap, BTreeSet};
use std::sync::Arc;

use crate::cancel::Cancel;
use crate::error::{Error, Result};
use crate::fallible::try_resize;
use crate::format::catalog::{Entry, Format};
use crate::io::{CachedHead, ReadAt, read_exact_at};
use crate::mem::Buffers;
use crate::sys::to_usize;

/// Options for opening files.
#[derive(Clone, Copy)]
pub struct Opening<'c> {
    /// Ends the call, for example while it waits for a named pipe.
    pub cancel: &'c dyn Cancel,
    /// True to open archives of `torch.save` as storages, without tensors. The tensors are
    /// described in a pickle, which only Python can read. If false, such files are refused.
    pub storages: bool,
    /// True to keep cached heads, for other processes that open the same files.
    pub keeps_heads: bool,
    /// The wanted tensors, by the stored forms of their names; None for all. If a checkpoint
    /// consists of several files, only the files that contain these tensors are opened.
    pub wanted: Option<&'c BTreeSet<String>>,
    /// The SHA-256 that each file must have, by its name in its folder; `""` for a single file.
    pub pins: Option<&'c BTreeMap<String, [u8; 32]>>,
}

impl<'c> Opening<'c> {
    /// Returns options with nothing optional switched on.
    pub const fn new(cancel: &'c dyn Cancel) -> Self {
        Opening { cancel, storages: false, keeps_heads: false, wanted: None, pins: None }
    }
}

/// The part of a catalog that one file adds.
pub struct CatalogPart {
    /// The source of its data.
    pub source: Arc<dyn ReadAt>,
    /// Its format.
    pub format: Format,
    /// The cached head with which other processes open it without a request, if it is kept.
    pub head: Option<CachedHead>,
    /// Its tensors, by position.
    pub entries: Vec<Entry>,
    /// Its metadata, as names and values; None if it states none.
    pub metadata: Option<Vec<(String, String)>>,
}

/// Returns an error about a file as a whole.
pub fn malformed(uri: &str, what: String) -> Error {
    Error::Format { uri: uri.to_owned(), offset: 0, what }
}

/// Fills as much of the buffer as the source has bytes. Returns their number.
pub fn read_up_to(
    source: &dyn ReadAt,
    offset: u64,
    buffer: &mut [u8],
    cancel: &dyn Cancel,
) -> Result<usize> {
    let mut done = 0;
    while let Some(rest) = buffer.get_mut(done..).filter(|rest| !rest.is_empty()) {
        let at = offset.saturating_add(done as u64);
        match source.read_at(at, &mut Buffers::from_slice(rest), cancel)? {
            0 => break,
            read => done += read,
        }
    }
    Ok(done)
}

/// Reads from `offset` on until there are `len` bytes. The length is not trusted: memory is
/// allocated as bytes arrive.
pub fn read_growing(
    source: &dyn ReadAt,
    offset: u64,
    len: u64,
    out: &mut Vec<u8>,
    what: &str,
    cancel: &dyn Cancel,
) -> Result<()> {
    const STEP: usize = 1 << 20;
    let before = out.len();
    let len = to_usize(len);
    while out.len() < len {
        let done = out.len();
        let more = STEP.max(done).min(len - done);
        try_resize(out, done + more, &format!("{what} of `{}`", source.uri()))?;
        let fresh = out.get_mut(done..).unwrap_or(&mut []);
        let at = offset.saturating_add((done - before) as u64);
        read_exact_at(source, at, &mut Buffers::from_slice(fresh), what, cancel)?;
    }
    Ok(())
}
