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

/// Cached headers by address. Clones share them.
#[derive(Debug, Clone, Default)]
pub struct CachedHeads(Arc<HashMap<String, CachedHead>>);

impl CachedHeads {
    /// The cached header of the file with this address, given as messages show it.
    pub fn of(&self, display_address: &str) -> Option<&CachedHead> {
        self.0.get(display_address)
    }

    /// The addresses of all cached headers.
    #[cfg(feature = "hf")]
    pub fn addresses(&self) -> impl Iterator<Item = &str> {
        self.0.keys().map(String::as_str)
    }
}

impl FromIterator<CachedHead> for CachedHeads {
    fn from_iter<I: IntoIterator<Item = CachedHead>>(heads: I) -> Self {
        CachedHeads(Arc::new(heads.into_iter().map(|head| (head.uri.clone(), head)).collect()))
    }
}
