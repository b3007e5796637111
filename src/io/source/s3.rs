//! `s3://bucket/key`: an address that is signed once, and then read as any other of HTTP.

use std::sync::Arc;
use std::time::Duration;

use aws_sdk_s3::presigning::PresigningConfig;
use reqwest::Url;

use super::ReadAt;
use super::http;
use crate::cancel::Cancel;
use crate::error::{Error, Result};
use crate::io::net::NetOptions;
use crate::io::net::s3::{DEFAULT_READ_ENDPOINT, Resolved, S3Options, parse, resolve, wait_for};

/// How long a signed address is good. A load that takes longer than this fails.
const VALID: Duration = Duration::from_secs(24 * 60 * 60);

/// Opens an address.
pub fn open(
    uri: &str,
    s3: &S3Options,
    http: NetOptions,
    cancel: &dyn Cancel,
) -> Result<Arc<dyn ReadAt>> {
    let (bucket, key) = parse(uri)?;
    // Signing needs no network; finding credentials may, on machines of a cloud.
    let shown = format!("s3://{bucket}/{key}");
    let (address, headers) = wait_for(&shown, &http, cancel, async {
        let resolved = resolve(s3, &http, DEFAULT_READ_ENDPOINT, &shown).await?;
        match &resolved.credentials {
            Some(_) => sign(&resolved, bucket, key, &shown).await,
            None => Ok((plain(&resolved, bucket, key, &shown)?, Vec::new())),
        }
    })?;
    let headers = http.headers.iter().cloned().chain(headers).collect();
    http::open_as(&address, &shown, NetOptions { headers, ..http }, cancel)
}

async fn sign(
    resolved: &Resolved,
    bucket: &str,
    key: &str,
    uri: &str,
) -> Result<(String, Vec<(String, String)>)> {
    let failed = |what: String| Error::InvalidArgument(format!("signing `{uri}`: {what}"));
    let valid = PresigningConfig::expires_in(VALID).map_err(|e| failed(e.to_string()))?;
    let signed = aws_sdk_s3::Client::from_conf(resolved.sdk().build())
        .get_object()
        .bucket(bucket)
        .key(key)
        .presigned(valid)
        .await
        .map_err(|e| failed(aws_sdk_s3::error::DisplayErrorContext(e).to_string()))?;
    let headers = signed.headers().map(|(name, value)| (name.to_owned(), value.to_owned()));
    Ok((signed.uri().to_owned(), headers.collect()))
}

/// The address of a public object.
fn plain(resolved: &Resolved, bucket: &str, key: &str, uri: &str) -> Result<String> {
    let host = resolved.endpoint.host_str().unwrap_or("");
    let bad = || {
        let what =
            format!("`{uri}`: `{host}` is no endpoint whose name could begin with a bucket's");
        Error::InvalidArgument(what)
    };
    let mut url: Url = resolved.endpoint.clone();
    if !resolved.path_style {
        url.set_host(Some(&format!("{bucket}.{host}"))).map_err(|_| bad())?;
    }
    let mut path = url.path_segments_mut().map_err(|()| bad())?;
    path.pop_if_empty();
    if resolved.path_style {
        path.push(bucket);
    }
    path.extend(key.split('/'));
    drop(path);
    Ok(url.to_string())
}
