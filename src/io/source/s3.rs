//! `s3://bucket/key`: an address that is signed, and then read as any other of HTTP.

use std::io::ErrorKind;
use std::sync::Arc;
use std::time::{Duration, Instant, SystemTime};

use aws_sdk_s3::error::DisplayErrorContext;
use aws_sdk_s3::presigning::PresigningConfig;
use reqwest::header::{HeaderMap, LOCATION};
use reqwest::{StatusCode, Url};

use super::http::client::Target;
use super::http::{self, Sign, Work};
use super::{KnownHeads, ReadAt};
use crate::cancel::Cancel;
use crate::error::{Error, Result};
use crate::io::net::s3::{
    DEFAULT_READ_ENDPOINT, Document, MARGIN, ObjectName, Resolved, S3Options, Server, again,
    good_until, region_of, resolve,
};
use crate::io::net::{Failure, NetOptions, can_be_sent, guarded, wait_for};
use crate::sys::clock;

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
    let name = ObjectName::parse(uri)?;
    // Signing needs no network; finding credentials may, on machines of a cloud.
    let shown = name.shown();
    let found = resolve(s3, &http, DEFAULT_READ_ENDPOINT, &name);
    let resolved = wait_for(&shown, &http, cancel, found)?;
    if resolved.credentials.is_none() {
        // A name that cannot be sent is an error of the argument.
        plain(&resolved, &name)?;
    }
    let tls = resolved.server.is_tls();
    let headers = http.headers.clone();
    let signer = Signer { resolved: Arc::new(resolved), name, headers };
    http::open_signed(Box::new(signer), tls, &shown, http, known, cancel)
}

/// An address as messages show it; None for what is none.
pub fn shown(uri: &str) -> Option<String> {
    ObjectName::parse(uri).ok().map(|name| name.shown())
}

/// Until when an address is used that is signed now with credentials that expire then.
pub(crate) fn signed_until(now: SystemTime, credentials: Option<SystemTime>) -> SystemTime {
    let expiry = [now.checked_add(VALID), credentials].into_iter().flatten().min().unwrap_or(now);
    // Towards the end of credentials there may be new ones at any time, and to sign costs nothing.
    let ends = expiry.duration_since(now).is_ok_and(|left| left <= MARGIN);
    if ends { again(now, expiry) } else { good_until(now, expiry) }
}

/// Signs the address of an object, if there are credentials.
struct Signer {
    resolved: Arc<Resolved>,
    name: ObjectName,
    /// What the caller sends along.
    headers: Vec<(String, String)>,
}

impl Sign for Signer {
    fn sign(&self) -> Work<'_, (Target, SystemTime)> {
        Box::pin(guarded(self.signed()))
    }

    fn refused(&self, used: Instant) {
        if let Some(keys) = &self.resolved.credentials {
            keys.refused(used);
        }
    }

    fn shows_tokens(&self) -> bool {
        false
    }

    fn name(&self) -> String {
        let ObjectName { bucket, key, version } = &self.name;
        let version = version.as_ref().map_or(String::new(), |id| format!("?versionId={id}"));
        let server = self.resolved.url().map_or_else(
            |_| String::new(),
            |url| {
                let (scheme, host) = (url.scheme(), url.host_str().unwrap_or(""));
                let port = url.port_or_known_default().unwrap_or(0);
                format!("{scheme}://{host}:{port}{}", url.path())
            },
        );
        format!("s3 {server} {bucket}/{key}{version}")
    }

    fn host(&self) -> Option<String> {
        Some(self.resolved.host())
    }

    fn is_answer(&self, headers: &HeaderMap) -> bool {
        let is_aws = matches!(self.resolved.server, Server::Aws { .. });
        !headers.contains_key(LOCATION) || (is_aws && region_of(headers).is_some())
    }

    fn is_elsewhere(&self, asked: &Target, headers: &HeaderMap) -> bool {
        self.resolved.follows_region(headers, asked.host())
    }

    fn refusal(&self, status: StatusCode, headers: &HeaderMap, said: &[u8]) -> Failure {
        self.resolved.refusal(status, headers, &Document::read(said))
    }

    fn is_version(&self) -> bool {
        self.name.version.is_some()
    }

    fn beside(&self, name: &str) -> Box<dyn Sign> {
        Box::new(Signer {
            resolved: Arc::clone(&self.resolved),
            name: self.name.beside(name),
            headers: self.headers.clone(),
        })
    }
}

