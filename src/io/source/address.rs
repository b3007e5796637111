//! What an address names: a file of this machine, or something that a server has.

use std::ffi::{OsStr, OsString};
use std::os::unix::ffi::{OsStrExt as _, OsStringExt as _};
use std::path::PathBuf;
use std::sync::Arc;

use super::{FileSource, KnownHeads, ReadAt};
use crate::cancel::Cancel;
use crate::error::{Error, Result};
use crate::io::cache::Cache;
#[cfg(any(feature = "http", feature = "redis"))]
use crate::io::net::NetOptions;

/// Schemes of addresses of servers.
const SCHEMES: [&str; 10] =
    ["http", "https", "s3", "gs", "az", "abfs", "abfss", "hf", "redis", "rediss"];

/// What an address names.
#[derive(Debug, Clone, PartialEq, Eq)]
pub enum Address {
    /// A file of this machine.
    Path(PathBuf),
    /// Something of a server that is spoken to in this way; in lower case.
    Scheme(String),
}

/// Finds out what an address names: `word://…` is an address, anything else a path. A word that is
/// not known is an error, so that no file is looked for, or made, in a folder called `word:`.
pub fn parse(uri: &OsStr) -> Result<Address> {
    let Some((scheme, rest)) = split(uri.as_bytes()) else {
        return Ok(Address::Path(uri.into()));
    };
    if SCHEMES.contains(&scheme.as_str()) {
        return Ok(Address::Scheme(scheme));
    }
    let shown = uri.to_string_lossy();
    if scheme != "file" {
        let what = format!(
            "`{scheme}://` addresses are not known: expected a path, or file://, {}:// (`{shown}`)",
            SCHEMES.join("://, ")
        );
        return Err(Error::InvalidArgument(what));
    }
    let path = match rest.split_at_checked(b"localhost".len()) {
        Some((host, path)) if host.eq_ignore_ascii_case(b"localhost") => path,
        _ => rest,
    };
    if !path.starts_with(b"/") {
        let what = format!("expected file:///path, an absolute path of this machine (`{shown}`)");
        return Err(Error::InvalidArgument(what));
    }
    let path: Vec<u8> = percent_encoding::percent_decode(path).collect();
    Ok(Address::Path(OsString::from_vec(path).into()))
}

/// The scheme of an address in lower case, and what follows it.
fn split(uri: &[u8]) -> Option<(String, &[u8])> {
    let colon = uri.windows(3).position(|three| three == b"://")?;
    let (scheme, rest) = uri.split_at_checked(colon)?;
    let letter = scheme.first()?.is_ascii_alphabetic();
    let word = scheme.iter().all(|b| b.is_ascii_alphanumeric() || b"+-.".contains(b));
    let scheme = String::from_utf8(scheme.to_ascii_lowercase()).ok()?;
    (letter && word).then_some((scheme, rest.get(3..)?))
}

/// An address as the head of its file has it; None for what no head is known of.
pub fn shown(uri: &str) -> Option<String> {
    let Ok(Address::Scheme(scheme)) = parse(OsStr::new(uri)) else { return None };
    match scheme.as_str() {
        #[cfg(feature = "http")]
        "http" | "https" => super::http::shown(uri),
        #[cfg(feature = "s3")]
        "s3" => super::s3::shown(uri),
        #[cfg(feature = "clouds")]
        "gs" | "az" | "abfs" | "abfss" => super::clouds::shown(uri),
        _ => None,
    }
}

/// Opens an address or a local path for reading, with the options of the environment. Files of which
/// the heads are known are opened without a request. `cache` goes before the one of the environment.
pub fn open(
    uri: &str,
    known: &KnownHeads,
    cache: Option<&Cache>,
    cancel: &dyn Cancel,
) -> Result<Arc<dyn ReadAt>> {
    // Of servers alone, which a build may do without.
    let _ = (known, cache, cancel);
    let scheme = match parse(OsStr::new(uri))? {
        Address::Path(path) => return Ok(Arc::new(FileSource::open(&path)?)),
        Address::Scheme(scheme) => scheme,
    };
    #[cfg(any(feature = "http", feature = "redis"))]
    let mut options = NetOptions::from_environment()?;
    #[cfg(any(feature = "http", feature = "redis"))]
    if let Some(cache) = cache {
        options.cache = Some(cache.clone());
    }
    match scheme.as_str() {
        #[cfg(feature = "http")]
        "http" | "https" => super::http::open(uri, options, known, cancel),
        #[cfg(feature = "s3")]
        "s3" => {
            let s3 = crate::io::net::s3::S3Options::default();
            super::s3::open(uri, &s3, options, known, cancel)
        }
        #[cfg(feature = "hf")]
        "hf" => super::hf::open(uri, options, known, cancel),
        #[cfg(feature = "clouds")]
        "gs" | "az" | "abfs" | "abfss" => super::clouds::open(uri, options, known, cancel),
        #[cfg(feature = "redis")]
        "redis" | "rediss" => super::redis::open(uri, options, cancel),
        _ => Err(Error::Unsupported(format!(
            "`{scheme}://` addresses: this build has no such feature"
        ))),
    }
}

#[cfg(test)]
#[allow(clippy::unwrap_used)]
mod tests {
    use super::*;

    #[test]
    fn what_addresses_name() {
        let path = |text: &str| Address::Path(PathBuf::from(text));
        for (uri, expected) in [
            ("model.tensors", path("model.tensors")),
            ("/a://b", path("/a://b")),
            ("./s3://b", path("./s3://b")),
            ("C:/x", path("C:/x")),
            ("file:///a%20b/%C3%BC", path("/a b/ü")),
            ("FILE://localhost/a", path("/a")),
            ("file://LocalHost/a%20b", path("/a b")),
            ("HF://org/repo", Address::Scheme("hf".to_owned())),
            ("S3://bucket/key", Address::Scheme("s3".to_owned())),
            ("abfss://c@a.dfs.core.windows.net/b", Address::Scheme("abfss".to_owned())),
            ("https://host", Address::Scheme("https".to_owned())),
        ] {
            assert_eq!(parse(OsStr::new(uri)).unwrap(), expected, "{uri}");
        }
        for uri in
            ["gcs://b/k", "word+x.1-y://", "file://host/a", "file://a", "file://localhosta/b"]
        {
            assert!(matches!(parse(OsStr::new(uri)), Err(Error::InvalidArgument(_))), "{uri}");
        }
    }
}
