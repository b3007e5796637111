//! Files whose SHA-256 is known: their hub publishes it, or the caller has stated it. No tensor is
//! handed out before the whole file was compared.

use std::ops::Range;
use std::sync::Arc;
use std::sync::atomic::{AtomicU64, Ordering};

use super::catalog_part::Opening;
use super::file::TensorFile;
use super::head::FileHead;
use super::selection::Selection;
use crate::cancel::{Cancel, lock_mutex};
use crate::codec::hash::Verify;
use crate::engine::load_options::LoadOptions;
use crate::engine::worker_range;
use crate::engine::workers::{self, WorkerRange};
use crate::error::{Error, Result};
use crate::fallible::try_zeroed;
use crate::format::catalog::data_len;
use crate::format::shards;
use crate::io::{
    Capabilities, HubChecksum, HubPins, Pin, PinnedSource, ReadAt, WantedRead, agree, as_refs,
    read_exact_at,
};
use crate::mem::Buffers;
use crate::memory_limit::LoadNeeds;
use crate::sys::to_usize;

/// Maximum bytes of a reader's request, if a file is read for its hash only.
const MAX_PIECE_LEN: u64 = 16 << 20;
/// Files for which there are readers of their own.
const MAX_FILES_AT_ONCE: usize = 8;
/// Files whose checksums are requested at once.
const MAX_CHECKSUM_REQUESTS: usize = 16;

fn is_pinned(source: &Arc<dyn ReadAt>) -> bool {
    source.facts().pin.is_some()
}

impl TensorFile {
    /// Compares files with their SHA-256, if it is stated, or published by a hub that the options
    /// ask for: while a selection is read into new memory that has most of their bytes, which ends
    /// with [`TensorFile::agree`]; before any other load, for which it is None. Returns which hashes
    /// the load itself has to verify. Refuses a file with neither hashes of its own nor a published
    /// checksum.
    pub(super) fn compare_files(
        &self,
        selection: Option<&Selection<'_>>,
        options: &LoadOptions,
        cancel: &dyn Cancel,
    ) -> Result<Verify> {
        let verify = options.verify;
        let has_own_hashes = self.format().has_hashes();
        let load_verify = if has_own_hashes { verify } else { Verify::Nothing };
        let needs_hub = verify != Verify::Nothing && (!has_own_hashes || verify == Verify::All);
        if needs_hub && !self.sources().iter().all(is_pinned) {
            let HubPins { requesting, pins } = &*self.hub_pins;
            let requesting = lock_mutex(requesting.get(), cancel)?;
            if pins.get().is_none() {
                let found = self.request_pins(has_own_hashes, cancel)?;
                pins.get_or_init(|| found);
            }
            drop(requesting);
            self.replace_sources(|file, source| {
                let pin = pins.get()?.get(file)?.clone()?;
                let needs_pin = source.facts().is_of_hub() && !is_pinned(source);
                let pinned = || Arc::new(PinnedSource::new(Arc::clone(source), pin)) as _;
                needs_pin.then(pinned)
            });
        }
        let sources = self.sources();
        let pinned = || sources.iter().filter(|source| is_pinned(source));
        if let (Some(source), None) =
            (pinned().find(|source| source.facts().len.is_none()), selection)
        {
            return Err(Error::Unsupported(format!(
                "`{}` cannot be verified before its end, and its server sends it front to back only",
                source.uri()
            )));
        }
        let lens = pinned().map(|source| source.facts().len.unwrap_or(0));
        let wanted = selection.map_or(0, |selection| data_len(selection.entries.iter().copied()));
        if wanted.saturating_mul(2) < lens.fold(0, u64::saturating_add) {
            self.agree(options, cancel)?;
        }
        Ok(load_verify)
    }

    /// Ends the comparison of pinned files.
    pub(super) fn agree(&self, options: &LoadOptions, cancel: &dyn Cancel) -> Result<()> {
        let pinned: Vec<_> = self.sources().iter().filter(|one| is_pinned(one)).cloned().collect();
        read_all(&pinned, options, cancel)?;
        pinned.iter().try_for_each(|source| agree(&**source, cancel))
    }

    /// Returns the pins of those files that have a published checksum. Files with hashes of their
    /// own need none.
    fn request_pins(
        &self,
        has_own_hashes: bool,
        cancel: &dyn Cancel,
    ) -> Result<Vec<Option<Arc<Pin>>>> {
        let sources = self.sources();
        let may_have_pin =
            |source: &Arc<dyn ReadAt>| source.facts().is_of_hub() || is_pinned(source);
        if !has_own_hashes && !sources.iter().any(may_have_pin) {
            return Err(self.no_hashes(self.uri(), ""));
        }
        let published =
            workers::map(MAX_CHECKSUM_REQUESTS, &*sources, cancel, |source, control| {
                let server = source.facts().server.as_ref().filter(|_| !is_pinned(source));
                let request = server.and_then(|server| server.checksum.as_ref());
                request.map_or(Ok(HubChecksum::NoHub), |request| request(control))
            })?;
        let pin = |(source, published): (&Arc<dyn ReadAt>, HubChecksum)| {
            let why = match published {
                HubChecksum::Sha256(expected) => {
                    return Ok(Some(Pin::new(expected, "the hub publishes")));
                }
                _ if has_own_hashes || is_pinned(source) => return Ok(None),
                HubChecksum::NoHub => "",
                HubChecksum::NotSha256 => ", and its hub publishes no SHA-256 of it",
                HubChecksum::Offline => ", and with HF_HUB_OFFLINE its hub is not asked for one",
            };
            Err(self.no_hashes(source.uri(), why))
        };
        sources.iter().zip(published).map(pin).collect()
    }
}

