//! The write path: tensors → layout → hash → sink.

use std::io::IoSlice;
use std::sync::Arc;
use std::sync::atomic::AtomicU64;

use crate::api::save_options::{IdentitySource, SaveOptions, SaveTensor};
use crate::cancel::Cancel;
use crate::codec::crypt::{MANIFEST_LEN, Manifest};
use crate::codec::hash::sha256;
use crate::engine::write::{TensorData, WriteOptions, WriteTensor, write_tensors};
use crate::error::{Error, Result};
use crate::format::catalog::Entry;
use crate::format::name_tree::NameTree;
use crate::format::tensors::identity::FileIdentity;
use crate::format::tensors::index::{self, end_of_index};
use crate::format::tensors::layout::{
    FileLayout, MIN_INDEX_LEN, UnplacedTensor, index_len_for, place_tensors,
};
use crate::format::tensors::prologue::{
    PROLOGUE_LEN, Prologue, VERSION_ENCRYPTED, VERSION_LONG, VERSION_PLAIN,
};
use crate::format::tensors::{metadata, trailer};
use crate::io::{Ending, Published, Reservation, WriteAt, closed_error, write_all_at};
use crate::sys::process::OwnerProcess;

/// Largest alignment: a huge page, beyond which padding would only waste space.
const MAX_ALIGNMENT: u64 = 2 << 20;
/// Marks the end of a file.
const END_MARK: [u8; 8] = [0; 8];

/// Bytes of the shortest index that metadata leave free for entries; enough for some 2,000 entries.
const ENTRIES_LEN: u64 = MIN_INDEX_LEN / 2;

/// An index with a manifest or an identity is written again once the number of tensors has grown by
/// this fraction (1/8).
const VISIBLE_GROWTH: usize = 8;

/// A file under construction: a `.tensors` file, unless [`Writer::write_safetensors`] is called.
///
/// If the sink makes bytes visible early, it holds a complete file after each [`Writer::write`]:
/// all tensors written so far or, with a manifest or an identity, at least eight ninths of them.
pub struct Writer {
    owner: OwnerProcess,
    sink: Option<Box<dyn WriteAt>>,
    uri: String,
    pub(super) base: u64,
    pub(super) options: SaveOptions,
    pub(super) entries: Vec<Entry>,
    /// Bytes of their entries in the index, without tags.
    entries_len: u64,
    /// The digests of their headers, for a manifest and for the file's identity.
    digests: Vec<[u8; 32]>,
    names: NameTree,
    /// The encoded metadata, which are written after the entries of the index.
    metadata: Vec<u8>,
    index_len: u64,
    visible_index: VisibleIndex,
    pub(super) end: u64,
    version: u32,
    pub(super) tensor_bytes: u64,
    pub(super) progress: Arc<AtomicU64>,
    pub(super) failed: bool,
    overtaken: bool,
    /// True for a file of another format, which is written as a whole and has no index at its end.
    pub(super) other_format: bool,
}

/// The index that was written last, in a file whose bytes are visible early.
#[derive(Clone, Copy, Default)]
struct VisibleIndex {
    entries: usize,
    /// Bytes of these entries.
    entries_len: u64,
    tagged: bool,
    /// Bytes of the whole block; 0 before there is one.
    index_len: u64,
}

impl Writer {
    /// Begins a file at position `base` of the sink.
    pub fn new(sink: Box<dyn WriteAt>, base: u64, options: SaveOptions) -> Result<Self> {
        if !options.alignment.is_power_of_two() || options.alignment > MAX_ALIGNMENT {
            return Err(Error::InvalidArgument(format!(
                "alignment must be a power of two of at most {MAX_ALIGNMENT} bytes, not {}",
                options.alignment
            )));
        }
        let encrypted = options.encryption.is_some();
        let pairs = options.metadata.as_deref().unwrap_or(&[]);
        if encrypted && !pairs.is_empty() && !options.clear_metadata {
            return Err(Error::InvalidArgument(format!(
                "`{}`: the metadata of an encrypted file are not encrypted, and only a manifest \
                 authenticates them: leave them out, or pass clear_metadata=True",
                sink.uri()
            )));
        }
        let metadata = metadata::encode(pairs, sink.uri())?;
        Ok(Writer {
            owner: OwnerProcess::current(),
            uri: sink.uri().to_owned(),
            sink: Some(sink),
            base,
            options,
            entries: Vec::new(),
            entries_len: 0,
            digests: Vec::new(),
            names: NameTree::default(),
            metadata,
            index_len: 0,
            visible_index: VisibleIndex::default(),
            end: 0,
            version: if encrypted { VERSION_ENCRYPTED } else { VERSION_PLAIN },
            tensor_bytes: 0,
            progress: Arc::default(),
            failed: false,
            overtaken: false,
            other_format: false,
        })
    }

