//! Options for opening and creating files.

use std::path::PathBuf;

use super::cache::Cache;
use super::cached_head::CachedHeads;
#[cfg(any(feature = "http", feature = "redis"))]
use super::transport::TransportOptions;
use crate::error::Result;

/// Options of sources and sinks.
#[derive(Debug, Clone)]
pub struct OpenOptions {
    /// Time limits, connections, certificates and headers.
    #[cfg(any(feature = "http", feature = "redis"))]
    pub transport: TransportOptions,
    /// The cache of files from HTTP servers, S3, Google, Azure and hubs.
    pub cache: Option<Cache>,
    /// The heads of files that are opened without a request.
    pub cached_heads: CachedHeads,
    /// Bytes of the first request to a server; None for the default.
    pub first: Option<u64>,
    pub s3: S3Options,
}

impl OpenOptions {
    /// The options that the environment sets; an error for a variable that is not well-formed.
    pub fn from_environment() -> Result<Self> {
        Ok(OpenOptions {
            #[cfg(any(feature = "http", feature = "redis"))]
            transport: TransportOptions::from_environment()?,
            cache: Cache::from_environment()?,
            cached_heads: CachedHeads::default(),
            first: None,
            s3: S3Options::default(),
        })
    }
}

/// Options of S3.
#[derive(Debug, Clone, Default)]
pub struct S3Options {
    /// Anonymous if both keys are empty.
    pub access_key: Option<String>,
    /// See `access_key`.
    pub secret_key: Option<String>,
    /// The token of temporary keys.
    pub session_token: Option<String>,
    /// A host, or an address with a scheme.
    pub endpoint: Option<String>,
    /// The endpoint if neither the call nor a file nor AWS's settings state one. None for that of
    /// `TENSORIZER_S3_ENDPOINT`.
    pub default_endpoint: Option<String>,
    /// The file to read instead of `~/.s3cfg`.
    pub config_path: Option<PathBuf>,
    /// True for `http://`; None decides by the endpoint.
    pub force_http: Option<bool>,
    /// The region that requests are signed for.
    pub region: Option<String>,
    /// The place of buckets in addresses: `auto`, `path` or `virtual`.
    pub addressing_style: Option<String>,
    /// The server's encryption of uploads, such as `aws:kms`.
    pub encryption: Option<String>,
    /// The id of the key of that encryption.
    pub kms_key_id: Option<String>,
    /// True if the requester pays, not the owner of the bucket; None: as `AWS_REQUEST_PAYER` says.
    pub requester_pays: Option<bool>,
}
