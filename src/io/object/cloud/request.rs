//! Requests that write objects of Google and blobs of Azure.

use std::io::ErrorKind;
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, AtomicU64, Ordering};
use std::time::Duration;

use bytes::Bytes;
use reqwest::header::{CONTENT_LENGTH, HeaderMap, HeaderName, HeaderValue};
use reqwest::{Body, Method, Request, StatusCode, Url};

use super::address::{Cloud, CloudAddress};
use super::authorize::{AZURE_VERSION, CloudIdentity, with_project_hint};
use super::bucket::{CloudBucket, object_url, resolve, with_anonymous_hint};
use crate::cancel::Cancel;
use crate::error::{Error, Result};
use crate::io::object::upload::{UploadRequests, confirm_if_present};
use crate::io::transport::{
    Client, ErrorDocument, Failure, TransportOptions, UploadBody, read_document, run_once,
    status_failure,
};

/// Azure gives its own Put Block List a minute, and a second more for each 1,000 blocks or so.
const COMBINE_LIMIT: Duration = Duration::from_secs(120);
/// Error codes for uploads that arrived damaged.
const DAMAGED: [&str; 3] = ["BadDigest", "Crc64Mismatch", "Md5Mismatch"];
/// Error codes of servers that do not support the header with a checksum.
const UNKNOWN_CHECKSUM: [&str; 3] = ["FeatureNotSupported", "NotImplemented", "UnsupportedHeader"];

