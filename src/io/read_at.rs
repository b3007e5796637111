//! Sources: bytes that are read at positions, some of them only in rising order.

use std::fmt;
use std::io;
use std::path::PathBuf;
use std::sync::Arc;

use super::CachedHead;
use crate::cancel::Cancel;
use crate::error::{Error, Result, Shortened};
use crate::mem::Buffers;
use crate::sys::FileStamp;

/// The properties of a source that matter to a plan.
#[derive(Debug, Clone, Copy)]
pub struct Capabilities {
    /// Size in bytes, where it is known.
    pub len: Option<u64>,
    /// Maximum number of concurrent readers, even if the caller asks for more.
    pub max_readers: usize,
    /// Number of readers that a load starts with, unless the caller sets one.
    pub initial_readers: usize,
    /// Maximum number of readers that a load starts by itself while more readers raise the
    /// throughput. Equal to `initial_readers` if the number is fixed.
    pub max_auto_readers: usize,
    /// Bytes of a request.
    pub request_len: u64,
    /// Maximum number of unwanted bytes between two wanted ranges that one request reads through.
    pub merge_gap: u64,
    /// Bytes of memory that each reader takes for its connection.
    pub reader_memory: u64,
    /// True if it is a file of a hub, which may publish a checksum of it.
    pub of_hub: bool,
}

impl Capabilities {
    /// The capabilities of a source that one reader reads from front to back.
    pub const SEQUENTIAL: Capabilities = Capabilities {
        len: None,
        max_readers: 1,
        initial_readers: 1,
        max_auto_readers: 1,
        request_len: 8 << 20,
        merge_gap: 0,
        reader_memory: 0,
        of_hub: false,
    };

    /// True if requests are so long that one of them keeps a reader busy for a while: those of
    /// servers.
    pub fn has_long_requests(&self) -> bool {
        self.request_len > LONG_REQUEST
    }

    /// The capabilities of several sources that are read together; None if there are no sources.
    pub fn combined(sources: &[&dyn ReadAt]) -> Option<Self> {
        let mut all = sources.iter().map(|source| source.capabilities());
        let first = all.next()?;
        Some(all.fold(first, |one, other| Capabilities {
            len: one.len.zip(other.len).map(|(one, other)| one.saturating_add(other)),
            max_readers: one.max_readers.min(other.max_readers),
            initial_readers: one.initial_readers.min(other.initial_readers),
            max_auto_readers: one.max_auto_readers.min(other.max_auto_readers),
            request_len: one.request_len.min(other.request_len),
            merge_gap: one.merge_gap.min(other.merge_gap),
            reader_memory: one.reader_memory.max(other.reader_memory),
            of_hub: one.of_hub || other.of_hub,
        }))
    }
}

/// Bytes of the longest request to a local file.
const LONG_REQUEST: u64 = 8 << 20;

/// The checksum that a hub publishes of a file.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum HubChecksum {
    /// The file is not from a hub.
    NoHub,
    /// The SHA-256 of all its bytes.
    Sha256([u8; 32]),
    /// The hub publishes another kind of checksum.
    NotSha256,
    /// Unknown, because the hub must not be contacted.
    Offline,
}

/// The identity of a file, which neither another file of its name nor its own later content has.
#[derive(Debug, Clone, PartialEq, Eq)]
pub enum SourceIdentity {
    /// That of a local file.
    Local(FileStamp),
    /// The strong `ETag` of a server's file.
    Tag(String),
}

impl SourceIdentity {
    /// Fails if `found`, the identity of the file that has this name now, is another one. A server's
    /// file and a local copy of it are not compared.
    pub fn check(&self, found: &Self, uri: &str) -> Result<()> {
        let alike = matches!(
            (self, found),
            (SourceIdentity::Local(_), SourceIdentity::Local(_))
                | (SourceIdentity::Tag(_), SourceIdentity::Tag(_))
        );
        if self == found || !alike {
            return Ok(());
        }
        let what = format!(
            "it is another file than the one that was found first: expected {self}, found {found}"
        );
        Err(Error::io("opening", uri, io::Error::new(io::ErrorKind::InvalidData, what)))
    }
}

impl fmt::Display for SourceIdentity {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            SourceIdentity::Local(stamp) => write!(f, "{stamp}"),
            SourceIdentity::Tag(tag) => write!(f, "the ETag {}", Shortened(tag)),
        }
    }
}

/// Random access to bytes.
pub trait ReadAt: Send + Sync {
    /// The path or address, for messages.
    fn uri(&self) -> &str;

