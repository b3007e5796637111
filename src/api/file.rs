//! An open `.tensors` file: its source, its prologue and its index.
// A broken invariant ends the call by a panic that its boundary catches.
#![allow(clippy::indexing_slicing)]

use std::ffi::OsStr;
use std::path::Path;
use std::sync::atomic::{AtomicBool, Ordering};
use std::sync::{Arc, Mutex, OnceLock, PoisonError};

use crate::cancel::{Cancel, Never};
use crate::codec::crypt::{DecryptionOptions, MANIFEST_LEN, Manifest};
use crate::error::{Error, Result, Shown};
use crate::format::index::{self, Entry};
use crate::format::name_tree::NameTree;
use crate::format::pair::{self, PairId};
use crate::format::prologue::{PROLOGUE_LEN, Prologue};
use crate::io::source::address::{self, Address};
use crate::io::source::{ClosedSource, FileSource, Pipe, PipeSource, ReadAt, read_exact_at};
use crate::mem::Buffers;

/// A file's index, and where its bytes come from.
pub struct TensorFile {
    uri: String,
    source: Mutex<Arc<dyn ReadAt>>,
    base: u64,
    decryption: OnceLock<Arc<DecryptionOptions>>,
    prologue: Prologue,
    /// Prologue and index as they are, of a file that says that it is sealed.
    head: Option<Vec<u8>>,
    /// What headers must be, once the seal was found right.
    sealed: OnceLock<(Manifest, Vec<[u8; 32]>)>,
    key_fits: AtomicBool,
    pair_id: Option<PairId>,
    entries: Arc<Vec<Entry>>,
    names: NameTree,
}

impl TensorFile {
    /// Opens a local path.
    pub fn open(path: &Path) -> Result<Self> {
        Self::open_path(path, &Never)
    }

    /// The same, unless the call is to end before: a named pipe is waited for.
    pub fn open_path(path: &Path, cancel: &dyn Cancel) -> Result<Self> {
        let uri = path.display().to_string();
        let file = crate::sys::open_at_once(path).map_err(|e| Error::io("opening", &uri, e))?;
        Self::from_file(file, uri, 0, cancel)
    }

    /// Opens an address, such as `https://host/model.tensors`, or a local path.
    pub fn open_uri(uri: &str, cancel: &dyn Cancel) -> Result<Self> {
        match address::parse(OsStr::new(uri))? {
            Address::Path(path) => Self::open_path(&path, cancel),
            Address::Scheme(_) => Self::from_source(address::open(uri, cancel)?, 0, cancel),
        }
    }

    /// Reads the index of an open file: from `base` on if it is a regular file, from where it is
    /// if it is a pipe, which can only be read front to back.
    pub fn from_file(
        file: std::fs::File,
        uri: String,
        base: u64,
        cancel: &dyn Cancel,
    ) -> Result<Self> {
        use std::os::unix::fs::FileTypeExt as _;
        let kind = file.metadata().map_err(|e| Error::io("examining", &uri, e))?.file_type();
        if kind.is_fifo() || kind.is_socket() || kind.is_char_device() {
            return Self::from_source(Arc::new(PipeSource::new(Pipe(file), uri)), 0, cancel);
        }
        Self::from_source(Arc::new(FileSource::new(file, uri)?), base, cancel)
    }

