//! `s3://bucket/key`: an address that is signed, and then read as any other of HTTP.

use std::io::ErrorKind;
use std::sync::Arc;
use std::time::{Duration, Instant, SystemTime};

use aws_sdk_s3::error::DisplayErrorContext;
use aws_sdk_s3::presigning::PresigningConfig;
use reqwest::Url;

use super::http::client::Target;
use super::http::{self, Sign, Work};
use super::{KnownHeads, ReadAt};
use crate::cancel::Cancel;
use crate::error::{Error, Result};
use crate::io::net::s3::{
    DEFAULT_READ_ENDPOINT, Keys, Resolved, S3Options, good_until, parse, resolve,
};
use crate::io::net::{Failure, NetOptions, can_be_sent, guarded, wait_for};

/// How long a signed address is good, unless the credentials expire before.
const VALID: Duration = Duration::from_secs(24 * 60 * 60);

/// Opens an address. Files of which the heads are known are opened without a request.
pub fn open(
    uri: &str,
    s3: &S3Options,
    http: NetOptions,
    known: &KnownHeads,
    cancel: &dyn Cancel,
) -> Result<Arc<dyn ReadAt>> {
    let (bucket, key) = parse(uri)?;
    // Signing needs no network; finding credentials may, on machines of a cloud.
    let shown = show(bucket, key);
    let found = resolve(s3, &http, DEFAULT_READ_ENDPOINT, &shown);
    let resolved = wait_for(&shown, &http, cancel, found)?;
    let Some(keys) = resolved.credentials.clone() else {
        let address = plain(&resolved, bucket, key, &shown)?;
        return http::open_as(&address, &shown, http, known, cancel);
    };
    let tls = resolved.endpoint.scheme() == "https";
    let (bucket, key, headers) = (bucket.to_owned(), key.to_owned(), http.headers.clone());
    let signer = Signer { resolved: Arc::new(resolved), keys, bucket, key, headers };
    http::open_signed(Box::new(signer), tls, &shown, http, known, cancel)
}

/// An address as messages show it; None for what is none.
pub fn shown(uri: &str) -> Option<String> {
    parse(uri).ok().map(|(bucket, key)| show(bucket, key))
}

fn show(bucket: &str, key: &str) -> String {
    format!("s3://{bucket}/{key}")
}

/// Signs the address of an object.
struct Signer {
    resolved: Arc<Resolved>,
    keys: Keys,
    bucket: String,
    key: String,
    /// What the caller sends along.
    headers: Vec<(String, String)>,
}

impl Sign for Signer {
    fn sign(&self) -> Work<'_, (Target, SystemTime)> {
        Box::pin(guarded(self.signed()))
    }

    fn refused(&self, used: Instant) {
        self.keys.refused(used);
    }

    fn shows_tokens(&self) -> bool {
        false
    }

    fn name(&self) -> String {
        let endpoint = &self.resolved.endpoint;
        let (scheme, host) = (endpoint.scheme(), endpoint.host_str().unwrap_or(""));
        let port = endpoint.port_or_known_default().unwrap_or(0);
        let (path, bucket, key) = (endpoint.path(), &self.bucket, &self.key);
        format!("s3 {scheme}://{host}:{port}{path} {bucket}/{key}")
    }

    fn beside(&self, name: &str) -> Box<dyn Sign> {
        let folder =
            self.key.rsplit_once('/').map_or(String::new(), |(folder, _)| format!("{folder}/"));
        Box::new(Signer {
            resolved: Arc::clone(&self.resolved),
            keys: self.keys.clone(),
            bucket: self.bucket.clone(),
            key: folder + name,
            headers: self.headers.clone(),
        })
    }
}

impl Signer {
    async fn signed(&self) -> std::result::Result<(Target, SystemTime), Failure> {
        let credentials = self.keys.get().await.map_err(|error| {
            let what = format!("finding credentials: {}", DisplayErrorContext(error));
            Failure::passing(ErrorKind::PermissionDenied, what)
        })?;
        let failed = |what: String| Failure::lasting(ErrorKind::InvalidInput, what);
        let valid = PresigningConfig::expires_in(VALID).map_err(|e| failed(e.to_string()))?;
        let now = SystemTime::now();
        let expiry = [now.checked_add(VALID), credentials.expiry()].into_iter().flatten().min();
        let config = self.resolved.sdk().credentials_provider(credentials);
        let signed = aws_sdk_s3::Client::from_conf(config.build())
            .get_object()
            .bucket(&self.bucket)
            .key(&self.key)
            .presigned(valid)
            .await
            .map_err(|e| failed(DisplayErrorContext(e).to_string()))?;
        let url = Url::parse(signed.uri()).map_err(|e| failed(e.to_string()))?;
        let more = signed.headers().map(|(name, value)| (name.to_owned(), value.to_owned()));
        let target = Target::new(url, self.headers.iter().cloned().chain(more).collect());
        Ok((target, good_until(now, expiry.unwrap_or(now))))
    }
}

/// The address of a public object.
fn plain(resolved: &Resolved, bucket: &str, key: &str, uri: &str) -> Result<String> {
    let host = resolved.endpoint.host_str().unwrap_or("");
    let bad = || {
        let what =
            format!("`{uri}`: `{host}` is no endpoint whose name could begin with a bucket's");
        Error::InvalidArgument(what)
    };
    if !can_be_sent(key) {
        let what = format!("{uri:?}: without credentials its name cannot be asked for");
        return Err(Error::InvalidArgument(what));
    }
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