    /// Its capabilities.
    fn capabilities(&self) -> Capabilities;

    /// Reads some bytes at `offset` into the buffers in order, and returns how many; 0 only at the
    /// end of the source. Where the number of readers adapts to it, [`Buffers::arrived`] is called
    /// as bytes arrive.
    fn read_at(&self, offset: u64, buffers: &mut Buffers<'_>, cancel: &dyn Cancel)
    -> Result<usize>;

    /// Limits the bytes that each connection buffers. An earlier, lower limit remains in force.
    fn limit_connection(&self, _bytes: u64) {}

    /// A file handle for one reader of neighbouring ranges, where that is faster than a shared one.
    fn own_handle(&self) -> Option<Box<dyn ReadAt>> {
        None
    }

    /// Opens the file of this name in the same folder, with the same options; None if the source
    /// has no folder. `first`: bytes of the first request to a server.
    fn sibling(
        &self,
        _name: &str,
        _first: Option<u64>,
        _cancel: &dyn Cancel,
    ) -> Result<Option<Arc<dyn ReadAt>>> {
        Ok(None)
    }

    /// The identity of its file; None if it cannot be told from later content.
    fn identity(&self) -> Option<SourceIdentity> {
        let head = self.response_head()?;
        head.strong_tag().map(|tag| SourceIdentity::Tag(tag.to_owned()))
    }

    /// Examines the files of these names in the same folder, and returns their identities. Later
    /// calls of [`ReadAt::sibling`] use the folder that was examined. Empty where that would take
    /// requests.
    fn sibling_identities(&self, _names: &[String]) -> Result<Vec<Option<SourceIdentity>>> {
        Ok(Vec::new())
    }

    /// The head of its server's response, without the first bytes of the file; None where there is
    /// no server, or where it can only be read front to back.
    fn response_head(&self) -> Option<CachedHead> {
        None
    }

    /// The reason why it is read in a slower way than the one that was asked for.
    fn fallback(&self) -> Option<String> {
        None
    }

    /// The checksum that its hub publishes.
    fn checksum(&self, _cancel: &dyn Cancel) -> Result<HubChecksum> {
        Ok(HubChecksum::NoHub)
    }

    /// The local copy that is read instead of the server, if there is one.
    fn local_copy(&self) -> Option<&dyn LocalCopy> {
        None
    }

    /// The open file, if the source is a local regular file that can be mapped. The descriptor of a
    /// shard may be closed when the returned value is dropped.
    fn file(&self) -> Option<Arc<std::fs::File>> {
        None
    }

    /// True if the source is a local regular file. Does not open it.
    fn is_local(&self) -> bool {
        self.file().is_some()
    }
}

/// A local copy of a server's file, which may be damaged.
pub trait LocalCopy {
    /// The path, while the copy is read.
    fn path(&self) -> Option<PathBuf>;

    /// Makes all later reads use the server. Returns the path of the copy in the first call, None
    /// in later ones. If `remove` is true, deletes the copy, even if an earlier call kept it.
    fn discard(&self, remove: bool, cancel: &dyn Cancel) -> Option<PathBuf>;

    /// Announces that a call will read this number of bytes of the file. A cache keeps the file if
    /// that is at least half of it.
    fn will_read(&self, _bytes: u64) {}
}

/// A copy that belongs to another program, such as its cache, and is never removed here.
impl LocalCopy for PathBuf {
    fn path(&self) -> Option<PathBuf> {
        Some(self.clone())
    }

    fn discard(&self, _remove: bool, _cancel: &dyn Cancel) -> Option<PathBuf> {
        None
    }
}

/// References to sources that are read in one call.
pub fn as_refs(sources: &[Arc<dyn ReadAt>]) -> Vec<&dyn ReadAt> {
    sources.iter().map(|source| &**source).collect()
}

/// Fills all buffers from `offset` on; a source that ends before is an error.
pub fn read_exact_at(
    source: &dyn ReadAt,
    offset: u64,
    buffers: &mut Buffers<'_>,
    what: &dyn Fn() -> String,
    cancel: &dyn Cancel,
) -> Result<()> {
    let total = buffers.remaining();
    while buffers.remaining() > 0 {
        let at = offset.saturating_add((total - buffers.remaining()) as u64);
        if source.read_at(at, buffers, cancel)? == 0 {
            return Err(Error::Truncated {
                uri: source.uri().to_owned(),
                what: what(),
                start: offset,
                end: offset.saturating_add(total as u64),
                size: at,
            });
        }
    }
    Ok(())
}