    /// Reads the index from any source. `base` is the position of the file's first byte in it;
    /// positions inside the file are the source's own, as the format has it.
    pub fn from_source(source: Arc<dyn ReadAt>, base: u64, cancel: &dyn Cancel) -> Result<Self> {
        let uri = &source.uri().to_owned();
        let file_len = source.traits().len;
        let mut start = [0u8; PROLOGUE_LEN];
        let available = read_up_to(&*source, base, &mut start, cancel)?;
        let prologue = Prologue::parse(&start[..available], base, uri)?;
        let index_at = base.saturating_add(PROLOGUE_LEN as u64);
        if let Some(size) =
            file_len.filter(|&size| size.saturating_sub(index_at) < prologue.index_len)
        {
            return Err(Error::Truncated {
                uri: uri.to_owned(),
                what: "tensor index".to_owned(),
                start: index_at,
                end: index_at.saturating_add(prologue.index_len),
                size,
            });
        }
        if prologue.index_len > index::MAX_LEN {
            let what = format!(
                "expected an index of at most {} bytes, found one of {}",
                index::MAX_LEN,
                prologue.index_len
            );
            return Err(Error::Format { uri: uri.clone(), offset: index_at, what });
        }
        let block = read_growing(&*source, index_at, prologue.index_len, cancel)?;
        let (entries, names) = index::parse(&block, index_at, &prologue, file_len, uri)?;
        let source = Mutex::new(source);
        // All that a seal covers is needed again to check it.
        let sealed = Manifest::is_in(&block);
        let unsealed = block.len().saturating_sub(if sealed { MANIFEST_LEN } else { 0 });
        let pair_id = block.get(..unsealed).and_then(pair::find);
        let head = if sealed { Some(start.into_iter().chain(block).collect()) } else { None };
        let decryption = OnceLock::new();
        Ok(TensorFile {
            uri: uri.clone(),
            source,
            base,
            decryption,
            prologue,
            head,
            sealed: OnceLock::new(),
            key_fits: AtomicBool::new(false),
            pair_id,
            entries: Arc::new(entries),
            names,
        })
    }

    /// Prologue and index as they are, if the file says that it is sealed.
    pub(super) fn sealed_head(&self) -> Option<(&[u8], &[u8])> {
        self.head.as_ref()?.split_at_checked(PROLOGUE_LEN)
    }

    /// Remembers the seal, and what stands for each header.
    pub(super) fn set_sealed(&self, manifest: Manifest, digests: Vec<[u8; 32]>) {
        // Headers are read again with their data, and whoever sends them may send others then.
        self.sealed.get_or_init(|| (manifest, digests));
    }

    /// Has loads decrypt; false if they do already.
    pub(super) fn set_decryption(&self, options: Arc<DecryptionOptions>) -> bool {
        self.decryption.set(options).is_ok()
    }

    /// Refuses a header that is not the one that was sealed.
    pub(super) fn check_header(&self, entry: &Entry, raw: &[u8]) -> Result<()> {
        let Some((manifest, digests)) = self.sealed.get() else { return Ok(()) };
        let expected = self.find(entry.name.stored()).and_then(|number| digests.get(number));
        if expected == Some(&manifest.digest(raw)) { Ok(()) } else { Err(self.unsealed()) }
    }

    /// Whether something was decrypted with the key already.
    pub(super) fn key_fits(&self) -> bool {
        self.key_fits.load(Ordering::Relaxed)
    }

    /// Remembers that the key is right.
    pub(super) fn set_key_fits(&self) {
        self.key_fits.store(true, Ordering::Relaxed);
    }

    pub(super) fn unsealed(&self) -> Error {
        Error::Crypt(format!(
            "the manifest of `{}` does not fit: wrong key, or names, shapes, order, hashes or tags \
             were changed",
            self.uri
        ))
    }

    /// How loads decrypt.
    pub fn decryption(&self) -> Option<&DecryptionOptions> {
        self.decryption.get().map(Arc::as_ref)
    }

    /// The identity by which the other half of a saved object knows this file.
    pub fn pair_id(&self) -> Option<PairId> {
        self.pair_id
    }

    /// The path or address.
    pub fn uri(&self) -> &str {
        &self.uri
    }

    /// Where the bytes come from.
    pub fn source(&self) -> Arc<dyn ReadAt> {
        Arc::clone(&self.source.lock().unwrap_or_else(PoisonError::into_inner))
    }

    /// Lets the source go, once the reads under way have ended. The index stays.
    pub fn close(&self) {
        let closed: Arc<dyn ReadAt> = Arc::new(ClosedSource { uri: self.uri.clone() });
        *self.source.lock().unwrap_or_else(PoisonError::into_inner) = closed;
    }

    /// What the first bytes say.
    pub fn prologue(&self) -> &Prologue {
        &self.prologue
    }

