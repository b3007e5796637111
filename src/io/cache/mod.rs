//! The cache: a folder with files that servers have sent, for the next load of the same file.
//!
//! Versions of a file are distinguished by `ETag` and size. Each opening asks the server for them;
//! the server responds without a body if the cached version is still current. `entry.rs` describes
//! the files of the folder.

mod entry;
mod fill;
mod folder;
mod source;

pub use entry::{CacheEntry, CachedFile};
pub use folder::Cache;
pub use source::NOT_CACHED;

#[cfg(test)]
#[allow(clippy::cast_possible_truncation)]
mod tests;
