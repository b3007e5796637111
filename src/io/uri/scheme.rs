//! The list of schemes, and the parsing of addresses.

use std::ffi::{OsStr, OsString};
use std::os::unix::ffi::{OsStrExt as _, OsStringExt as _};
use std::path::PathBuf;

use crate::error::{Error, Result};

/// The kind of server of a scheme.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Service {
    Http,
    S3,
    /// Google Cloud Storage, or Azure.
    Cloud,
    /// Hugging Face's hub.
    Hub,
    Redis,
}

/// The schemes of servers.
pub(super) const SCHEMES: [(&str, Service); 10] = [
    ("http", Service::Http),
    ("https", Service::Http),
    ("s3", Service::S3),
    ("gs", Service::Cloud),
    ("az", Service::Cloud),
    ("abfs", Service::Cloud),
    ("abfss", Service::Cloud),
    ("hf", Service::Hub),
    ("redis", Service::Redis),
    ("rediss", Service::Redis),
];

/// A scheme of servers.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Scheme {
    pub name: &'static str,
    pub service: Service,
}

impl Scheme {
    /// True if an address may name a folder whose files are tried by name. False for the hub, which
    /// lists its own folders.
    pub fn has_folders(self) -> bool {
        matches!(self.service, Service::Http | Service::S3 | Service::Cloud)
    }

    /// True if objects can be written there.
    pub fn is_writable(self) -> bool {
        matches!(self.service, Service::S3 | Service::Cloud)
    }

    /// The error of writing to an address, with another way to do it.
    pub fn unwritable_error(self) -> Error {
        let instead = match self.service {
            Service::Redis => "copy a file there with TensorDeserializer.to_redis",
            Service::S3 => "this build was made without the feature `s3`",
            Service::Cloud => "this build was made without the feature `clouds`",
            Service::Hub => "write a local file, and upload it with huggingface_hub",
            Service::Http => {
                "upload a local file by other means, or write to s3://, gs:// or az://"
            }
        };
        let name = self.name;
        Error::InvalidArgument(format!("`{name}://` addresses cannot be written: {instead}"))
    }
}

/// The file that an address names.
#[derive(Debug, Clone, PartialEq, Eq)]
pub enum Address {
    /// A file of this machine.
    Path(PathBuf),
    /// A file of a server.
    Server(Scheme),
}

/// Parses an address: `word://…` names a server, anything else is a path. An unknown scheme is an
/// error. Otherwise, files would be opened or created in a folder called `word:`.
pub fn parse(uri: &OsStr) -> Result<Address> {
    let Some((scheme, rest)) = split_scheme(uri.as_bytes()) else {
        return Ok(Address::Path(uri.into()));
    };
    if let Some(&(name, service)) = SCHEMES.iter().find(|(name, _)| *name == scheme) {
        return Ok(Address::Server(Scheme { name, service }));
    }
    let uri_text = uri.to_string_lossy();
    if scheme != "file" {
        let names = SCHEMES.map(|(name, _)| name).join("://, ");
        let what = format!(
            "`{scheme}://` addresses are not known: expected a path, or file://, {names}:// (`{uri_text}`)"
        );
        return Err(Error::InvalidArgument(what));
    }
    let path = match rest.split_at_checked(b"localhost".len()) {
        Some((host, path)) if host.eq_ignore_ascii_case(b"localhost") => path,
        _ => rest,
    };
    if !path.starts_with(b"/") {
        let what =
            format!("expected file:///path, an absolute path of this machine (`{uri_text}`)");
        return Err(Error::InvalidArgument(what));
    }
    let path: Vec<u8> = percent_encoding::percent_decode(path).collect();
    Ok(Address::Path(OsString::from_vec(path).into()))
}

/// The scheme of an address in lower case, and the part after `://`.
fn split_scheme(uri: &[u8]) -> Option<(String, &[u8])> {
    let colon = uri.windows(3).position(|three| three == b"://")?;
    let (scheme, rest) = uri.split_at_checked(colon)?;
    let letter = scheme.first()?.is_ascii_alphabetic();
    let word = scheme.iter().all(|b| b.is_ascii_alphanumeric() || b"+-.".contains(b));
    let scheme = String::from_utf8(scheme.to_ascii_lowercase()).ok()?;
    (letter && word).then_some((scheme, rest.get(3..)?))
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn addresses_name_paths_and_servers() {
        let path = |text: &str| Address::Path(PathBuf::from(text));
        let server = |name, service| Address::Server(Scheme { name, service });
        for (uri, expected) in [
            ("model.tensors", path("model.tensors")),
            ("/a://b", path("/a://b")),
            ("./s3://b", path("./s3://b")),
            ("C:/x", path("C:/x")),
            ("file:///a%20b/%C3%BC", path("/a b/ü")),
            ("FILE://localhost/a", path("/a")),
            ("file://LocalHost/a%20b", path("/a b")),
            ("HF://org/repo", server("hf", Service::Hub)),
            ("S3://bucket/key", server("s3", Service::S3)),
            ("abfss://c@a.dfs.core.windows.net/b", server("abfss", Service::Cloud)),
            ("https://host", server("https", Service::Http)),
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
