//! Checkpoints in several files (shards), which an index names. They are opened as one catalog.

use std::collections::{BTreeMap, BTreeSet};
use std::sync::Arc;

use super::catalog_part::{CatalogPart, Opening, malformed};
use super::file::TensorFile;
use super::head::FileHead;
use super::local_copies::{suspects_of_open, with_intact_copies};
use crate::cancel::Cancel;
use crate::engine::workers;
use crate::error::{Error, Result, Shortened};
use crate::format::catalog::{Catalog, Entry};
use crate::format::name::Name;
use crate::format::name_tree::NameTree;
use crate::format::shards::{self, MAX_LEN, ShardMap};
use crate::io::local::siblings;
use crate::io::{CachedHead, OpenSibling, ReadAt, SourceIdentity, compare_all};
use crate::sys::fork_safe_mutex::ForkSafeMutex;

/// Number of files that are opened concurrently: local files, and files of a server, where each
/// request has a latency.
const AT_ONCE: usize = 16;
const AT_ONCE_OF_SERVERS: usize = 64;
/// Bytes of the first request to a server for a file of which one tensor is wanted.
const FIRST_OF_ONE: u64 = 64 << 10;

/// The index of a checkpoint in several files, which are siblings of the index.
pub struct ShardIndex {
    head: FileHead,
    /// Opens the files; None for a file object.
    open_sibling: Option<OpenSibling>,
    index: ShardMap,
    /// The number of the file of each tensor that the index names, by the stored form of the
    /// tensor's name.
    indexed_files: BTreeMap<String, usize>,
    /// The identities of the files by number: local ones as they were when the index was read,
    /// those of servers as they were first opened.
    seen: ForkSafeMutex<BTreeMap<usize, SourceIdentity>>,
    /// The cached head with which other processes open the index without a request, if it is kept.
    cached_head: Option<CachedHead>,
}

/// The files of an index that are opened.
struct ShardSelection<'i> {
    index: &'i ShardIndex,
    /// Their numbers in it, in rising order.
    numbers: Vec<usize>,
    /// Bytes of the first request to a server for each; None for the usual number.
    first: Option<u64>,
}

impl ShardIndex {
    /// Reads the index of a source. None if the source is no index, or can be read only once.
    pub fn of_source(
        source: Arc<dyn ReadAt>,
        base: u64,
        cancel: &dyn Cancel,
    ) -> Result<Option<Self>> {
        if source.facts().len.is_none() {
            return Ok(None);
        }
        with_intact_copies(&|error| suspects_of_open(&source, error), || {
            let head = FileHead::read(Arc::clone(&source), base, cancel)?;
            let is_index = shards::recognises(&head.bytes);
            is_index.then(|| Self::read(head, &Opening::new(cancel))).transpose()
        })
    }

    /// Reads an index whose first bytes were read already.
    pub fn read(head: FileHead, opening: &Opening<'_>) -> Result<Self> {
        let uri = head.source.uri();
        let json = head.read_all(MAX_LEN, "an index of shards", opening.cancel)?;
        if let Some(pin) = opening.pin_of(&*head.source)? {
            compare_all(&pin, &json, head.source.facts())?;
        }
        let index = shards::parse(&json).map_err(|e| e.in_file(uri))?;
        let indexed_files = indexed_files(&index, uri)?;
        let cached_head = opening.cached_head(&*head.source, head.base, &json, &[]);
        let (open_sibling, found) = siblings(&*head.source, &index.files)?;
        let seen = found.into_iter().enumerate();
        let seen = seen.filter_map(|(file, identity)| Some((file, identity?))).collect();
        let seen = ForkSafeMutex::new(seen);
        Ok(ShardIndex { head, open_sibling, index, indexed_files, seen, cached_head })
    }

    /// Fails if a file that was opened now is another one than before, for tensors of two versions
    /// would be loaded then.
    fn check_same(&self, file: usize, source: &dyn ReadAt) -> Result<()> {
        let Some(found) = source.facts().identity.clone() else { return Ok(()) };
        self.seen.lock().entry(file).or_insert_with(|| found.clone()).check(&found, source.uri())
    }

    /// The address of the index.
    pub fn uri(&self) -> &str {
        self.head.source.uri()
    }

    /// The number of the file that has a tensor, by the stored form of its name.
    pub fn file_of(&self, name: &str) -> Option<usize> {
        self.indexed_files.get(name).copied()
    }

    /// Opens one of the files, for one tensor.
    pub fn open_one(&self, file: usize, opening: &Opening<'_>) -> Result<TensorFile> {
        let selection =
            ShardSelection { index: self, numbers: vec![file], first: Some(FIRST_OF_ONE) };
        self.open(&selection, opening)
    }

    /// Opens the files of the wanted tensors; all files if the index does not name one of these
    /// tensors.
    pub fn open_wanted(&self, opening: &Opening<'_>) -> Result<TensorFile> {
        let files = opening.wanted.and_then(|wanted| {
            wanted.iter().map(|name| self.file_of(name)).collect::<Option<BTreeSet<_>>>()
        });
        let files = files.filter(|files| !files.is_empty());
        let one = files.is_some() && opening.wanted.is_some_and(|wanted| wanted.len() == 1);
        let numbers = match files {
            Some(files) => files.into_iter().collect(),
            None => (0..self.index.files.len()).collect(),
        };
        let first = one.then_some(FIRST_OF_ONE);
        self.open(&ShardSelection { index: self, numbers, first }, opening)
    }

