//! An open file, or the shards of a checkpoint: sources and a catalog.

use std::collections::{BTreeMap, HashMap};
use std::fs::File;
use std::sync::atomic::{AtomicBool, Ordering};
use std::sync::{Arc, OnceLock};

use crate::cancel::Cancel;
use crate::codec::crypt::{DecryptionOptions, HeaderTag, Manifest};
use crate::error::{Error, Escaped, Result};
use crate::fallible::{LISTS, out_of_memory};
use crate::format::catalog::{Catalog, Entry, Format, data_len};
use crate::format::name_tree::NameTree;
use crate::format::tensors::identity::FileIdentity;
use crate::format::tensors::prologue::{PROLOGUE_LEN, Prologue};
use crate::format::tensors::{index, metadata, trailer};
use crate::io::{CachedHead, ClosedSource, HubPins, ReadAt, read_exact_at};
use crate::mem::Buffers;
use crate::stats::Counters;
use crate::sys;
use crate::sys::fork_safe_mutex::ForkSafeMutex;

/// An open file or checkpoint: its tensors, and the sources of their bytes.
pub struct TensorFile {
    uri: String,
    sources: ForkSafeMutex<Arc<[Arc<dyn ReadAt>]>>,
    catalog: Arc<Catalog>,
    /// The state of a `.tensors` file; None for other formats.
    pub(super) tensors_state: Option<Arc<TensorsFileState>>,
    cached_heads: Arc<[CachedHead]>,
    /// The checksums that a hub publishes of its files.
    pub(super) hub_pins: Arc<HubPins>,
}

/// The state that only `.tensors` files have.
pub(super) struct TensorsFileState {
    /// The position of the file's first byte in its source.
    pub base: u64,
    /// The prologue, which is the first bytes of the file.
    pub prologue: Prologue,
    /// Prologue and index as they are in the file, if it has a manifest (a seal).
    pub head: Option<Vec<u8>>,
    /// The identity by which the pickle of a saved object refers to this file.
    pub identity: Option<FileIdentity>,
    pub decryption: OnceLock<Arc<DecryptionOptions>>,
    /// The tags that headers must have, by stored name. Set once the manifest was verified.
    pub verified_manifest: OnceLock<(Manifest, HashMap<String, HeaderTag>)>,
    /// Set once data were decrypted with the key.
    pub key_fits: AtomicBool,
    /// Set once a tensor was found that is encrypted in one piece longer than usual: then the data
    /// of tensors are not cut.
    pub long_pieces: AtomicBool,
}

impl TensorFile {
    pub(super) fn new(
        uri: String,
        sources: Vec<Arc<dyn ReadAt>>,
        catalog: Catalog,
        tensors_state: Option<TensorsFileState>,
        cached_heads: Vec<CachedHead>,
    ) -> Self {
        TensorFile {
            uri,
            sources: ForkSafeMutex::new(sources.into()),
            catalog: Arc::new(catalog),
            tensors_state: tensors_state.map(Arc::new),
            cached_heads: cached_heads.into(),
            hub_pins: Arc::default(),
        }
    }

    /// Returns the same file with other tensors, or with parts of its tensors. A tensor may have
    /// several parts; its name then belongs to the first one.
    pub(super) fn with_entries(&self, entries: Vec<Entry>, are_parts: bool) -> Result<Self> {
        let mut names = NameTree::default();
        for (number, entry) in entries.iter().enumerate() {
            if !are_parts || names.find(entry.name.stored()).is_none() {
                names.insert(&entry.name, number).map_err(Error::InvalidArgument)?;
            }
        }
        let catalog = Catalog {
            format: self.format(),
            entries: Arc::new(entries),
            names,
            metadata: Arc::clone(&self.catalog.metadata),
            indexed_files: BTreeMap::new(),
        };
        Ok(TensorFile { catalog: Arc::new(catalog), ..self.duplicate() })
    }

    /// Returns another handle of the same file. It stays open when this one is closed.
    #[doc(hidden)]
    pub fn duplicate(&self) -> Self {
        TensorFile {
            uri: self.uri.clone(),
            sources: ForkSafeMutex::new(self.sources()),
            catalog: Arc::clone(&self.catalog),
            tensors_state: self.tensors_state.clone(),
            cached_heads: Arc::clone(&self.cached_heads),
            hub_pins: Arc::clone(&self.hub_pins),
        }
    }