    /// Returns the path or address.
    pub fn uri(&self) -> &str {
        &self.uri
    }

    /// Returns the bytes of tensor data written so far.
    pub fn tensor_bytes(&self) -> u64 {
        self.tensor_bytes
    }

    /// Returns a counter of the bytes of tensor data written so far, to be watched while
    /// [`Writer::write`] runs.
    pub fn progress(&self) -> Arc<AtomicU64> {
        Arc::clone(&self.progress)
    }

    /// Gives the file an identity. Nothing may have been written yet.
    pub fn set_identity(&mut self, identity: IdentitySource) -> Result<()> {
        self.check_no_tensors()?;
        self.options.identity = Some(identity);
        Ok(())
    }

    /// Adds metadata that tell no more than the index, which is not encrypted either. Nothing may
    /// have been written yet.
    pub fn add_metadata(&mut self, name: String, value: String) -> Result<()> {
        self.check_no_tensors()?;
        let mut pairs = self.options.metadata.clone().unwrap_or(Vec::new());
        pairs.push((name, value));
        self.metadata = metadata::encode(&pairs, &self.uri)?;
        self.options.metadata = Some(pairs);
        Ok(())
    }

    fn check_no_tensors(&self) -> Result<()> {
        if self.index_len > 0 {
            return Err(Error::InvalidArgument(format!("`{}` has tensors already", self.uri)));
        }
        Ok(())
    }

    /// Returns the file's identity, of the tensors written so far.
    pub fn identity(&self) -> Option<FileIdentity> {
        match self.options.identity? {
            IdentitySource::Given(id) => Some(id),
            IdentitySource::FromContent => {
                sha256(self.digests.as_flattened()).first_chunk().copied()
            }
        }
    }

    /// Returns the position after the last byte of the file, its end mark included.
    pub fn end(&self) -> u64 {
        if self.other_format { self.end } else { self.end + END_MARK.len() as u64 }
    }

    /// Writes tensors after those written before.
    ///
    /// Names are checked before anything is written. If writing fails half-way, the writer can
    /// only be dropped.
    pub fn write(&mut self, tensors: Vec<SaveTensor<'_>>, cancel: &dyn Cancel) -> Result<()> {
        self.check_usable()?;
        if self.other_format {
            let why = "a safetensors file, whose tensors all go into one call";
            return Err(Error::InvalidArgument(format!("`{}` is {why}", self.uri)));
        }
        tensors.iter().try_for_each(|tensor| tensor.check(&self.uri))?;
        self.check_names(&tensors)?;
        self.failed = true;
        let parts = tensors.into_iter().map(|tensor| {
            let SaveTensor { name, kind, module_index, dtype, shape, data } = tensor;
            let meta = matches!(data, TensorData::Meta);
            (UnplacedTensor { name, kind, dtype, shape, meta }, (module_index, data))
        });
        let (placed, sources): (Vec<_>, Vec<_>) = parts.unzip();
        self.entries.reserve(placed.len());
        self.digests.reserve(placed.len());
        let layout = self.lay_out(placed, cancel)?;
        let sink = self.sink()?;
        let head = end_of_index(self.base, self.index_len);
        let len = layout.end + END_MARK.len() as u64;
        sink.reserve(&Reservation { head, len, parts: None })?;
        let items = layout.entries.iter().zip(sources);
        let items = items
            .map(|(entry, (module_index, data))| WriteTensor { entry, module_index, data })
            .collect::<Vec<_>>();
        let options = WriteOptions {
            threads: self.options.threads,
            hashes: Some(self.options.hashes),
            encryption: self.options.encryption.as_deref(),
            needs_digests: self.options.identity.is_some(),
            memory: self.options.memory,
        };
        let digests = write_tensors(sink, &items, &options, &self.progress, cancel)?;
        drop(items);
        self.digests.extend(digests);
        self.tensor_bytes += layout.entries.iter().map(|entry| entry.data_len).sum::<u64>();
        self.version = self.version.max(layout.version);
        self.end = layout.end;
        self.entries_len += encoded_lens(&layout.entries, false);
        self.entries.extend(layout.entries);
        if self.sink()?.facts().is_visible_early {
            self.make_index_visible(cancel)?;
        }
        self.failed = false;
        Ok(())
    }