/// A request of an upload.
pub struct UploadRequest<'a> {
    pub method: Method,
    pub query: Vec<(&'static str, String)>,
    pub fields: Vec<(&'static str, String)>,
    pub body: &'a Bytes,
    /// The header with the checksum of the body; left out where the server does not know it.
    pub checksum: Option<(&'static str, String)>,
    /// True for refusals, by status and code, that the caller handles.
    pub handled: fn(StatusCode, &str) -> bool,
    /// True for a success that is complete.
    pub complete: fn(&CloudResponse) -> bool,
    /// Time limit for the server, if that is longer than usual.
    pub stall_limit: Duration,
}

impl<'a> UploadRequest<'a> {
    pub fn new(method: Method, body: &'a Bytes) -> Self {
        let (query, fields) = (Vec::new(), Vec::new());
        UploadRequest {
            method,
            query,
            fields,
            body,
            checksum: None,
            handled: |_, _| false,
            complete: |_| true,
            stall_limit: Duration::ZERO,
        }
    }

    pub fn query(mut self, name: &'static str, value: impl Into<String>) -> Self {
        self.query.push((name, value.into()));
        self
    }

    pub fn field(mut self, name: &'static str, value: impl Into<String>) -> Self {
        self.fields.push((name, value.into()));
        self
    }

    pub fn checksum(self, name: &'static str, value: String) -> Self {
        UploadRequest { checksum: Some((name, value)), ..self }
    }

    pub fn handling(self, handled: fn(StatusCode, &str) -> bool) -> Self {
        UploadRequest { handled, ..self }
    }

    pub fn complete_if(self, complete: fn(&CloudResponse) -> bool) -> Self {
        UploadRequest { complete, ..self }
    }

    /// The same request, which has the server combine thousands of parts.
    pub fn with_long_limit(self) -> Self {
        UploadRequest { stall_limit: COMBINE_LIMIT, ..self }
    }

    fn build(&self, url: &Url, checksums: bool, sent: &Arc<AtomicU64>) -> Result<Request, Failure> {
        let mut url = url.clone();
        if !self.query.is_empty() {
            url.query_pairs_mut().extend_pairs(&self.query);
        }
        let mut request = Request::new(self.method.clone(), url);
        for (name, value) in self.fields.iter().chain(self.checksum.iter().filter(|_| checksums)) {
            let odd =
                |_| Failure::permanent(ErrorKind::InvalidInput, format!("`{name}`: {value:?}"));
            let value = HeaderValue::from_str(value).map_err(odd)?;
            request.headers_mut().insert(HeaderName::from_static(name), value);
        }
        if matches!(self.method, Method::PUT | Method::POST) {
            request.headers_mut().insert(CONTENT_LENGTH, self.body.len().into());
            let body = Body::from(self.body.clone());
            *request.body_mut() = Some(Body::wrap(UploadBody::new(body, Arc::clone(sent))));
        }
        Ok(request)
    }
}

/// The response of a server.
pub struct CloudResponse {
    pub status: StatusCode,
    pub fields: HeaderMap,
    text: String,
}

impl CloudResponse {
    /// The text of an XML element without children, in a document of known form. None if it has
    /// entities.
    pub fn element(&self, name: &str) -> Option<&str> {
        let (_, rest) = self.text.split_once(&format!("<{name}>"))?;
        let (found, _) = rest.split_once(&format!("</{name}>"))?;
        Some(found.trim()).filter(|found| !found.is_empty() && !found.contains(['<', '&']))
    }

    /// True if its document has that name.
    pub fn is_document(&self, name: &str) -> bool {
        self.text.contains(&format!("<{name}"))
    }

    pub fn field(&self, name: &str) -> Option<&str> {
        self.fields.get(name).and_then(|value| value.to_str().ok())
    }

    /// The code of a refusal. Responses without a body have it in a header.
    pub fn code(&self) -> &str {
        self.field("x-ms-error-code").or_else(|| self.element("Code")).unwrap_or("")
    }

    /// The failure that it means.
    fn failure(&self) -> Failure {
        let reason = ErrorDocument::read(&self.fields, self.text.as_bytes());
        let what = format!("the server answered {}{reason}", self.status);
        if self.status.is_success() {
            // The body reports an error, or is incomplete.
            return Failure::transient(
                ErrorKind::InvalidData,
                what + ", but its body is incomplete or reports an error",
            );
        }
        if DAMAGED.contains(&self.code()) {
            return Failure::transient(ErrorKind::InvalidData, what);
        }
        let refused = [StatusCode::BAD_REQUEST, StatusCode::FORBIDDEN].contains(&self.status);
        let expired = self.status == StatusCode::UNAUTHORIZED || (refused && reason.says_expired());
        let failure = status_failure(self.status, &self.fields, what).if_renewable(expired);
        with_project_hint(failure, self.code())
    }
}

/// An object or blob, and the identity of requests.
pub struct CloudObject {
    pub requests: UploadRequests<Client>,
    pub cloud: Cloud,
    pub url: Url,
    identity: Option<CloudIdentity>,
    /// False once the server has turned out not to know checksums.
    checksums: AtomicBool,
}

impl CloudObject {
    /// Finds the server and the credentials. Nothing is sent yet.
    pub fn new(uri: &str, options: TransportOptions, cancel: &dyn Cancel) -> Result<Self> {
        let address = CloudAddress::parse(uri)?;
        // Finding credentials may need the network, on machines of a cloud.
        let found =
            run_once(&address.display_address, &options, cancel, resolve(&address, &options))?;
        let CloudBucket { url, identity } = found;
        let url = object_url(&url, &address.key).map_err(Error::InvalidArgument)?;
        let tls = url.scheme() == "https";
        Ok(CloudObject {
            requests: UploadRequests::new(address.display_address, options, tls)?,
            cloud: address.cloud,
            url,
            identity,
            checksums: AtomicBool::new(true),
        })
    }

    /// Repeats a request until it succeeds, or is refused in a way that the caller handles.
    pub fn send(&self, request: &UploadRequest<'_>, cancel: &dyn Cancel) -> Result<CloudResponse> {
        let invalidate = |used| {
            if let Some(identity) = &self.identity {
                identity.invalidate(used);
            }
        };
        let wrap = |client| (client, Arc::default());
        let response = self.requests.send(cancel, wrap, invalidate, |client, sent| async move {
            let checksums = self.checksums.load(Ordering::Relaxed);
            let mut response = self.send_once(request, checksums, &client, &sent).await?;
            if checksums
                && request.checksum.is_some()
                && UNKNOWN_CHECKSUM.contains(&response.code())
            {
                response = self.send_once(request, false, &client, &sent).await?;
                if response.status.is_success() {
                    self.checksums.store(false, Ordering::Relaxed);
                }
            }
            let good = if response.status.is_success() {
                (request.complete)(&response)
            } else {
                (request.handled)(response.status, response.code())
            };
            if good { Ok(response) } else { Err(response.failure()) }
        });
        response.map_err(|error| self.with_hint(error))
    }

    /// The outcome of a failed last request, whose response may have been lost: success if the
    /// object has `len` bytes, and the mark of this upload in a header.
    pub fn confirm_completed(
        &self,
        error: Error,
        (field, mark): (&str, &str),
        len: u64,
        cancel: &dyn Cancel,
    ) -> Result<()> {
        confirm_if_present(error, || {
            let nothing = Bytes::new();
            let request = UploadRequest::new(Method::HEAD, &nothing)
                .handling(|status, _| status == StatusCode::NOT_FOUND);
            let response = self.send(&request, cancel)?;
            let is_whole = |size: &str| size.parse::<u64>() == Ok(len);
            Ok(response.field(field) == Some(mark)
                && response.field("content-length").is_some_and(is_whole))
        })
    }

    /// The error of a refusal that the caller does not accept.
    pub fn refusal_error(&self, response: &CloudResponse) -> Error {
        self.with_hint(Error::io(
            "writing",
            &self.requests.display_address,
            response.failure().error,
        ))
    }

    fn with_hint(&self, error: Error) -> Error {
        match self.identity {
            Some(_) => error,
            None => with_anonymous_hint(error, self.cloud),
        }
    }

    async fn send_once(
        &self,
        request: &UploadRequest<'_>,
        checksums: bool,
        client: &Client,
        sent: &Arc<AtomicU64>,
    ) -> Result<CloudResponse, Failure> {
        let stall = client.config.stall.max(request.stall_limit);
        let mut request = request.build(&self.url, checksums, sent)?;
        match &self.identity {
            Some(identity) => identity.authorization().await?(&mut request)?,
            None if self.cloud == Cloud::Azure => {
                let (name, value) = AZURE_VERSION;
                request.headers_mut().insert(name, HeaderValue::from_static(value));
            }
            None => {}
        }
        let mut client = client.clone();
        client.config.stall = stall;
        let mut response = client.send(request, Some(sent)).await?;
        let text = read_document(&mut response, stall).await?;
        let (status, fields) = (response.status(), response.headers().clone());
        Ok(CloudResponse { status, fields, text: String::from_utf8_lossy(&text).into_owned() })
    }
}

#[cfg(test)]
#[allow(clippy::unwrap_used)]
mod tests {
    use super::*;
    use crate::cancel::Never;
    use crate::io::auth::simulated;
    use crate::io::transport::simulated::{SimulatedCloud, options};

    #[test]
    fn a_day_of_writing_is_never_refused() {
        for cloud in [Cloud::Google, Cloud::Azure] {
            let (simulated_cloud, transport) = (SimulatedCloud::new(3600, 180), options());
            let credentials = match cloud {
                Cloud::Google => simulated::google(&simulated_cloud),
                Cloud::Azure => simulated::azure(&simulated_cloud),
            };
            let url: Url = format!("{}/bucket/key", simulated_cloud.serve()).parse().unwrap();
            let requests = UploadRequests::new("an object".to_owned(), transport, false).unwrap();
            let (account, checksums) = ("account".into(), AtomicBool::new(true));
            let identity = Some(CloudIdentity { account, quota_project: None, credentials });
            let object = CloudObject { requests, cloud, url, identity, checksums };
            let bytes = Bytes::from_static(b"some bytes");
            while simulated_cloud.now() < 24 * 3600 {
                // A token that was revoked is renewed once.
                if simulated_cloud.now() == 43_320 {
                    simulated_cloud.revoke_all();
                }
                object.send(&UploadRequest::new(Method::PUT, &bytes), &Never).unwrap();
                simulated_cloud.advance(60);
            }
            assert_eq!(simulated_cloud.refused.load(Ordering::Relaxed), 1, "{cloud:?}");
            assert!(
                (25..32).contains(&simulated_cloud.issued()),
                "{cloud:?}: {} times",
                simulated_cloud.issued()
            );
        }
    }
}