    /// Prologue and index of a file that holds only the tensors with these numbers, at the same
    /// positions: what is not named any more becomes a gap.
    #[doc(hidden)]
    pub fn head_of(&self, numbers: &[usize]) -> Result<Vec<u8>> {
        if self.base != 0 {
            return Err(Error::Unsupported(format!(
                "`{}` begins at byte {} of another file, and its positions count from there",
                self.uri, self.base
            )));
        }
        if let Some(head) = self.head.as_ref().filter(|_| numbers.len() == self.entries.len()) {
            // As it is, so that its seal stays right.
            return Ok(head.clone());
        }
        let entries = numbers.iter().map(|&number| self.entry(number).cloned());
        let entries = entries.collect::<Result<Vec<_>>>()?;
        let prologue = Prologue {
            tensor_bytes: entries.iter().map(|entry| entry.data_len).sum(),
            count: entries.len() as u64,
            ..self.prologue
        };
        let mut head = prologue.encode().to_vec();
        head.extend(index::encode(&entries, prologue.versioned_entries, prologue.index_len)?);
        Ok(head)
    }

    /// Bytes of the file as they are.
    #[doc(hidden)]
    pub fn raw(&self, offset: u64, buffer: &mut [u8], cancel: &dyn Cancel) -> Result<()> {
        let what = || "a copy of the file".to_owned();
        read_exact_at(&*self.source(), offset, &mut Buffers::of(buffer), &what, cancel)
    }

    /// The tensors, in the order of the index.
    pub fn entries(&self) -> &[Entry] {
        &self.entries
    }

    /// The same, to be kept beyond the file.
    #[doc(hidden)]
    pub fn shared_entries(&self) -> &Arc<Vec<Entry>> {
        &self.entries
    }

    /// The number of a tensor, by the form in which its name is stored.
    pub fn find(&self, stored: &str) -> Option<usize> {
        self.names.find(stored)
    }

    /// The entry with this number.
    pub fn entry(&self, number: usize) -> Result<&Entry> {
        self.entries.get(number).ok_or_else(|| {
            Error::InvalidArgument(format!(
                "tensor number {number} of `{}`, which holds {}",
                self.uri(),
                self.entries.len()
            ))
        })
    }

    /// The numbers of tensors, by the form in which their names are stored; none twice.
    pub fn select<S: AsRef<str>>(&self, names: &[S]) -> Result<Vec<usize>> {
        let mut seen = std::collections::HashSet::new();
        names
            .iter()
            .map(|name| {
                let name = name.as_ref();
                let number = self.find(name).ok_or_else(|| Error::TensorNotFound {
                    uri: self.uri().to_owned(),
                    name: Shown(name.trim_start_matches('\u{1e}')).to_string(),
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

/// Fills as much of the buffer as the source has.
fn read_up_to(
    source: &dyn ReadAt,
    offset: u64,
    buffer: &mut [u8],
    cancel: &dyn Cancel,
) -> Result<usize> {
    let mut done = 0;
    while let Some(rest) = buffer.get_mut(done..).filter(|rest| !rest.is_empty()) {
        let at = offset.saturating_add(done as u64);
        match source.read_at(at, &mut Buffers::of(rest), cancel)? {
            0 => break,
            read => done += read,
        }
    }
    Ok(done)
}

/// Reads `len` bytes without believing that there are so many: memory grows with what arrives.
fn read_growing(
    source: &dyn ReadAt,
    offset: u64,
    len: u64,
    cancel: &dyn Cancel,
) -> Result<Vec<u8>> {
    const STEP: usize = 1 << 20;
    let mut out = Vec::new();
    let len = usize::try_from(len).unwrap_or(usize::MAX);
    while out.len() < len {
        let done = out.len();
        let more = STEP.max(done).min(len - done);
        out.try_reserve(more).map_err(|_| Error::OutOfMemory {
            bytes: (done + more) as u64,
            what: format!("the index of `{}`", source.uri()),
            error: std::io::Error::from(std::io::ErrorKind::OutOfMemory),
        })?;
        out.resize(done + more, 0);
        let fresh = &mut out[done..];
        read_exact_at(
            source,
            offset.saturating_add(done as u64),
            &mut Buffers::of(fresh),
            &|| "tensor index".to_owned(),
            cancel,
        )?;
    }
    Ok(out)
}
