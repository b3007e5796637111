//! What reading and writing objects have in common.

mod config;
mod connector;

pub use config::{DEFAULT_READ_ENDPOINT, DEFAULT_WRITE_ENDPOINT, S3Options};
pub(crate) use config::{Resolved, resolve};
pub(crate) use connector::{Connector, OnDemand, failure};

use crate::error::{Error, Result};

/// Bucket and key of `s3://bucket/key`.
pub(crate) fn parse(uri: &str) -> Result<(&str, &str)> {
    let rest = uri.split_once("://").map(|(_, rest)| rest).unwrap_or_default();
    let rest = rest.split(['?', '#']).next().unwrap_or_default();
    let (bucket, key) = rest.split_once('/').unwrap_or((rest, ""));
    let key = key.trim_start_matches('/');
    if bucket.is_empty() || key.is_empty() {
        return Err(Error::InvalidArgument(format!("expected s3://bucket/key, found `{uri}`")));
    }
    Ok((bucket, key))
}
