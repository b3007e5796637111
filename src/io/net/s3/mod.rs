//! What reading and writing objects have in common.

mod config;
mod connector;
mod credentials;

pub use config::{DEFAULT_READ_ENDPOINT, DEFAULT_WRITE_ENDPOINT, S3Options};
pub(crate) use config::{Resolved, resolve};
pub(crate) use connector::{Connector, OnDemand, failure};
pub(crate) use credentials::{Keys, good_until};

use crate::error::{Error, Result};

/// Bucket and key of `s3://bucket/key`.
pub(crate) fn parse(uri: &str) -> Result<(&str, &str)> {
    let rest = uri.split_once("://").map_or(uri, |(_, rest)| rest);
    let rest = rest.split(['?', '#']).next().unwrap_or(rest);
    let (bucket, key) = rest.split_once('/').unwrap_or((rest, ""));
    let key = key.trim_start_matches('/');
    if bucket.is_empty() || key.is_empty() {
        let what = format!("expected s3://bucket/key, found `{}`", super::show_text(uri));
        return Err(Error::InvalidArgument(what));
    }
    Ok((bucket, key))
}
