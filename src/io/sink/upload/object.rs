//! What an upload asks of its server's protocol.

use std::sync::Arc;
use std::time::Duration;

use bytes::Bytes;

use super::plan::Limits;
use super::sum::Sum;
use crate::cancel::Cancel;
use crate::codec::crypt::random;
use crate::error::{Error, Result};

/// A mark of an upload's own.
pub fn new_mark() -> Result<String> {
    Ok(random::<16>()?.iter().map(|byte| format!("{byte:02x}")).collect())
}

/// What came of the last request of an upload that has failed: nothing is wrong where the object is
/// there all the same, and only the answer was lost.
pub fn unless_there(error: Error, is_there: impl FnOnce() -> Result<bool>) -> Result<()> {
    if !matches!(error, Error::Io { .. }) {
        return Err(error);
    }
    match is_there() {
        Ok(true) => Ok(()),
        Err(stopped @ (Error::Cancelled | Error::Caller(_))) => Err(stopped),
        // Who may not look has the first error, which says more.
        Ok(false) | Err(_) => Err(error),
    }
}

/// An object that is being written: all at once, or in parts.
pub trait Object: Send + Sync {
    /// The address as messages show it.
    fn shown(&self) -> &str;

    /// How long a server may say nothing.
    fn stall(&self) -> Duration;

    fn limits(&self) -> Limits;

    /// Sends the whole object.
    fn put(&self, bytes: &Bytes, cancel: &dyn Cancel) -> Result<()>;

    /// Begins an object in parts; the server knows this upload by what is returned.
    fn begin(&self, cancel: &dyn Cancel) -> Result<Arc<str>>;

    /// Sends a part; the first has the number 1.
    fn part(&self, upload: &str, number: u64, bytes: &Bytes, cancel: &dyn Cancel) -> Result<Sent>;

    /// Makes the object, of `len` bytes, of its parts, which are in the order of their numbers. What
    /// was done, and of which the answer was lost, is recognised.
    fn complete(&self, upload: &str, parts: &[Sent], len: u64, cancel: &dyn Cancel) -> Result<()>;

    /// Has the server forget the parts.
    fn abort(&self, upload: &str, cancel: &dyn Cancel) -> Result<()>;
}

/// A part that the server has.
pub struct Sent {
    pub number: u64,
    /// What the server calls it.
    pub tag: String,
    /// The sum that it was told, if it compares that of the object too.
    pub sum: Option<Sum>,
}
