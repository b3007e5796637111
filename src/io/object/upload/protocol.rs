//! The protocol of an upload: the requests by which a server takes an object, whole or in parts.

use std::sync::Arc;

use bytes::Bytes;

use crate::cancel::Cancel;
use crate::codec::crypt::random;
use crate::error::{Error, Result};
use crate::io::object::checksum::Checksum;

/// A random mark, by which an upload recognises its object.
pub fn new_mark() -> Result<String> {
    Ok(random::<16>()?.iter().map(|byte| format!("{byte:02x}")).collect())
}

/// The outcome of the last request of an upload that has failed: a success if the object is there,
/// and only the response was lost.
pub fn confirm_if_present(error: Error, is_there: impl FnOnce() -> Result<bool>) -> Result<()> {
    if !matches!(error, Error::Io { .. }) {
        return Err(error);
    }
    match is_there() {
        Ok(true) => Ok(()),
        Err(stopped @ (Error::Cancelled | Error::Caller(_))) => Err(stopped),
        // Without the right to look, the first error says more.
        Ok(false) | Err(_) => Err(error),
    }
}

/// An object that is being written, as a whole or in parts.
pub trait UploadProtocol: Send + Sync {
    /// Sends the whole object.
    fn put(&self, bytes: &Bytes, cancel: &dyn Cancel) -> Result<()>;

    /// Begins an object in parts; returns the name that the server has for this upload.
    fn begin(&self, cancel: &dyn Cancel) -> Result<Arc<str>>;

    /// Sends a part of the upload that the server calls `id`; the first has the number 1.
    fn part(&self, id: &str, number: u64, bytes: &Bytes, cancel: &dyn Cancel) -> Result<SentPart>;

    /// Completes the object, of `len` bytes, from its parts in the order of their numbers. A
    /// completion whose response was lost is recognised.
    fn complete(&self, id: &str, parts: &[SentPart], len: u64, cancel: &dyn Cancel) -> Result<()>;

    /// Aborts the upload; the server deletes its parts.
    fn abort(&self, id: &str, cancel: &dyn Cancel) -> Result<()>;
}

/// A part that the server has received.
pub struct SentPart {
    pub number: u64,
    /// The server's name of the part, such as an `ETag`.
    pub tag: String,
    /// The checksum that was sent, if the server also compares that of the object.
    pub checksum: Option<Checksum>,
}
