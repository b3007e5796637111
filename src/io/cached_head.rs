//! Cached headers of files on servers, with which other processes open these files without a
//! request.

use std::collections::HashMap;
use std::sync::Arc;

/// A cached header: the head of a response, and the first bytes of the file. It holds no secrets.
#[derive(Debug, Clone, Default, PartialEq, Eq)]
pub struct CachedHead {
    /// The address as messages show it: without user, password and signature, and of a query only
    /// the version of an object of S3.
    pub uri: String,
    /// Bytes of the file.
    pub len: u64,
    /// Its `ETag`.
    pub tag: Option<String>,
    /// Its `Last-Modified`.
    pub modified: Option<String>,
    /// Headers of the response.
    pub headers: Vec<(String, String)>,
    /// The first bytes of the file, as many as are cached.
    pub first: Arc<[u8]>,
}

impl CachedHead {
    /// Its strong `ETag`, which identifies the bytes of the file.
    pub fn strong_tag(&self) -> Option<&str> {
        let tag = self.tag.as_deref()?;
        (!tag.starts_with("W/") && !tag.trim_matches('"').is_empty()).then_some(tag)
    }
}

/// Cached headers, by the addresses of their files as messages show them.
pub type CachedHeads = Arc<HashMap<String, CachedHead>>;
