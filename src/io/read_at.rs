//! Sources: bytes that are read at positions, some of them only in rising order.

use std::io;
use std::mem::discriminant;
use std::path::PathBuf;
use std::sync::Arc;
use std::sync::atomic::{AtomicU64, Ordering};

use super::{CachedHead, Pin};
use crate::cancel::Cancel;
use crate::error::{Error, Result, Shortened};
use crate::mem::Buffers;
use crate::sys::FileStamp;
use crate::sys::fork_safe_mutex::ForkSafeMutex;

/// The facts of a source.
#[derive(Clone, Default)]
pub struct Facts {
    /// The path or address, for messages.
    pub uri: String,
    /// Size in bytes; None for a source that is read front to back.
    pub len: Option<u64>,
    /// The identity of its file; None if it cannot be told from later content.
    pub identity: Option<SourceIdentity>,
    /// True for a local regular file, which can be mapped.
    pub is_local: bool,
    /// The absolute path by which a local file was opened.
    pub path: Option<PathBuf>,
    /// The limit of the bytes that each connection buffers.
    pub connection_limit: Arc<ConnectionLimit>,
    /// The facts that only a server's file has, or a local copy of one.
    pub server: Option<ServerFile>,
    /// The SHA-256 that the file must have, if it is compared.
    pub pin: Option<Arc<Pin>>,
}

impl Facts {
    /// The head of its server's response, without the first bytes of the file; None where there is
    /// no server, or where it can only be read front to back.
    pub fn head(&self) -> Option<&CachedHead> {
        self.server.as_ref()?.head.as_ref()
    }

    /// The headers of its server's response.
    pub fn headers(&self) -> &[(String, String)] {
        let server = self.server.as_ref();
        server.map_or(&[], |of| of.head.as_ref().map_or(&of.headers, |head| &head.headers))
    }

    /// True if it is a file of a hub, which may publish a checksum of it.
    pub fn is_of_hub(&self) -> bool {
        self.server.as_ref().is_some_and(|server| server.checksum.is_some())
    }

    /// The reason why it is read in a slower way than the one that was asked for.
    pub fn fallback(&self) -> Option<String> {
        self.server.as_ref()?.fallback.lock().clone()
    }

    /// Announces that a call will read this number of bytes. A cache keeps the file if that is at
    /// least half of it, as long as the result lives.
    #[must_use]
    pub fn will_read(&self, bytes: u64) -> Option<WantedRead> {
        self.server.as_ref()?.will_read.as_ref()?(bytes)
    }

    /// The local copy that is read instead of the server, if there is one.
    pub fn local_copy(&self) -> Option<&LocalCopy> {
        self.server.as_ref()?.local_copy.as_ref()
    }
}

/// The limit of the bytes that each connection of a source buffers.
#[derive(Debug)]
pub struct ConnectionLimit(AtomicU64);

impl Default for ConnectionLimit {
    fn default() -> Self {
        ConnectionLimit(AtomicU64::new(u64::MAX))
    }
}

impl ConnectionLimit {
    /// Bytes.
    pub fn bytes(&self) -> u64 {
        self.0.load(Ordering::Relaxed)
    }

    /// Lowers the limit. An earlier, lower limit remains in force.
    pub fn lower(&self, bytes: u64) {
        self.0.fetch_min(bytes, Ordering::Relaxed);
    }
}

/// The facts of a server's file, and the requests that only it allows.
#[derive(Clone, Default)]
pub struct ServerFile {
    /// The head of the response, without the first bytes of the file; None where it can only be
    /// read front to back.
    pub head: Option<CachedHead>,
    /// The headers of the response, where there is no head.
    pub headers: Vec<(String, String)>,
    /// Opens files in the same folder.
    pub open_sibling: Option<OpenSibling>,
    /// Requests the checksum that its hub publishes.
    pub checksum: Option<RequestChecksum>,
    /// The local copy that is read instead of the server, if there is one.
    pub local_copy: Option<LocalCopy>,
    /// Tells a cache before it how many of its bytes a call reads, beside the index.
    pub will_read: Option<AnnounceRead>,
    /// The reason why it is read in a slower way than the one that was asked for.
    pub fallback: Fallback,
}

/// See [`ServerFile::will_read`].
pub type AnnounceRead = Arc<dyn Fn(u64) -> Option<WantedRead> + Send + Sync>;

