//! Where bytes come from. Every source can be read at a position; some only in rising order.

pub mod address;
mod closed;
#[cfg(feature = "clouds")]
pub mod clouds;
mod direct;
mod file;
#[cfg(feature = "hf")]
pub mod hf;
#[cfg(feature = "http")]
pub mod http;
mod known;
mod memory;
mod pipe;
mod prefixed;
#[cfg(feature = "redis")]
pub mod redis;
#[cfg(feature = "s3")]
pub mod s3;

pub use closed::ClosedSource;
pub use direct::{DIRECT_MEMORY, DirectReader};
pub use file::FileSource;
pub use known::{KnownHead, KnownHeads};
pub use memory::MemorySource;
pub use pipe::{Opener, Pipe, PipeSource, Stream};
pub use prefixed::Prefixed;

use std::path::PathBuf;
use std::sync::Arc;

use crate::cancel::Cancel;
use crate::error::{Error, Result};
use crate::mem::Buffers;
use crate::memory_limit::MemoryLimit;

/// What a source says about itself, so that a plan suits it.
#[derive(Debug, Clone, Copy)]
pub struct Traits {
    /// Size in bytes, where it is known.
    pub len: Option<u64>,
    /// The most readers that may read at once, whoever asks for them.
    pub max_readers: usize,
    /// Readers that a load begins with unless the caller names a number.
    pub first_readers: usize,
    /// Readers that it may come to by itself, while more of them bring more. The same as
    /// `first_readers` where the number is known.
    pub most_readers: usize,
    /// Bytes a request.
    pub request_len: u64,
    /// Unwanted bytes between two wanted ranges that are cheaper to read than to skip.
    pub merge_gap: u64,
    /// Bytes that each reader's way to it takes: buffers of its connection.
    pub reader_memory: u64,
}

impl Traits {
    /// What holds for several sources that are read together; None for none.
    pub fn of_all(sources: &[&dyn ReadAt]) -> Option<Self> {
        let mut all = sources.iter().map(|source| source.traits());
        let first = all.next()?;
        Some(all.fold(first, |one, other| Traits {
            len: one.len.zip(other.len).map(|(one, other)| one.saturating_add(other)),
            max_readers: one.max_readers.min(other.max_readers),
            first_readers: one.first_readers.min(other.first_readers),
            most_readers: one.most_readers.min(other.most_readers),
            request_len: one.request_len.min(other.request_len),
            merge_gap: one.merge_gap.min(other.merge_gap),
            reader_memory: one.reader_memory.max(other.reader_memory),
        }))
    }
}

/// What there is of a file to compare its bytes with, beside the file.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Published {
    /// Nothing: it is of no hub.
    Nowhere,
    /// The SHA-256 of all its bytes.
    Sha256([u8; 32]),
    /// Something else than that.
    Otherwise,
    /// Its hub was not asked, and is not to be.
    NotAsked,
}

/// Random access to bytes.
pub trait ReadAt: Send + Sync {
    /// The path or address, for messages.
    fn uri(&self) -> &str;

    /// How to read it.
    fn traits(&self) -> Traits;

    /// Reads some bytes at `offset` into the buffers in order, and says how many; 0 only at the end of
    /// the source. Tells `cancel` what has arrived, as it arrives, where the number of readers is found
    /// by that.
    fn read_at(&self, offset: u64, buffers: &mut Buffers<'_>, cancel: &dyn Cancel)
    -> Result<usize>;

    /// Has each of its connections take less, as the memory of its readers is bounded by so much. What
    /// was said before stays, where that was less.
    fn limit_memory(&self, _limit: MemoryLimit) {}

    /// A handle of its own for a reader of neighbouring ranges, where that is faster than this one.
    fn for_one_reader(&self) -> Option<Box<dyn ReadAt>> {
        None
    }

    /// Opens the file of this name in the same folder, in the same way; None where that is not known.
    fn beside(&self, _name: &str, _cancel: &dyn Cancel) -> Result<Option<Arc<dyn ReadAt>>> {
        Ok(None)
    }

    /// Fields that a server sent along, by name.
    fn headers(&self) -> &[(String, String)] {
        &[]
    }

    /// What its server said of it, without its first bytes; None where there is no server, or where it
    /// can only be read front to back.
    fn known_head(&self) -> Option<KnownHead> {
        None
    }

    /// Whether it is a file of a hub, which may publish something of its bytes.
    fn is_of_hub(&self) -> bool {
        false
    }

    /// What its hub publishes of its bytes.
    fn published(&self, _cancel: &dyn Cancel) -> Result<Published> {
        Ok(Published::Nowhere)
    }

    /// Where its bytes are kept, if that is a copy that is made again once it is removed.
    fn copy(&self) -> Option<PathBuf> {
        None
    }

    /// Has it read from its server only, as a local copy of its bytes may be damaged. Gives the copy if
    /// it was read until now; with `remove` it is removed, also later.
    fn distrust_copy(&self, _remove: bool, _cancel: &dyn Cancel) -> Option<PathBuf> {
        None
    }

    /// The file behind it, where it is a local regular file that can be mapped.
    fn file(&self) -> Option<&std::fs::File> {
        None
    }
}

/// Sources, to be read in one call.
pub fn borrowed(sources: &[Arc<dyn ReadAt>]) -> Vec<&dyn ReadAt> {
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
    let total = buffers.left();
    while buffers.left() > 0 {
        let at = offset.saturating_add((total - buffers.left()) as u64);
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
