//! Checkpoints in several files, which an index names: one catalog of all of them.

use std::collections::{BTreeMap, BTreeSet};
use std::sync::{Arc, Mutex, PoisonError};

use super::copies::{opened, with_sound_copies};
use super::file::TensorFile;
use super::head::Head;
use super::part::{Opening, Part, malformed};
use crate::engine::workers;
use crate::error::{Brief, Error, Result};
use crate::fallible::{LISTS, collected, listed, more_room, with_room};
use crate::format::catalog::{Catalog, Entry};
use crate::format::name::Name;
use crate::format::name_tree::NameTree;
use crate::format::shards::{self, Index, MAX_LEN};
use crate::io::{CachedHead, ReadAt};

/// Files that are opened at once, of this machine and of a server, which takes its time for the request
/// of each.
const AT_ONCE: usize = 16;
const AT_ONCE_OF_SERVERS: usize = 64;
/// Bytes that a server is asked for first of a file in which one tensor is wanted.
const FIRST_OF_ONE: u64 = 64 << 10;

/// The files of an index that are opened.
struct Chosen<'i> {
    index: &'i Index,
    /// Their numbers in it, in rising order.
    numbers: Vec<usize>,
    /// The file of each tensor that the index names, by the stored form of its name.
    promised: BTreeMap<String, usize>,
    first: Option<u64>,
}

impl<'i> Chosen<'i> {
    /// The files of the tensors that are wanted; all where the index does not name one of these.
    fn new(index: &'i Index, wanted: Option<&BTreeSet<String>>, uri: &str) -> Result<Self> {
        let promised = promised(index, uri)?;
        let files = wanted.and_then(|wanted| {
            wanted.iter().map(|name| promised.get(name).copied()).collect::<Option<BTreeSet<_>>>()
        });
        let files = files.filter(|files| !files.is_empty());
        let one = files.is_some() && wanted.is_some_and(|wanted| wanted.len() == 1);
        let numbers = match files {
            Some(files) => listed(files, LISTS)?,
            None => listed(0..index.files.len(), LISTS)?,
        };
        Ok(Chosen { index, numbers, promised, first: one.then_some(FIRST_OF_ONE) })
    }

    /// The names of the files.
    fn names(&self) -> impl Iterator<Item = &'i String> + '_ {
        self.numbers.iter().filter_map(|&number| self.index.files.get(number))
    }

    /// True if the index says that a tensor is in another file than this of those that are opened.
    fn is_elsewhere(&self, name: &Name, file: usize) -> bool {
        let found = self.promised.get(name.stored());
        found.is_some_and(|promised| self.numbers.get(file) != Some(promised))
    }
}

/// Opens the files that an index names. They lie beside it.
pub fn open_parts(head: Head, opening: &Opening<'_>) -> Result<TensorFile> {
    let uri = head.source().uri().to_owned();
    let json = head.whole(MAX_LEN, "an index of shards", opening.cancel)?;
    let index = shards::parse(&json).map_err(|e| e.of(&uri))?;
    let chosen = Chosen::new(&index, opening.wanted, &uri)?;
    let parts = open_all(&head, &chosen, &uri, opening)?;
    let mut heads: Vec<CachedHead> = Vec::new();
    heads.extend(opening.known(&**head.source(), head.base(), &json, &[]));
    let mut sources = with_room(parts.len(), LISTS)?;
    let mut entries: Vec<Entry> = Vec::new();
    let mut metadata: Option<BTreeMap<String, String>> = None;
    let mut formats = parts.iter().map(|part| part.format);
    let format = formats.next().ok_or_else(|| malformed(&uri, "it names no files".to_owned()))?;
    if formats.any(|other| other != format) {
        return Err(malformed(&uri, "it names files of several formats".to_owned()));
    }
    for (file, part) in parts.into_iter().enumerate() {
        // Where two files hold a tensor, the index says which of them counts.
        let elsewhere =
            |entry: &Entry| format.names_tensors() && chosen.is_elsewhere(&entry.name, file);
        more_room(&mut entries, part.entries.len(), LISTS)?;
        entries.extend(part.entries.into_iter().filter(|entry| !elsewhere(entry)));
        if let Some(pairs) = part.metadata {
            metadata.get_or_insert_default().extend(pairs);
        }
        heads.extend(part.head);
        sources.push(part.source);
    }
    if !index.metadata.is_empty() {
        metadata.get_or_insert_default().extend(index.metadata.iter().cloned());
    }
    let mut names = NameTree::default();
    for (number, entry) in entries.iter().enumerate() {
        names.insert(&entry.name, number).map_err(|_| {
            let what =
                format!("tensor `{}` is in two files, and the index names neither", entry.name);
            malformed(&uri, what)
        })?;
    }
    let metadata = metadata.map(|pairs| listed(pairs, LISTS)).transpose()?;
    let metadata = Arc::new(Ok(metadata));
    if format.names_tensors() {
        check_all_are_there(&chosen, &names, &uri)?;
    }
    let numbers = chosen.numbers;
    let mut promised = BTreeMap::new();
    if !format.names_tensors() {
        // One by one, as above.
        for (name, file) in index.tensors {
            if let Ok(opened) = numbers.binary_search(&file) {
                promised.insert(name, opened);
            }
        }
    }
    let catalog = Catalog { format, entries: Arc::new(entries), names, metadata, promised };
    Ok(TensorFile::new(uri, sources, catalog, None, heads))
}

