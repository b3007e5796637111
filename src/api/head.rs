//! Reads the first bytes of a file, recognises its format, and reads the catalog.

use std::collections::BTreeMap;
use std::sync::atomic::AtomicBool;
use std::sync::{Arc, OnceLock};

use super::archive::{self, read_archive};
use super::catalog_part::{CatalogPart, Opening, malformed, read_growing, read_up_to};
use super::file::{TensorFile, TensorsFileState};
use crate::cancel::Cancel;
use crate::codec::crypt::{MANIFEST_LEN, Manifest};
use crate::error::{Error, Result};
use crate::fallible::{try_extend, try_zeroed};
use crate::format::catalog::{Catalog, Format};
use crate::format::name_tree::NameTree;
use crate::format::safetensors::{self, LENGTH_LEN};
use crate::format::tensors::index::{self, IndexValidator, ParsedIndex};
use crate::format::tensors::prologue::{MAGIC, PROLOGUE_LEN, Prologue, no_format, unknown_format};
use crate::format::tensors::trailer::{self, IndexTrailer};
use crate::io::{PrefixedSource, ReadAt};
use crate::sys::to_usize;

/// A source whose first bytes were read.
pub struct FileHead {
    /// The source.
    pub source: Arc<dyn ReadAt>,
    /// The position of the file's first byte.
    pub base: u64,
    /// The first bytes: at most the length of a prologue; fewer if the file is shorter.
    pub bytes: Vec<u8>,
}

impl FileHead {
    /// Reads the first bytes of a file that begins at `base`.
    pub fn read(source: Arc<dyn ReadAt>, base: u64, cancel: &dyn Cancel) -> Result<Self> {
        let mut bytes = vec![0; PROLOGUE_LEN];
        let available = read_up_to(&*source, base, &mut bytes, cancel)?;
        bytes.truncate(available);
        Ok(FileHead { source, base, bytes })
    }

    /// Reads the whole file, which may not be longer than `most`.
    pub fn read_all(&self, most: u64, what: &str, cancel: &dyn Cancel) -> Result<Vec<u8>> {
        let too_long = |found: String| {
            let what = format!("expected {what} of at most {most} bytes, found {found}");
            Error::Format { uri: self.source.uri().to_owned(), offset: self.base, what }
        };
        if let Some(len) = self.source.facts().len {
            let len = len.saturating_sub(self.base);
            return if len > most {
                Err(too_long(len.to_string()))
            } else {
                self.read_first(len, what, cancel)
            };
        }
        let mut bytes = self.bytes.clone();
        let mut step = try_zeroed(1 << 20, what)?;
        while bytes.len() as u64 <= most {
            let at = self.base.saturating_add(bytes.len() as u64);
            let read = read_up_to(&*self.source, at, &mut step, cancel)?;
            try_extend(&mut bytes, step.get(..read).unwrap_or(&step), what)?;
            if read < step.len() && bytes.len() as u64 <= most {
                return Ok(bytes);
            }
        }
        Err(too_long("more".to_owned()))
    }

    /// Returns the first `len` bytes of the file; reads those that are missing.
    fn read_first(&self, len: u64, what: &str, cancel: &dyn Cancel) -> Result<Vec<u8>> {
        let mut bytes = self.bytes.clone();
        bytes.truncate(to_usize(len));
        let at = self.base.saturating_add(bytes.len() as u64);
        read_growing(&*self.source, at, len, &mut bytes, what, cancel)?;
        Ok(bytes)
    }