    /// Ends the file and makes it visible. A second call does nothing.
    pub fn finish(&mut self, cancel: &dyn Cancel) -> Result<()> {
        let published = self.end_with(Ending::Finished, cancel)?;
        self.overtaken |= published == Some(Published::Overtaken);
        Ok(())
    }

    /// Ends a file that the caller has not finished. If another file has its name, that one stays:
    /// see [`Published::OtherName`]. Returns the outcome.
    pub fn finish_unclosed(&mut self, cancel: &dyn Cancel) -> Result<Published> {
        Ok(self.end_with(Ending::Unclosed, cancel)?.unwrap_or(Published::Aborted))
    }

    fn end_with(&mut self, ending: Ending, cancel: &dyn Cancel) -> Result<Option<Published>> {
        if self.sink.is_none() {
            return Ok(None);
        }
        self.check_usable()?;
        if !self.other_format && self.entries.is_empty() {
            self.abandon();
            let why = "a .tensors file has at least one tensor, and a file that existed is \
                       unchanged";
            return Err(Error::InvalidArgument(format!("no tensors for `{}`: {why}", self.uri)));
        }
        self.failed = true;
        if !self.other_format {
            self.write_index(cancel)?;
        }
        let end = self.end();
        let mut sink = self.sink.take();
        let published = sink.as_mut().map(|sink| sink.publish(end, ending, cancel)).transpose()?;
        self.failed = false;
        Ok(published)
    }

    /// True if a write has failed half-way, so that the file can only be abandoned.
    pub fn failed(&self) -> bool {
        self.failed
    }

    /// True if [`Writer::finish`] has dropped the file, because a later save of this process to the
    /// same path or address was complete before.
    pub fn overtaken(&self) -> bool {
        self.overtaken
    }

    /// Abandons the file: nothing becomes visible.
    pub fn abandon(&mut self) {
        self.sink = None;
    }

    pub(super) fn check_usable(&self) -> Result<()> {
        self.owner.check(&self.uri)?;
        if self.failed {
            return Err(Error::Closed(format!("an earlier write to `{}` failed", self.uri)));
        }
        self.sink().map(drop)
    }

    pub(super) fn sink(&self) -> Result<&dyn WriteAt> {
        self.sink.as_deref().ok_or_else(|| closed_error(&self.uri))
    }