/// Marks a call that reads so much of a file that a cache keeps it, as long as it lives.
pub type WantedRead = Arc<()>;

/// See [`ServerFile::fallback`].
pub type Fallback = Arc<ForkSafeMutex<Option<String>>>;

/// Opens the file of a name in the same folder, with the same options. The number: bytes of the
/// first request.
pub type OpenSibling =
    Arc<dyn Fn(&str, Option<u64>, &dyn Cancel) -> Result<Option<Arc<dyn ReadAt>>> + Send + Sync>;

/// Requests the checksum that a hub publishes of a file.
pub type RequestChecksum = Arc<dyn Fn(&dyn Cancel) -> Result<HubChecksum> + Send + Sync>;

/// A local copy of a server's file, which may be damaged.
#[derive(Clone)]
pub struct LocalCopy {
    /// Its path.
    pub path: PathBuf,
    /// Makes all later reads use the server. True in the first call. If the flag is set, deletes
    /// the copy, even if an earlier call kept it. None for a copy that belongs to another program,
    /// such as its cache.
    pub discard: Option<DiscardCopy>,
}

/// See [`LocalCopy::discard`].
pub type DiscardCopy = Arc<dyn Fn(bool) -> bool + Send + Sync>;

/// The properties of a source that matter to a plan.
#[derive(Debug, Clone, Copy)]
pub struct Capabilities {
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
}

impl Capabilities {
    /// The capabilities of a source that one reader reads from front to back.
    pub const SEQUENTIAL: Capabilities = Capabilities {
        max_readers: 1,
        initial_readers: 1,
        max_auto_readers: 1,
        request_len: 8 << 20,
        merge_gap: 0,
        reader_memory: 0,
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
            max_readers: one.max_readers.min(other.max_readers),
            initial_readers: one.initial_readers.min(other.initial_readers),
            max_auto_readers: one.max_auto_readers.min(other.max_auto_readers),
            request_len: one.request_len.min(other.request_len),
            merge_gap: one.merge_gap.min(other.merge_gap),
            reader_memory: one.reader_memory.max(other.reader_memory),
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
#[derive(Debug, Clone, PartialEq, Eq, thiserror::Error)]
pub enum SourceIdentity {
    /// That of a local file.
    #[error("{0}")]
    Local(FileStamp),
    /// The strong `ETag` of a server's file.
    #[error("the ETag {}", Shortened(.0))]
    Tag(String),
}

impl SourceIdentity {
    /// Fails if `found`, the identity of the file that has this name now, is another one. A server's
    /// file and a local copy of it are not compared.
    pub fn check(&self, found: &Self, uri: &str) -> Result<()> {
        if self == found || discriminant(self) != discriminant(found) {
            return Ok(());
        }
        let what = format!(
            "it is another file than the one that was found first: expected {self}, found {found}"
        );
        Err(Error::failed("opening", uri, io::ErrorKind::InvalidData, what))
    }
}

/// Random access to bytes.
pub trait ReadAt: Send + Sync {
    /// Its facts.
    fn facts(&self) -> &Facts;

    /// Its capabilities, which may change with the speed of a server.
    fn capabilities(&self) -> Capabilities;

    /// Reads some bytes at `offset` into the buffers in order, and returns how many; 0 only at the
    /// end of the source. Where the number of readers adapts to it, [`Buffers::arrived`] is called
    /// as bytes arrive.
    fn read_at(&self, offset: u64, into: &mut Buffers<'_>, cancel: &dyn Cancel) -> Result<usize>;

    /// The open file, if the source is a local regular file that can be mapped. The descriptor of a
    /// shard may be closed when the returned value is dropped.
    fn file(&self) -> Option<Arc<std::fs::File>> {
        None
    }
}

impl dyn ReadAt + '_ {
    /// The path or address, for messages.
    pub fn uri(&self) -> &str {
        &self.facts().uri
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
    what: &str,
    cancel: &dyn Cancel,
) -> Result<()> {
    let total = buffers.remaining();
    while buffers.remaining() > 0 {
        let at = offset.saturating_add((total - buffers.remaining()) as u64);
        if source.read_at(at, buffers, cancel)? == 0 {
            let end = offset.saturating_add(total as u64);
            return Err(Error::truncated(source.uri(), what, offset..end, at));
        }
    }
    Ok(())
}
