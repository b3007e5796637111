//! What an upload asks of its server's protocol.

use std::time::Duration;

use bytes::Bytes;

use super::plan::Limits;
use super::sum::Sum;
use crate::cancel::Cancel;
use crate::codec::crypt::random;
use crate::error::Result;

/// The name of the metadata with the mark by which an object that was sent in parts is known again.
pub const MARK: &str = "tensorizer-upload";

/// A mark of an upload's own.
pub fn new_mark() -> Result<String> {
    Ok(random::<16>()?.iter().map(|byte| format!("{byte:02x}")).collect())
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

    /// Begins an object in parts.
    fn begin(&self, cancel: &dyn Cancel) -> Result<Begun>;

    /// Sends a part; the first has the number 1.
    fn part(&self, begun: &Begun, number: u64, bytes: &Bytes, cancel: &dyn Cancel) -> Result<Sent>;

    /// Makes the object, of `len` bytes, of its parts, which are in the order of their numbers. What
    /// was done, and of which the answer was lost, is recognised.
    fn complete(
        &self,
        begun: &Begun,
        parts: &[Sent],
        len: u64,
        cancel: &dyn Cancel,
    ) -> Result<()>;

    /// Has the server forget the parts.
    fn abort(&self, begun: &Begun, cancel: &dyn Cancel) -> Result<()>;
}

/// An upload that the server has begun.
#[derive(Debug, Clone)]
pub struct Begun {
    /// Its number.
    pub upload: String,
    pub sums: Sums,
}

/// What a server makes of sums of what is sent to it.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Sums {
    /// It is not told any.
    None,
    /// It is told those of parts, and may not look at them.
    Parts,
    /// It compares those of parts, and that of the object.
    All,
}

/// A part that the server has.
pub struct Sent {
    pub number: u64,
    /// What the server calls it.
    pub tag: String,
    /// The sum that it was told.
    pub sum: Option<Sum>,
}