    /// Returns cached heads, if [`Opening::keeps_heads`] asked for them. With these, other
    /// processes open the same files without a request. There is one for each file that supports
    /// random access: first the index of shards, if there is one, then the files in their order. Of
    /// local files, only those in a hub's cache have one: it names the hub's commit, and has no
    /// bytes.
    ///
    /// The bytes of a head are all that come before the tensors. Archives of `torch.save` have
    /// their directory at their end: their heads have only the few bytes that tell the format.
    ///
    /// [`Opening::keeps_heads`]: super::catalog_part::Opening::keeps_heads
    #[doc(hidden)]
    pub fn heads(&self) -> &[CachedHead] {
        &self.cached_heads
    }

    /// Replaces the sources for which there is another one.
    pub(super) fn replace_sources(
        &self,
        other: impl Fn(usize, &Arc<dyn ReadAt>) -> Option<Arc<dyn ReadAt>>,
    ) {
        let mut sources = self.sources.lock();
        let found = sources.iter().enumerate();
        let replaced =
            found.map(|(file, source)| other(file, source).unwrap_or(Arc::clone(source)));
        *sources = replaced.collect();
    }

    /// Returns the identity of each file, as text to compare; see [`Facts::identity`].
    #[doc(hidden)]
    pub fn identities(&self) -> Vec<Option<String>> {
        let text =
            |source: &Arc<dyn ReadAt>| Some(format!("{:?}", source.facts().identity.as_ref()?));
        self.sources().iter().map(text).collect()
    }

    /// Returns the headers of the servers' responses when its files were opened.
    #[doc(hidden)]
    pub fn headers(&self) -> Vec<(String, String)> {
        let sources = self.sources();
        sources.iter().flat_map(|source| source.facts().headers().to_vec()).collect()
    }

    /// Records in the report of a load why a slower way than the wanted one was used for a file.
    #[doc(hidden)]
    pub fn report_fallbacks(&self, counters: &Counters) {
        for source in self.sources().iter() {
            if source.facts().local_copy().is_some() {
                counters.local_copy();
            }
            source.facts().fallback().into_iter().for_each(|why| counters.fallback(&why));
        }
    }

    /// Returns prologue and index as they are in the file, if it has a manifest.
    pub(super) fn head_with_manifest(&self) -> Option<(&[u8], &[u8])> {
        self.tensors_state.as_ref()?.head.as_ref()?.split_at_checked(PROLOGUE_LEN)
    }

    /// Remembers the verified manifest, and the tag of each header.
    pub(super) fn set_verified_manifest(
        &self,
        manifest: Manifest,
        digests: Vec<HeaderTag>,
    ) -> Result<()> {
        let mut by_name = HashMap::new();
        let count = digests.len();
        by_name.try_reserve(count).map_err(|_| out_of_memory(count as u64, LISTS))?;
        let names = self.entries().iter().map(|entry| entry.name.stored().to_owned());
        by_name.extend(names.zip(digests));
        // Kept, because headers are read again with their data: a server may send different ones
        // then.
        if let Some(tensors_state) = &self.tensors_state {
            tensors_state.verified_manifest.get_or_init(|| (manifest, by_name));
        }
        Ok(())
    }

    /// Refuses a header that differs from the one that the manifest covers.
    pub(super) fn check_header(&self, entry: &Entry, raw: &[u8]) -> Result<()> {
        let sealed = self.tensors_state.as_ref().and_then(|state| state.verified_manifest.get());
        let Some((manifest, digests)) = sealed else { return Ok(()) };
        let expected = digests.get(entry.name.stored());
        if expected == Some(&manifest.digest(raw)) { Ok(()) } else { Err(self.manifest_mismatch()) }
    }

    /// The mark of a `.tensors` file that some of its tensors are encrypted in one long piece.
    pub(super) fn long_pieces(&self) -> Option<&AtomicBool> {
        self.tensors_state.as_ref().map(|state| &state.long_pieces)
    }

    /// True if some of its tensors were found to be encrypted in one long piece.
    pub(super) fn has_long_pieces(&self) -> bool {
        self.long_pieces().is_some_and(|long_pieces| long_pieces.load(Ordering::Relaxed))
    }