    fn open(&self, selection: &ShardSelection<'_>, opening: &Opening<'_>) -> Result<TensorFile> {
        let uri = self.uri();
        let parts = open_all(selection, opening)?;
        let mut cached_heads = Vec::from_iter(self.cached_head.clone());
        let mut sources = Vec::with_capacity(parts.len());
        let mut entries: Vec<Entry> = Vec::new();
        let mut metadata: Option<BTreeMap<String, String>> = None;
        let bad = |what: &str| malformed(uri, format!("the index of shards names {what}"));
        let mut formats = parts.iter().map(|part| part.format);
        let format = formats.next().ok_or_else(|| bad("no files"))?;
        if formats.any(|other| other != format) {
            return Err(bad("files of several formats: expected one"));
        }
        for (file, part) in parts.into_iter().enumerate() {
            // If two files contain a tensor of this name, the index states which of them is used.
            let elsewhere = |entry: &Entry| {
                let found = self.indexed_files.get(entry.name.stored());
                let other = found.is_some_and(|found| selection.numbers.get(file) != Some(found));
                other && format.names_tensors()
            };
            entries.reserve(part.entries.len());
            entries.extend(part.entries.into_iter().filter(|entry| !elsewhere(entry)));
            if let Some(pairs) = part.metadata {
                metadata.get_or_insert_default().extend(pairs);
            }
            cached_heads.extend(part.head);
            sources.push(part.source);
        }
        if !self.index.metadata.is_empty() {
            metadata.get_or_insert_default().extend(self.index.metadata.iter().cloned());
        }
        let mut names = NameTree::default();
        for (number, entry) in entries.iter().enumerate() {
            names.insert(&entry.name, number).map_err(|_| {
                let what = format!(
                    "tensor `{}` is in two files, and the index does not say which of them to read",
                    entry.name
                );
                malformed(uri, what)
            })?;
        }
        let metadata = Arc::new(Ok(metadata.map(|pairs| pairs.into_iter().collect())));
        let mut indexed_files = BTreeMap::new();
        if format.names_tensors() {
            check_all_are_there(selection, &names, uri)?;
        } else {
            // Inserted one by one, to need little memory at once: see the function `indexed_files`.
            for (name, file) in &self.index.tensors {
                if let Ok(opened) = selection.numbers.binary_search(file) {
                    indexed_files.insert(name.clone(), opened);
                }
            }
        }
        let catalog =
            Catalog { format, entries: Arc::new(entries), names, metadata, indexed_files };
        Ok(TensorFile::new(uri.to_owned(), sources, catalog, None, cached_heads))
    }
}

/// Returns the number of the file of each tensor that the index names, by the stored form of its
/// name.
fn indexed_files(index: &ShardMap, uri: &str) -> Result<BTreeMap<String, usize>> {
    // Inserted one by one, so that each allocation is small: `collect` would first allocate a
    // sorted list of all names.
    let mut indexed_files = BTreeMap::new();
    for (name, &file) in &index.tensors {
        let name = Name::from_key(name).map_err(|what| malformed(uri, what))?;
        indexed_files.insert(name.stored().to_owned(), file);
    }
    Ok(indexed_files)
}

fn check_all_are_there(selection: &ShardSelection<'_>, names: &NameTree, uri: &str) -> Result<()> {
    let is_opened = |file: &usize| selection.numbers.binary_search(file).is_ok();
    let mut indexed = selection.index.indexed_files.iter().filter(|(_, file)| is_opened(file));
    let missing = indexed.find(|(name, _)| names.find(name).is_none());
    let Some((name, &file)) = missing else { return Ok(()) };
    let shard = selection.index.index.files.get(file).map_or("", String::as_str);
    let what = format!(
        "expected tensor `{}` in `{}`, which does not hold it",
        Shortened(name.trim_start_matches('\u{1e}')),
        Shortened(shard)
    );
    Err(malformed(uri, what))
}

/// Returns how many files of such a source to open at once: fewer if the number of its connections
/// is set.
fn at_once(source: &dyn ReadAt) -> usize {
    let capabilities = source.capabilities();
    let any_number = capabilities.initial_readers < capabilities.max_auto_readers;
    let most = if any_number && !source.facts().is_local { AT_ONCE_OF_SERVERS } else { AT_ONCE };
    most.min(capabilities.max_readers.max(AT_ONCE))
}

/// Opens the files, several at once, in the order of their numbers.
fn open_all(selection: &ShardSelection<'_>, opening: &Opening<'_>) -> Result<Vec<CatalogPart>> {
    let ShardSelection { index, numbers, first } = selection;
    let files = numbers.iter().filter_map(|&file| Some((file, index.index.files.get(file)?)));
    let files: Vec<_> = files.collect();
    let at_once = at_once(&*index.head.source).min(files.len());
    workers::map(at_once, files.into_iter().enumerate(), opening.cancel, |file, control| {
        let (number, (file, name)) = file;
        let opened = index.open_sibling.as_ref().map(|open| open(name, *first, control));
        let source = opened.transpose()?.flatten().ok_or_else(|| {
            Error::Unsupported(format!(
                "`{}` is an index of shards, which cannot be found from a file object: pass the \
                 path or address of the index",
                index.uri()
            ))
        })?;
        index.check_same(file, &*source)?;
        let opening = Opening { cancel: control, ..*opening };
        with_intact_copies(&|error| suspects_of_open(&source, error), || {
            let head = opening.head(&source, 0)?;
            head.part((number, at_once), &opening)
        })
    })
}