/// The file of each tensor that the index names, by the stored form of its name.
fn promised(index: &Index, uri: &str) -> Result<BTreeMap<String, usize>> {
    // One by one, each in a small piece of memory: `collect` would sort a list of all of them.
    let mut promised = BTreeMap::new();
    for (name, &file) in &index.tensors {
        let name = Name::from_key(name).map_err(|what| malformed(uri, what))?;
        promised.insert(name.stored().to_owned(), file);
    }
    Ok(promised)
}

fn check_all_are_there(chosen: &Chosen<'_>, names: &NameTree, uri: &str) -> Result<()> {
    let opened = |file: &usize| chosen.numbers.binary_search(file).is_ok();
    let mut promised = chosen.promised.iter().filter(|(_, file)| opened(file));
    let missing = promised.find(|(name, _)| names.find(name).is_none());
    let Some((name, &file)) = missing else { return Ok(()) };
    let shard = chosen.index.files.get(file).map_or("", String::as_str);
    let what = format!(
        "expected tensor `{}` in `{}`, which does not hold it",
        Brief(name.trim_start_matches('\u{1e}')),
        Brief(shard)
    );
    Err(malformed(uri, what))
}

/// Files of a source like this that are opened at once, unless there is a number of connections.
fn at_once(source: &dyn ReadAt) -> usize {
    let traits = source.capabilities();
    let any_number = traits.first_readers < traits.most_readers;
    let most = if any_number && !source.is_local() { AT_ONCE_OF_SERVERS } else { AT_ONCE };
    most.min(traits.max_readers.max(AT_ONCE))
}

/// Opens the files, several at once, in the order of their numbers.
fn open_all(
    head: &Head,
    chosen: &Chosen<'_>,
    uri: &str,
    opening: &Opening<'_>,
) -> Result<Vec<Part>> {
    let slots = listed(chosen.names().map(|_| None), LISTS)?;
    let at_once = at_once(&**head.source()).min(slots.len());
    let parts = Mutex::new(slots);
    let queue = Mutex::new(chosen.names().enumerate());
    workers::run(at_once, opening.cancel, |control| {
        while !control.stopped() {
            let next = queue.lock().unwrap_or_else(PoisonError::into_inner).next();
            let Some((number, name)) = next else { break };
            let source = head.source().sibling(name, chosen.first, control)?.ok_or_else(|| {
                Error::Unsupported(format!(
                    "`{uri}` names files beside it, which are not known from a file object: open its \
                     path or address"
                ))
            })?;
            let opening = Opening { cancel: control, ..*opening };
            let part = with_sound_copies(&|error| opened(&source, error), control, || {
                let head = Head::read(Arc::clone(&source), 0, control)?;
                head.part((number, at_once), &opening)
            })?;
            let mut parts = parts.lock().unwrap_or_else(PoisonError::into_inner);
            if let Some(slot) = parts.get_mut(number) {
                *slot = Some(part);
            }
        }
        Ok(())
    })?;
    let parts = parts.into_inner().unwrap_or_else(PoisonError::into_inner);
    let missing = || Error::Bug("a shard was not opened".to_owned());
    collected(parts.into_iter().map(|part| part.ok_or_else(missing)), LISTS)
}
