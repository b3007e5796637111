//! `gs://bucket/key`, `az://container/blob` and `abfss://`: addresses of HTTP servers, and who asks.

use std::io::ErrorKind;
use std::sync::Arc;
use std::time::{Duration, Instant, SystemTime};

use object_store::azure::{AzureAuthorizer, AzureCredential};
use object_store::client::{HttpRequest, HttpRequestBody};
use reqwest::header::{AUTHORIZATION, HeaderValue};
use reqwest::{Request, Url};

use super::http::client::{Authorize, Target};
use super::http::{self, Sign, Work};
use super::{KnownHeads, ReadAt};
use crate::cancel::Cancel;
use crate::error::{Error, Result};
use crate::io::net::clouds::{Cloud, Credential, Keys, Object, Resolved, resolve};
use crate::io::net::{Failure, NetOptions, can_be_sent, wait_for};

/// How long a chain is not asked again: it has a new token minutes before one expires.
const VALID: Duration = Duration::from_secs(30);
/// Bytes of the longest name: the clouds take 1024 characters. A request's address has an end.
const LONGEST_KEY: usize = 4096;
/// What Azure is told of how to understand a request where nobody signs it.
const AZURE_VERSION: (&str, &str) = ("x-ms-version", "2023-11-03");

/// Opens an address. Files of which the heads are known are opened without a request.
pub fn open(
    uri: &str,
    http: NetOptions,
    known: &KnownHeads,
    cancel: &dyn Cancel,
) -> Result<Arc<dyn ReadAt>> {
    let object = Object::parse(uri)?;
    // Finding credentials may need the network, on machines of a cloud.
    let Resolved { bucket, account, keys } =
        wait_for(&object.shown, &http, cancel, resolve(&object, &http))?;
    let shown = object.shown.clone();
    let tls = bucket.scheme() == "https";
    let Some(keys) = keys else {
        let mut http = http;
        if object.cloud == Cloud::Azure {
            http.headers.push((AZURE_VERSION.0.to_owned(), AZURE_VERSION.1.to_owned()));
        }
        let address = address(&bucket, &object.key).map_err(Error::InvalidArgument)?;
        let opened = http::open_as(address.as_str(), &shown, http, known, cancel);
        return opened.map_err(|error| as_anybody(error, object.cloud));
    };
    let headers = http.headers.clone();
    let signer =
        Signer { bucket: Arc::new(bucket), account: account.into(), keys, object, headers };
    http::open_signed(Box::new(signer), tls, &shown, http, known, cancel)
}

/// An address as messages show it; None for what is none.
pub fn shown(uri: &str) -> Option<String> {
    Object::parse(uri).ok().map(|object| object.shown)
}

/// The address of an object.
fn address(bucket: &Url, key: &str) -> std::result::Result<Url, String> {
    if !can_be_sent(key) || key.len() > LONGEST_KEY {
        return Err(format!("{key:?} is no name of an object"));
    }
    let mut url = bucket.clone();
    let path = url.path_segments_mut();
    path.map_err(|()| format!("`{bucket}` is no address of a server"))?.extend(key.split('/'));
    Ok(url)
}

/// The error of somebody who did not say who it is.
fn as_anybody(error: Error, cloud: Cloud) -> Error {
    let name = match cloud {
        Cloud::Google => "GOOGLE_APPLICATION_CREDENTIALS",
        Cloud::Azure => "AZURE_STORAGE_ACCOUNT_KEY",
    };
    match error {
        Error::Io { action, uri, error } => {
            let what = format!("{error} (no credentials were found, as by {name})");
            Error::io(action, &uri, std::io::Error::new(error.kind(), what))
        }
        other => other,
    }
}

/// Says who asks for an object.
struct Signer {
    bucket: Arc<Url>,
    account: Arc<str>,
    keys: Keys,
    object: Object,
    /// What the caller sends along.
    headers: Vec<(String, String)>,
}

impl Sign for Signer {
    fn sign(&self) -> Work<'_, (Target, SystemTime)> {
        Box::pin(self.signed())
    }

    fn refused(&self, used: Instant) {
        self.keys.refused(used);
    }

    fn shows_tokens(&self) -> bool {
        true
    }

    fn name(&self) -> String {
        format!("{:?} {} {}", self.object.cloud, self.bucket, self.object.key)
    }

    fn beside(&self, name: &str) -> Box<dyn Sign> {
        Box::new(Signer {
            bucket: Arc::clone(&self.bucket),
            account: Arc::clone(&self.account),
            keys: self.keys.clone(),
            object: self.object.beside(name),
            headers: self.headers.clone(),
        })
    }
}

impl Signer {
    async fn signed(&self) -> std::result::Result<(Target, SystemTime), Failure> {
        let credential = self.keys.get().await?;
        let url = address(&self.bucket, &self.object.key)
            .map_err(|what| Failure::lasting(ErrorKind::InvalidInput, what))?;
        let mut headers = self.headers.clone();
        let target = match credential {
            Credential::Google(found) => {
                // A service account for emulators has none.
                if !found.bearer.is_empty() {
                    check_token(&found.bearer)?;
                    headers.push(("authorization".to_owned(), format!("Bearer {}", found.bearer)));
                }
                Target::new(url, headers)
            }
            Credential::Azure(credential) => {
                let account = Arc::clone(&self.account);
                Target::new(url, headers).authorized(Arc::new(ByAzure { credential, account }))
            }
        };
        let now = SystemTime::now();
        Ok((target, now.checked_add(VALID).unwrap_or(now)))
    }
}

/// Refuses what no header can hold.
fn check_token(token: &str) -> std::result::Result<(), Failure> {
    let odd = |_| Failure::lasting(ErrorKind::InvalidData, "a token that is not well-formed");
    HeaderValue::from_str(token).map(drop).map_err(odd)
}

/// Azure's keys sign what else a request says.
struct ByAzure {
    credential: Arc<AzureCredential>,
    account: Arc<str>,
}

impl Authorize for ByAzure {
    fn authorize(&self, request: &mut Request) -> std::result::Result<(), Failure> {
        let odd = |what: String| Failure::lasting(ErrorKind::InvalidInput, what);
        if let AzureCredential::BearerToken(token) = &*self.credential {
            check_token(token)?;
        }
        let mut asked = HttpRequest::new(HttpRequestBody::empty());
        *asked.uri_mut() =
            request.url().as_str().parse().map_err(|_| odd("not an address".to_owned()))?;
        *asked.headers_mut() = request.headers().clone();
        let signed =
            AzureAuthorizer::new(&self.credential, &self.account).try_authorize(&mut asked);
        signed.map_err(|error| odd(format!("signing a request: {error}")))?;
        if let Some(proof) = asked.headers_mut().get_mut(AUTHORIZATION) {
            proof.set_sensitive(true);
        }
        // A shared access signature is in the address.
        let url = Url::parse(&asked.uri().to_string()).map_err(|e| odd(e.to_string()))?;
        *request.url_mut() = url;
        *request.headers_mut() = std::mem::take(asked.headers_mut());
        Ok(())
    }
}