    /// Opens a single file.
    pub fn open(self, opening: &Opening<'_>) -> Result<TensorFile> {
        if !safetensors::recognises(&self.bytes) && !archive::recognises(&self.bytes) {
            return self.open_tensors(opening);
        }
        let uri = self.source.uri().to_owned();
        let part = self.part((0, 1), opening)?;
        let mut names = NameTree::default();
        for (number, entry) in part.entries.iter().enumerate() {
            names.insert(&entry.name, number).map_err(|what| malformed(&uri, what))?;
        }
        let CatalogPart { source, format, head, entries, metadata } = part;
        let cached_heads = head.into_iter().collect();
        let (entries, indexed_files) = (Arc::new(entries), BTreeMap::new());
        let metadata = Arc::new(Ok(metadata));
        let catalog = Catalog { format, entries, names, metadata, indexed_files };
        Ok(TensorFile::new(uri, vec![source], catalog, None, cached_heads))
    }

    /// Reads the catalog of the file. `file`: its number among several. `at_once`: number of files
    /// that are opened concurrently.
    pub fn part(
        self,
        (file, at_once): (usize, usize),
        opening: &Opening<'_>,
    ) -> Result<CatalogPart> {
        if archive::recognises(&self.bytes) {
            // The cached head has only the bytes that tell the format: the directory is at the end
            // of the file, and is requested again.
            let head = opening.cached_head(&*self.source, self.base, &self.bytes, &[]);
            let part = read_archive(self.source, self.base, self.bytes, (file, at_once), opening)?;
            return Ok(CatalogPart { head, ..part });
        }
        let (uri, base, cancel) = (self.source.uri(), self.base, opening.cancel);
        if !safetensors::recognises(&self.bytes) {
            return Err(not_a_shard(&self.bytes, uri));
        }
        let len = safetensors::header_len(&self.bytes, base).map_err(|e| e.in_file(uri))?;
        let data_at = base.saturating_add(LENGTH_LEN).saturating_add(len);
        let file_len = self.source.facts().len;
        if let Some(size) = file_len.filter(|&size| size < data_at) {
            return Err(Error::truncated(uri, "the safetensors header", base..data_at, size));
        }
        let start =
            self.read_first(LENGTH_LEN.saturating_add(len), "the safetensors header", cancel)?;
        let json = start.split_at_checked(size_of::<u64>()).map_or(&[][..], |(_, json)| json);
        let found = safetensors::parse(json, base, file, uri)?;
        if let Some(size) = file_len.filter(|&size| size < found.end) {
            let wanted = data_at..found.end;
            return Err(Error::truncated(uri, "the data of its tensors", wanted, size));
        }
        // A file within a larger one may have others after it.
        if let Some(size) = file_len.filter(|&size| size > found.end && base == 0) {
            let what = format!(
                "expected the file to end with its data at byte {}, found {size} bytes",
                found.end
            );
            return Err(Error::Format { uri: uri.to_owned(), offset: found.end, what });
        }
        // The cached head has at least the bytes that tell the format, even if the header is
        // shorter.
        let rest = start.get(self.bytes.len()..).unwrap_or(&[]);
        let head = opening.cached_head(&*self.source, base, &self.bytes, rest);
        let passed = file_len.is_none() && start.len() < self.bytes.len();
        let source = if passed {
            // The source is read front to back only, and some of its data were read already.
            Arc::new(PrefixedSource::new(self.source, base, self.bytes)) as Arc<dyn ReadAt>
        } else {
            self.source
        };
        let format = Format::Safetensors;
        Ok(CatalogPart { source, format, head, entries: found.entries, metadata: found.metadata })
    }