impl Signer {
    async fn signed(&self) -> std::result::Result<(Target, SystemTime), Failure> {
        let failed = |what: String| Failure::lasting(ErrorKind::InvalidInput, what);
        let Some(keys) = &self.resolved.credentials else {
            let url = plain(&self.resolved, &self.name).map_err(|e| failed(e.to_string()))?;
            let now = clock::date();
            let until = now.checked_add(VALID).unwrap_or(now);
            return Ok((Target::new(url, self.headers.clone()), until));
        };
        let credentials = keys.get().await.map_err(|error| {
            let what = format!("finding credentials: {}", DisplayErrorContext(error));
            Failure::passing(ErrorKind::PermissionDenied, what)
        })?;
        let valid = PresigningConfig::expires_in(VALID).map_err(|e| failed(e.to_string()))?;
        let now = clock::date();
        let until = signed_until(now, credentials.expiry());
        let config = self.resolved.sdk().credentials_provider(credentials);
        let signed = aws_sdk_s3::Client::from_conf(config.build())
            .get_object()
            .bucket(&self.name.bucket)
            .key(&self.name.key)
            .set_version_id(self.name.version.clone())
            .set_request_payer(self.resolved.payer())
            .presigned(valid)
            .await
            .map_err(|e| failed(DisplayErrorContext(e).to_string()))?;
        let url = Url::parse(signed.uri()).map_err(|e| failed(e.to_string()))?;
        let more = signed.headers().map(|(name, value)| (name.to_owned(), value.to_owned()));
        let target = Target::new(url, self.headers.iter().cloned().chain(more).collect());
        Ok((target, until))
    }
}

/// The address of a public object.
fn plain(resolved: &Resolved, name: &ObjectName) -> Result<Url> {
    let ObjectName { bucket, key, version } = name;
    let Server::Endpoint { url: endpoint, path_style } = &resolved.server else {
        return Err(Error::Bug("AWS would be asked anonymously".to_owned()));
    };
    let host = endpoint.host_str().unwrap_or("");
    let bad = || {
        let uri = name.shown();
        let what =
            format!("`{uri}`: `{host}` is no endpoint whose name could begin with a bucket's");
        Error::InvalidArgument(what)
    };
    if !can_be_sent(key) {
        let what = format!("{:?}: without credentials its name cannot be asked for", name.shown());
        return Err(Error::InvalidArgument(what));
    }
    let mut url = endpoint.clone();
    if !path_style {
        url.set_host(Some(&format!("{bucket}.{host}"))).map_err(|_| bad())?;
    }
    let mut path = url.path_segments_mut().map_err(|()| bad())?;
    path.pop_if_empty();
    if *path_style {
        path.push(bucket);
    }
    path.extend(key.split('/'));
    drop(path);
    if let Some(version) = version {
        url.query_pairs_mut().append_pair("versionId", version);
    }
    Ok(url)
}

#[cfg(test)]
#[allow(clippy::unwrap_used)]
mod tests {
    use std::sync::atomic::Ordering;

    use super::*;
    use crate::cancel::Never;
    use crate::io::net::s3::found_on;
    use crate::io::net::simulated::{Day, OBJECT_LEN, options};
    use crate::io::source::read_exact_at;
    use crate::mem::Buffers;

    /// Credentials of an hour and of a quarter, from a service that is away for a part of the time in
    /// which they are renewed.
    #[test]
    fn a_day_of_reading_is_never_refused() {
        for (hold, away, step, given) in [(3600, 180, 60, 25..30), (900, 40, 40, 96..112)] {
            let (day, net, region) = (Day::new(hold, away), options(), format!("read-{hold}"));
            found_on(&day, &region, &net);
            let s3 = S3Options {
                endpoint: Some(day.serve()),
                force_http: Some(true),
                region: Some(region),
                ..S3Options::default()
            };
            let source = open("s3://bucket/key", &s3, net, &KnownHeads::default(), &Never).unwrap();
            while day.now() < 24 * 3600 {
                // Behind what is read ahead.
                let (at, mut bytes) = (OBJECT_LEN / 2 + day.now(), [0; 5]);
                let what = || "bytes".to_owned();
                read_exact_at(&*source, at, &mut Buffers::of(&mut bytes), &what, &Never).unwrap();
                assert_eq!(bytes, [7; 5]);
                day.pass(step);
            }
            assert_eq!(day.refused.load(Ordering::Relaxed), 0);
            assert!(day.answered.load(Ordering::Relaxed) >= 24 * 3600 / step);
            assert!(given.contains(&day.given()), "{} times", day.given());
        }
    }
}