    pub(super) fn manifest_mismatch(&self) -> Error {
        Error::Crypt(format!(
            "the manifest of `{}` does not match: wrong key, or names, shapes, order, hashes or \
             tags were changed",
            self.uri
        ))
    }

    /// Returns the options with which loads decrypt; None if they do not.
    pub fn decryption(&self) -> Option<&DecryptionOptions> {
        self.tensors_state.as_ref()?.decryption.get().map(Arc::as_ref)
    }

    /// The identity by which the pickle of a saved object refers to this file.
    pub fn identity(&self) -> Option<FileIdentity> {
        self.tensors_state.as_ref()?.identity
    }

    /// The path or address.
    pub fn uri(&self) -> &str {
        &self.uri
    }

    /// Returns the sources of the bytes: one for each file, as entries number the files.
    pub fn sources(&self) -> Arc<[Arc<dyn ReadAt>]> {
        Arc::clone(&self.sources.lock())
    }

    /// The source of one file.
    pub fn source(&self, file: usize) -> Result<Arc<dyn ReadAt>> {
        let found = self.sources().get(file).map(Arc::clone);
        found.ok_or_else(|| Error::Bug(format!("no file {file} of `{}`", self.uri)))
    }

    /// True if tensors can be read in any order.
    pub fn is_seekable(&self) -> bool {
        self.sources().iter().all(|source| source.facts().len.is_some())
    }

    /// Releases the sources once the reads under way have ended. The catalog stays.
    pub fn close(&self) {
        let sources = self.sources();
        let closed =
            sources.iter().map(|source| Arc::new(ClosedSource::new(&**source)) as Arc<dyn ReadAt>);
        *self.sources.lock() = closed.collect();
    }

    /// The format of the file, or of all shards.
    pub fn format(&self) -> Format {
        self.catalog.format
    }

    /// Returns the metadata as names and values. None if the file has none; a safetensors file
    /// distinguishes that from an empty list. If they are damaged this is an error, but tensors can
    /// still be loaded. Metadata of a `.tensors` file are authenticated only if it has a manifest
    /// and was opened with a key.
    pub fn metadata(&self) -> Result<Option<&[(String, String)]>> {
        match &*self.catalog.metadata {
            Ok(pairs) => Ok(pairs.as_deref()),
            Err(damage) => Err(damage.clone().in_file(&self.uri)),
        }
    }

    /// Returns the number of each tensor's file, as the index of shards says. Filled only where the
    /// entries are storages, which the index does not name.
    #[doc(hidden)]
    pub fn indexed_files(&self) -> &BTreeMap<String, usize> {
        &self.catalog.indexed_files
    }

    /// Returns the prologue, which is the first bytes of a `.tensors` file; None for other formats.
    pub fn prologue(&self) -> Option<&Prologue> {
        self.tensors_state.as_ref().map(|state| &state.prologue)
    }

    /// True if the data of its tensors are encrypted.
    pub fn is_encrypted(&self) -> bool {
        self.prologue().is_some_and(|prologue| prologue.encrypted)
    }

    /// Refuses to verify a file whose format has no hashes.
    #[doc(hidden)]
    pub fn check_hashes(&self) -> Result<()> {
        if self.format().has_hashes() { Ok(()) } else { Err(self.no_hashes(&self.uri, "")) }
    }

    /// Returns the error that the format of a file has no hashes. `elsewhere` adds why no other
    /// source has one.
    pub(super) fn no_hashes(&self, uri: &str, elsewhere: &'static str) -> Error {
        let (uri, format) = (uri.to_owned(), self.format().name());
        Error::NoHashes { uri, format, elsewhere }
    }

