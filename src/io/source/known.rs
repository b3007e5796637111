//! What opening a file of a server has learnt, so that others open it without asking again.

use std::collections::HashMap;
use std::sync::Arc;

/// What a server said of a file, and the bytes that the file begins with. No secrets are in it.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct KnownHead {
    /// The address as messages show it: without user, password and signature, and
    /// of a query only the version of an object of S3.
    pub uri: String,
    /// Bytes of the file.
    pub len: u64,
    /// Its `ETag`.
    pub tag: Option<String>,
    /// Its `Last-Modified`.
    pub modified: Option<String>,
    /// Fields that the server sent along.
    pub headers: Vec<(String, String)>,
    /// The first bytes: as many as are known.
    pub first: Arc<[u8]>,
}

/// Heads of files by their addresses. A clone shares them.
#[derive(Debug, Clone, Default)]
pub struct KnownHeads(Arc<HashMap<String, KnownHead>>);

impl KnownHeads {
    /// What is known of the file of an address, given as messages show it.
    pub fn of(&self, shown: &str) -> Option<&KnownHead> {
        self.0.get(shown)
    }

    /// The addresses of which something is known.
    #[cfg(feature = "hf")]
    pub fn addresses(&self) -> impl Iterator<Item = &str> {
        self.0.keys().map(String::as_str)
    }
}

impl FromIterator<KnownHead> for KnownHeads {
    fn from_iter<I: IntoIterator<Item = KnownHead>>(heads: I) -> Self {
        KnownHeads(Arc::new(heads.into_iter().map(|head| (head.uri.clone(), head)).collect()))
    }
}
