//! Addresses of S3.

use crate::error::{Error, Result};
use crate::io::transport::{has_dot_component, show_text};

/// The query field of a version.
const VERSION: &str = "versionId=";

/// `s3://bucket/key`, or `s3://bucket/key?versionId=version`.
///
/// Key and version are taken literally: a percent sign is not an escape, and a key may begin with a
/// slash or have two in the middle. A key with `?` or `#` cannot be addressed. The earlier package
/// had the same limit, and ignored everything after these characters.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct S3Address {
    pub bucket: String,
    pub key: String,
    /// The version; None for the latest.
    pub version: Option<String>,
}

impl S3Address {
    /// Parses an address.
    pub fn parse(uri: &str) -> Result<Self> {
        let rest = uri.split_once("://").map_or(uri, |(_, rest)| rest);
        let (object, query) = rest.split_at(rest.find(['?', '#']).unwrap_or(rest.len()));
        let (bucket, key) = split_bucket(object);
        let invalid =
            |what: &str| Err(Error::InvalidArgument(format!("`{}`: {what}", show_text(uri))));
        if bucket.is_empty() || key.is_empty() {
            let what = format!("expected s3://bucket/key, found `{}`", show_text(uri));
            return Err(Error::InvalidArgument(what));
        }
        if [bucket, key].into_iter().any(has_dot_component) {
            return invalid(
                "a key with a component `.` or `..` cannot be sent: URLs resolve them, and name \
                 another object",
            );
        }
        let version = query.strip_prefix('?').and_then(|query| query.strip_prefix(VERSION));
        let version = version.filter(|text| !text.is_empty() && !text.contains(['&', '#', '?']));
        if version.is_none() && !query.is_empty() {
            // The message does not quote the query, which may be a secret.
            return invalid(&format!(
                "only ?{VERSION}... may follow the key, which cannot contain `?` or `#`; \
                 tensorizer 2 dropped the rest, and opened `s3://{object}`"
            ));
        }
        let version = version.map(str::to_owned);
        Ok(S3Address { bucket: bucket.to_owned(), key: key.to_owned(), version })
    }

    /// The address for messages. No part of it is a secret.
    pub fn display_address(&self) -> String {
        let S3Address { bucket, key, version } = self;
        match version {
            Some(version) => format!("s3://{bucket}/{key}?{VERSION}{version}"),
            None => format!("s3://{bucket}/{key}"),
        }
    }

    /// Another object in the same folder, of the same version.
    pub fn sibling(&self, name: &str) -> Self {
        let folder = self.key.rfind('/').and_then(|slash| self.key.get(..=slash)).unwrap_or("");
        let key = format!("{folder}{name}");
        S3Address { key, ..self.clone() }
    }
}

/// The bucket and the key of an address. The name of an access point, an ARN, may have slashes.
fn split_bucket(object: &str) -> (&str, &str) {
    let name = match object.strip_prefix("arn:").and(object.find("accesspoint")) {
        Some(found) => found + "accesspoint/".len(),
        None => 0,
    };
    let end = object.get(name..).and_then(|rest| rest.find('/')).map(|at| name + at);
    let (bucket, key) = object.split_at(end.unwrap_or(object.len()));
    (bucket, key.strip_prefix('/').unwrap_or(key))
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn addresses_name_bucket_key_and_version() {
        for (uri, bucket, key, version) in [
            ("s3://b/k", "b", "k", None),
            ("S3://b/f/k l+%20", "b", "f/k l+%20", None),
            ("s3://b//k", "b", "/k", None),
            ("s3://b///x//k", "b", "//x//k", None),
            ("s3://b/...//.k/k..", "b", "...//.k/k..", None),
            ("s3://b/k?versionId=null", "b", "k", Some("null")),
            ("s3://arn:aws:s3:r:1:accesspoint/p/f/k", "arn:aws:s3:r:1:accesspoint/p", "f/k", None),
            ("s3://arn:aws:s3:r:1:accesspoint:p/k", "arn:aws:s3:r:1:accesspoint:p", "k", None),
            ("s3://b/f/k?versionId=3/L4.kq_-=%", "b", "f/k", Some("3/L4.kq_-=%")),
        ] {
            let found = S3Address::parse(uri).unwrap();
            assert_eq!((&*found.bucket, &*found.key), (bucket, key), "{uri}");
            assert_eq!(found.version.as_deref(), version, "{uri}");
            assert_eq!(S3Address::parse(&found.display_address()).unwrap(), found, "{uri}");
        }
        let one = S3Address::parse("s3://b/f/k?versionId=1").unwrap();
        assert_eq!(one.sibling("l").display_address(), "s3://b/f/l?versionId=1");
        for (key, sibling) in [("k", "l"), ("/k", "/l"), ("//k", "//l"), ("f//k", "f//l")] {
            let found = S3Address::parse(&format!("s3://b/{key}")).unwrap().sibling("l");
            assert_eq!(found.key, sibling);
        }
    }

    #[test]
    fn keys_that_urls_would_resolve_are_refused() {
        for rest in ["b/..", "b/.", "b/a/../b", "b/../other/key", "b/a/./b", "b//../k", "../k/x"] {
            let error = S3Address::parse(&format!("s3://{rest}")).unwrap_err().to_string();
            assert!(error.contains("component `.` or `..`"), "{error}");
        }
    }

    #[test]
    fn other_queries_and_fragments_are_refused() {
        for more in [
            "?",
            "#",
            "#part",
            "?versionId=",
            "?versionid=1",
            "?secret",
            "?x=1&versionId=2",
            "?versionId=1&x=secret",
            "?versionId=1#part",
            "?versionId=1?",
            "#?versionId=1",
        ] {
            let error = S3Address::parse(&format!("s3://b/k{more}")).unwrap_err().to_string();
            assert!(error.contains("only ?versionId=... may follow"), "{more}: {error}");
            assert!(error.contains("`s3://b/k`") && !error.contains("secret"), "{error}");
        }
    }
}
