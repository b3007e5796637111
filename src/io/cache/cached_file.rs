//! Files of the cache as reports and messages show them.

use std::fmt::Display;
use std::path::PathBuf;
use std::time::SystemTime;

/// A file as `tensorizer cache ls` shows it.
#[derive(Debug, Clone)]
pub struct CachedFile {
    /// The address, without secrets.
    pub uri: String,
    /// Bytes of the file.
    pub len: u64,
    /// Bytes that are present.
    pub present: u64,
    /// Time of its last use.
    pub used: SystemTime,
    pub(super) path: PathBuf,
}

/// The beginning of the reasons why a file is not cached.
pub const NOT_CACHED: &str = "the cache in ";

/// Says why a file is not cached, or not all of it.
pub fn not_cached(folder: &dyn Display, uri: &str, why: &dyn Display) -> String {
    format!("{NOT_CACHED}{folder} does not keep all of {uri}: {why}")
}