impl Opening<'_> {
    /// The SHA-256 that a file must have, if any is stated.
    pub(super) fn pin_of(&self, source: &dyn ReadAt) -> Result<Option<Arc<Pin>>> {
        let Some(pins) = self.pins else { return Ok(None) };
        let path = source.uri().split('?').next().unwrap_or("");
        let name = path.rsplit('/').next().unwrap_or(path);
        let expected = pins.get(name).or_else(|| pins.get("")).ok_or_else(|| {
            Error::InvalidArgument(format!("sha256 has no hash of `{name}` (`{}`)", source.uri()))
        })?;
        Ok(Some(Pin::new(*expected, "the caller expects")))
    }

    /// Reads the first bytes of a file, which is compared while it is read if its SHA-256 is stated.
    pub(super) fn head(&self, source: &Arc<dyn ReadAt>, base: u64) -> Result<FileHead> {
        if source.facts().len.is_none() {
            return FileHead::read(self.pinned(Arc::clone(source))?, base, self.cancel);
        }
        let head = FileHead::read(Arc::clone(source), base, self.cancel)?;
        if self.pins.is_none() || shards::recognises(&head.bytes) {
            return Ok(head);
        }
        let source = self.pinned(Arc::clone(source))?;
        if head.bytes.starts_with(b"PK") {
            // Its directory is at its end.
            read_all(&[Arc::clone(&source)], &LoadOptions::default(), self.cancel)?;
        }
        FileHead::read(source, base, self.cancel)
    }

    /// Compares a file while it is read, if its SHA-256 is stated.
    fn pinned(&self, source: Arc<dyn ReadAt>) -> Result<Arc<dyn ReadAt>> {
        Ok(match self.pin_of(&*source)? {
            Some(pin) => Arc::new(PinnedSource::new(source, pin)),
            None => source,
        })
    }
}

/// Reads what is left of pinned files, so that it is hashed.
pub fn read_all(
    sources: &[Arc<dyn ReadAt>],
    options: &LoadOptions,
    cancel: &dyn Cancel,
) -> Result<()> {
    let sources = as_refs(sources);
    let Some(capabilities) = Capabilities::combined(&sources) else { return Ok(()) };
    let memory = worker_range::limit(options.memory, &sources)?;
    // Each reader holds one piece, and its connection may hold as much again.
    let piece = capabilities.request_len.min(memory.window(MAX_PIECE_LEN)).max(1);
    let reader_bytes = capabilities.reader_memory.saturating_add(piece);
    let readers = WorkerRange::of(&capabilities, options.readers).initial;
    let readers = readers.saturating_mul(sources.len().min(MAX_FILES_AT_ONCE));
    let readers = memory.load(&LoadNeeds { readers, reader_bytes, ..LoadNeeds::default() })?;
    // The rest of each file.
    let rest = |source: &&dyn ReadAt| {
        let pin = source.facts().pin.as_ref().filter(|pin| !pin.has_agreed());
        let end = source.facts().len.unwrap_or(0);
        pin.map_or(end, |pin| pin.position())..end
    };
    let rest: Vec<Range<u64>> = sources.iter().map(rest).collect();
    let lens = || rest.iter().map(|rest| rest.end.saturating_sub(rest.start));
    let wanted = sources.iter().zip(lens());
    let _wanted: Vec<WantedRead> =
        wanted.filter_map(|(source, len)| source.facts().will_read(len)).collect();
    let rounds = lens().map(|len| len.div_ceil(piece)).max().unwrap_or(0);
    // Files in turn, as each is hashed by one core at a time. A server may state any length, so
    // that the pieces are not listed.
    let (count, next) = (sources.len() as u64, AtomicU64::new(0));
    workers::run(readers.readers, cancel, |control| {
        while !control.stopped() {
            let turn = next.fetch_add(1, Ordering::Relaxed);
            if turn / count >= rounds {
                break;
            }
            let number = to_usize(turn % count);
            let Some((source, rest)) = sources.get(number).zip(rest.get(number)) else { break };
            let start = rest.start.saturating_add((turn / count).saturating_mul(piece));
            let len = rest.end.saturating_sub(start).min(piece);
            let mut buffer = try_zeroed(to_usize(len), "a file that is hashed")?;
            let what = "bytes that are hashed for its checksum";
            Buffers::from_slice(&mut buffer)
                .with_observer(&|bytes| control.arrived(bytes), |buffers| {
                    read_exact_at(*source, start, buffers, what, control)
                })?;
        }
        Ok(())
    })
}
