//! Which source an address names.

use std::path::Path;
use std::sync::Arc;

use super::{FileSource, ReadAt};
use crate::error::{Error, Result};
#[cfg(any(feature = "http", feature = "redis"))]
use crate::net::NetOptions;

/// Schemes of addresses; everything else is a local path.
const SCHEMES: [&str; 5] = ["http", "https", "s3", "redis", "rediss"];

/// The scheme of an address in lower case, or None for a local path.
pub fn scheme(uri: &str) -> Option<String> {
    let scheme = uri.split_once("://")?.0.to_ascii_lowercase();
    SCHEMES.contains(&scheme.as_str()).then_some(scheme)
}

/// Opens an address or a local path for reading, with the options of the environment.
pub fn open(uri: &str) -> Result<Arc<dyn ReadAt>> {
    match scheme(uri) {
        None => Ok(Arc::new(FileSource::open(Path::new(uri))?)),
        #[cfg(feature = "http")]
        Some(scheme) if scheme.starts_with("http") => {
            super::http::open(uri, NetOptions::from_environment()?)
        }
        #[cfg(feature = "s3")]
        Some(scheme) if scheme == "s3" => super::s3::open(
            uri,
            &crate::net::s3::S3Options::default(),
            NetOptions::from_environment()?,
        ),
        #[cfg(feature = "redis")]
        Some(scheme) if scheme.starts_with("redis") => {
            super::redis::open(uri, NetOptions::from_environment()?)
        }
        Some(scheme) => Err(Error::Unsupported(format!(
            "`{scheme}://` addresses: this build has no such feature"
        ))),
    }
}