    fn open_tensors(self, opening: &Opening<'_>) -> Result<TensorFile> {
        let (FileHead { source, base, mut bytes }, cancel) = (self, opening.cancel);
        let uri = &source.uri().to_owned();
        refuse_tar(&*source, base, &bytes, cancel)?;
        let file_len = source.facts().len;
        let prologue = Prologue::parse(&bytes, base, uri)?;
        let index_at = base.saturating_add(PROLOGUE_LEN as u64);
        if let Some(size) =
            file_len.filter(|&size| size.saturating_sub(index_at) < prologue.index_len)
        {
            let end = index_at.saturating_add(prologue.index_len);
            return Err(Error::truncated(uri, "tensor index", index_at..end, size));
        }
        if prologue.index_len > index::MAX_LEN {
            let what = format!(
                "expected an index of at most {} bytes, found one of {}",
                index::MAX_LEN,
                prologue.index_len
            );
            return Err(Error::Format { uri: uri.clone(), offset: index_at, what });
        }
        let block = read_index(&*source, index_at, &prologue, cancel)?;
        let ParsedIndex { entries, names, len } =
            index::parse(&block, index_at, &prologue, file_len, uri)?;
        // A manifest covers prologue and index, which are kept to verify it.
        let sealed = Manifest::is_in(&block);
        let unsealed = block.len().saturating_sub(if sealed { MANIFEST_LEN } else { 0 });
        let space = block.get(len..unsealed).unwrap_or(&[]);
        let IndexTrailer { identity, metadata } =
            trailer::find(space, index_at.saturating_add(len as u64));
        let cached_heads =
            opening.cached_head(&*source, base, &bytes, &block).into_iter().collect();
        if sealed {
            try_extend(&mut bytes, &block, "a manifest")?;
        }
        let tensors_state = TensorsFileState {
            base,
            prologue,
            head: sealed.then_some(bytes),
            identity,
            decryption: OnceLock::new(),
            verified_manifest: OnceLock::new(),
            key_fits: AtomicBool::new(false),
            long_pieces: AtomicBool::new(false),
        };
        let metadata = metadata.map(|pairs| (!pairs.is_empty()).then_some(pairs));
        let (format, entries, metadata) = (Format::Tensors, Arc::new(entries), Arc::new(metadata));
        let catalog = Catalog { format, entries, names, metadata, indexed_files: BTreeMap::new() };
        Ok(TensorFile::new(uri.clone(), vec![source], catalog, Some(tensors_state), cached_heads))
    }
}

/// Refuses a tar archive. What marks one is behind the first bytes that tell other formats.
fn refuse_tar(source: &dyn ReadAt, base: u64, bytes: &[u8], cancel: &dyn Cancel) -> Result<()> {
    const AT: u64 = 257;
    const MARK: [u8; 5] = *b"ustar";
    let mut found = [0; MARK.len()];
    if !bytes.starts_with(&MAGIC) && source.facts().len.is_some() {
        read_up_to(source, base.saturating_add(AT), &mut found, cancel)?;
    }
    if found != MARK {
        return Ok(());
    }
    let what = "this is a tar archive: unpack it first, or, if torch before 0.2 saved it, load it \
                with torch.load(weights_only=False), where you trust it, and save it again";
    Err(malformed(source.uri(), no_format(what)))
}

/// Returns the error for a shard of another format, by the first bytes of its file.
fn not_a_shard(bytes: &[u8], uri: &str) -> Error {
    let found = if bytes.starts_with(&MAGIC) {
        "a .tensors file cannot be one".to_owned()
    } else {
        unknown_format(bytes, uri)
    };
    malformed(uri, format!("expected a shard, of safetensors or torch.save: {found}"))
}

/// Reads an index block. If the length of the file is unknown, each part is checked before more is
/// read, because a server may send endless data.
fn read_index(
    source: &dyn ReadAt,
    at: u64,
    prologue: &Prologue,
    cancel: &dyn Cancel,
) -> Result<Vec<u8>> {
    const FIRST: u64 = 1 << 20;
    let (uri, len) = (source.uri(), prologue.index_len);
    let mut block = Vec::new();
    let mut start = IndexValidator::default();
    let mut until = if source.facts().len.is_some() { len } else { FIRST.min(len) };
    loop {
        let from = at.saturating_add(block.len() as u64);
        read_growing(source, from, until, &mut block, "tensor index", cancel)?;
        if until == len {
            return Ok(block);
        }
        start.read(&block, at, prologue).map_err(|e| e.in_file(uri))?;
        until = until.saturating_mul(2).min(len);
    }
}