    fn check_names(&mut self, tensors: &[SaveTensor<'_>]) -> Result<()> {
        let first = self.entries.len();
        for (at, tensor) in tensors.iter().enumerate() {
            if let Err(what) = self.names.insert(&tensor.name, first + at) {
                // Names of this call that were inserted before must not block a corrected call.
                tensors.iter().take(at).for_each(|earlier| self.names.remove(&earlier.name));
                return Err(Error::InvalidArgument(format!("{what} (`{}`)", self.uri)));
            }
        }
        Ok(())
    }

    /// Assigns file positions after the earlier tensors, and extends the index if necessary.
    fn lay_out(&mut self, placed: Vec<UnplacedTensor>, cancel: &dyn Cancel) -> Result<FileLayout> {
        let SaveOptions { alignment, hashes, .. } = self.options;
        let encryption = self.options.encryption.as_deref();
        let encrypted = encryption.map(|options| options.derivation.is_some());
        // Lengths of entries do not depend on positions, so a trial gives the index's length.
        let trial = place_tensors(
            placed.to_vec(),
            self.end.max(end_of_index(self.base, MIN_INDEX_LEN)),
            alignment,
            hashes,
            encrypted,
        )?;
        let tagged = self.version.max(trial.version) >= VERSION_LONG;
        let used = self.encoded_entries_len(tagged) + encoded_lens(&trial.entries, tagged);
        if self.index_len == 0 {
            self.index_len = self.index_len_for(used);
            self.end = end_of_index(self.base, self.index_len);
        } else if used + self.trailer_len() > self.index_len {
            // Twice what is needed, so that many small calls do not move the data many times.
            self.move_data(self.index_len_for(used.saturating_mul(2)), cancel)?;
        }
        place_tensors(placed, self.end, alignment, hashes, encrypted)
    }

    /// Moves all data towards the end of the file, to make room for a longer index. The distance
    /// is a multiple of every alignment up to the largest, so that all paddings stay right.
    fn move_data(&mut self, index_len: u64, cancel: &dyn Cancel) -> Result<()> {
        let distance = (index_len - self.index_len).next_multiple_of(MAX_ALIGNMENT);
        let start = end_of_index(self.base, self.index_len);
        let distance = self.sink()?.insert(start, self.end, distance, cancel)?;
        for entry in &mut self.entries {
            entry.header_offset += distance;
            entry.data_offset += distance;
        }
        self.index_len += distance;
        self.end += distance;
        Ok(())
    }

    /// Returns the bytes at the end of the index block that a manifest takes.
    fn manifest_len(&self) -> usize {
        let encryption = self.options.encryption.as_deref();
        if encryption.is_some_and(|options| options.manifest) { MANIFEST_LEN } else { 0 }
    }

    /// Returns the bytes at the end of the index block that are not entries.
    fn trailer_len(&self) -> u64 {
        (trailer::len(&self.metadata, self.options.identity.is_some()) + self.manifest_len()) as u64
    }

    /// Returns the bytes to reserve for an index whose entries have `used` bytes. Metadata leave
    /// room for later entries.
    fn index_len_for(&self, used: u64) -> u64 {
        if !self.options.room_for_more {
            return used + self.trailer_len();
        }
        index_len_for(used.max(ENTRIES_LEN) + self.trailer_len())
    }

    /// Returns the bytes of all entries in the index.
    fn encoded_entries_len(&self, tagged: bool) -> u64 {
        let tags = if tagged { self.entries.len() as u64 * index::TAG_LEN } else { 0 };
        self.entries_len + tags
    }

    /// True if entries of the index have tags.
    fn has_tags(&self) -> bool {
        self.version >= VERSION_LONG
    }

    /// Makes written tensors visible in the file. New entries are added to the index in the file.
    /// It is written anew only if its length or form has changed, or if it has a manifest or an
    /// identity.
    fn make_index_visible(&mut self, cancel: &dyn Cancel) -> Result<()> {
        let VisibleIndex { entries, entries_len, tagged, index_len } = self.visible_index;
        let rewrites_index = self.manifest_len() > 0 || self.options.identity.is_some();
        let new = self.entries.get(entries..).unwrap_or(&[]);
        if index_len != self.index_len || tagged != self.has_tags() {
            self.write_index(cancel)?;
        } else if rewrites_index {
            if new.len() <= entries / VISIBLE_GROWTH {
                return Ok(());
            }
            self.write_index(cancel)?;
        } else {
            let added = index::encode(new, tagged, encoded_lens(new, tagged))?;
            let at = end_of_index(self.base, entries_len);
            let sink = self.sink()?;
            write_all_at(sink, self.end, &mut [IoSlice::new(&END_MARK)], cancel)?;
            write_all_at(sink, at, &mut [IoSlice::new(&added)], cancel)?;
            write_all_at(sink, self.base, &mut [IoSlice::new(&self.prologue())], cancel)?;
        }
        let (entries, tagged) = (self.entries.len(), self.has_tags());
        let entries_len = self.encoded_entries_len(tagged);
        self.visible_index =
            VisibleIndex { entries, entries_len, tagged, index_len: self.index_len };
        Ok(())
    }

    fn prologue(&self) -> [u8; PROLOGUE_LEN] {
        let prologue = Prologue {
            version: self.version,
            encrypted: self.options.encryption.is_some(),
            versioned_entries: self.has_tags(),
            tensor_bytes: self.tensor_bytes,
            count: self.entries.len() as u64,
            index_len: self.index_len,
        };
        prologue.encode()
    }

    /// Writes end mark, prologue and the whole index.
    fn write_index(&self, cancel: &dyn Cancel) -> Result<()> {
        let sink = self.sink()?;
        let encryption = self.options.encryption.as_deref();
        let mut block = index::encode(&self.entries, self.has_tags(), self.index_len)?;
        let start = self.prologue();
        let used = usize::try_from(self.encoded_entries_len(self.has_tags())).unwrap_or(usize::MAX);
        let unsealed = block.len().saturating_sub(self.manifest_len());
        let space = block.get_mut(used..unsealed).unwrap_or(&mut []);
        trailer::write(space, &self.metadata, self.identity())?;
        if let Some(options) = encryption.filter(|options| options.manifest) {
            Manifest::new(&options.key)?.seal(&start, &mut block, &self.digests)?;
        }
        write_all_at(sink, self.end, &mut [IoSlice::new(&END_MARK)], cancel)?;
        write_all_at(sink, self.base, &mut [IoSlice::new(&start), IoSlice::new(&block)], cancel)
    }
}

fn encoded_lens(entries: &[Entry], tagged: bool) -> u64 {
    entries.iter().map(|entry| entry.encoded_len(tagged) as u64).sum()
}