    /// Returns prologue and index of a file that holds only the tensors with these numbers, at the
    /// same positions. Other tensors become gaps.
    #[doc(hidden)]
    pub fn head_of(&self, numbers: &[usize]) -> Result<Vec<u8>> {
        let Some(tensors_state) = &self.tensors_state else {
            let format = self.format().name();
            return Err(Error::Unsupported(format!(
                "`{}` is a {format} file: expected a .tensors file, of which parts can be copied",
                self.uri
            )));
        };
        if tensors_state.base != 0 {
            return Err(Error::Unsupported(format!(
                "cannot copy parts of `{}`: it begins at byte {} of a larger file, and not at its \
                 first byte",
                self.uri, tensors_state.base
            )));
        }
        let is_whole = numbers.len() == self.entries().len();
        if let Some(head) = tensors_state.head.as_ref().filter(|_| is_whole) {
            // Unchanged, so that its manifest stays valid.
            return Ok(head.clone());
        }
        let entries = numbers.iter().map(|&number| self.entry(number).cloned());
        let entries = entries.collect::<Result<Vec<_>>>()?;
        let prologue = Prologue {
            tensor_bytes: data_len(entries.iter()),
            count: entries.len() as u64,
            ..tensors_state.prologue
        };
        let tagged = prologue.versioned_entries;
        let mut block = index::encode(&entries, tagged, prologue.index_len)?;
        let used: usize = entries.iter().map(|entry| entry.encoded_len(tagged)).sum();
        // The identity is that of all tensors: a part of the file has none.
        let identity = tensors_state.identity.filter(|_| is_whole);
        let pairs = self.metadata()?.unwrap_or(&[]);
        let metadata = metadata::encode(pairs, self.uri())?;
        trailer::write(block.get_mut(used..).unwrap_or(&mut []), &metadata, identity)?;
        Ok(prologue.encode().into_iter().chain(block).collect())
    }

    /// Reads bytes of the file as they are.
    #[doc(hidden)]
    pub fn raw(&self, offset: u64, buffer: &mut [u8], cancel: &dyn Cancel) -> Result<()> {
        let what = "a copy of the file";
        read_exact_at(&*self.source(0)?, offset, &mut Buffers::from_slice(buffer), what, cancel)
    }

    /// Returns a function that makes the kernel begin to read bytes of one tensor's data, from its
    /// byte `start` on. None if the data are not in a local file, or are in the page cache as far
    /// as samples tell.
    #[doc(hidden)]
    pub fn read_ahead(&self, number: usize, start: u64, len: u64) -> Result<Option<impl FnOnce()>> {
        let entry = self.entry(number)?;
        let source = self.source(entry.file)?;
        let len = len.min(entry.data_len.saturating_sub(start));
        let at = entry.data_offset.saturating_add(start);
        let samples = [0, len / 2, len.saturating_sub(1)];
        let is_cold = |file: Arc<File>| {
            samples.iter().any(|&sample| {
                sys::is_in_page_cache(&file, at.saturating_add(sample)) == Some(false)
            })
        };
        if len == 0 || !source.file().is_some_and(is_cold) {
            return Ok(None);
        }
        Ok(Some(move || source.file().into_iter().for_each(|file| sys::read_ahead(&file, at, len))))
    }

    /// The tensors, as [`Catalog::entries`] has them.
    pub fn entries(&self) -> &[Entry] {
        &self.catalog.entries
    }

    /// The same, shared: they may outlive the file.
    #[doc(hidden)]
    pub fn shared_entries(&self) -> &Arc<Vec<Entry>> {
        &self.catalog.entries
    }

    /// Returns the number of a tensor, by the stored form of its name.
    pub fn find(&self, stored: &str) -> Option<usize> {
        self.catalog.names.find(stored)
    }

    /// Returns the entry with this number.
    pub fn entry(&self, number: usize) -> Result<&Entry> {
        self.entries().get(number).ok_or_else(|| {
            Error::InvalidArgument(format!(
                "tensor number {number} of `{}`, which holds {}",
                self.uri(),
                self.entries().len()
            ))
        })
    }

    /// Returns the numbers of tensors, by the stored forms of their names. A name given twice is an
    /// error.
    pub fn select<S: AsRef<str>>(&self, names: &[S]) -> Result<Vec<usize>> {
        let mut seen = std::collections::HashSet::new();
        names
            .iter()
            .map(|name| {
                let name = name.as_ref();
                let number = self.find(name).ok_or_else(|| Error::TensorNotFound {
                    uri: self.uri().to_owned(),
                    name: Escaped(name.trim_start_matches('\u{1e}')).to_string(),
                })?;
                if seen.insert(number) {
                    Ok(number)
                } else {
                    Err(Error::InvalidArgument(format!("tensor `{name}` is asked for twice")))
                }
            })
            .collect()
    }
}
