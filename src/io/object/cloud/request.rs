//! Requests that write objects of Google and blobs of Azure.

use std::io::ErrorKind;
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, AtomicU64, Ordering};
use std::time::Duration;

use bytes::Bytes;
use reqwest::header::{CONTENT_LENGTH, HeaderMap, HeaderName, HeaderValue};
use reqwest::{Body, Method, Request, StatusCode, Url};

use super::address::Cloud;
use super::authorize::{AZURE_VERSION, with_project_hint};
use super::bucket::with_anonymous_hint;
use crate::cancel::Cancel;
use crate::error::Result;
use crate::io::auth::CloudIdentity;
use crate::io::object::upload::{UploadRequests, confirm_if_present};
use crate::io::transport::{
    Client, ErrorDocument, Failure, UploadBody, header_map, header_text, read_document, secrets,
    status_failure, xml_element,
};

/// Azure gives its own Put Block List a minute, and a second more for each 1,000 blocks or so.
pub const COMBINE_LIMIT: Duration = Duration::from_secs(120);
/// Error codes for uploads that arrived damaged.
const DAMAGED: [&str; 3] = ["BadDigest", "Crc64Mismatch", "Md5Mismatch"];
/// Error codes of servers that do not support the header with a checksum.
const UNKNOWN_CHECKSUM: [&str; 3] = ["FeatureNotSupported", "NotImplemented", "UnsupportedHeader"];

/// A request of an upload.
pub struct UploadRequest<'a> {
    pub method: Method,
    pub query: &'a [(&'a str, &'a str)],
    pub fields: &'a [(&'static str, &'a str)],
    pub body: Bytes,
    /// The header with the checksum of the body; left out where the server does not know it.
    pub checksum: Option<(&'static str, String)>,
    /// Time limit for the server, if that is longer than usual.
    pub stall_limit: Duration,
}

impl UploadRequest<'_> {
    pub fn new(method: Method, body: Bytes) -> Self {
        let (query, fields, stall_limit) = (&[], &[], Duration::ZERO);
        UploadRequest { method, query, fields, body, checksum: None, stall_limit }
    }

    fn build(&self, url: &Url, checksums: bool, sent: &Arc<AtomicU64>) -> Result<Request, Failure> {
        let mut url = url.clone();
        if !self.query.is_empty() {
            url.query_pairs_mut().extend_pairs(self.query);
        }
        let mut request = Request::new(self.method.clone(), url);
        let checksum = self.checksum.iter().filter(|_| checksums);
        let checksum = checksum.map(|(name, value)| (*name, value.as_str()));
        for (name, value) in self.fields.iter().copied().chain(checksum) {
            let value = HeaderValue::from_str(value)
                .map_err(|e| Failure::permanent(ErrorKind::InvalidInput, e.to_string()))?;
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

/// The outcome of a request whose response says nothing but its success.
pub fn done(response: &CloudResponse) -> Option<Result<()>> {
    response.success().map(|_| Ok(()))
}

/// The response of a server.
pub struct CloudResponse {
    pub status: StatusCode,
    fields: HeaderMap,
    pub text: String,
    /// Secrets of the request, which the text may repeat.
    secrets: Vec<String>,
}

impl CloudResponse {
    /// This response, if its status is that of a success.
    pub fn success(&self) -> Option<&Self> {
        self.status.is_success().then_some(self)
    }

    /// The text of an XML element without children, in a document of known form. None if it has
    /// entities.
    pub fn element(&self, name: &str) -> Option<&str> {
        xml_element(&self.text, name).filter(|found| !found.contains(['<', '&']))
    }

    pub fn field(&self, name: &str) -> Option<&str> {
        header_text(&self.fields, name)
    }

    /// The code of a refusal. Responses without a body have it in a header.
    pub fn code(&self) -> &str {
        self.field("x-ms-error-code").or_else(|| self.element("Code")).unwrap_or("")
    }

    /// The failure that it means.
    fn failure(&self) -> Failure {
        let reason = ErrorDocument::read(&self.fields, self.text.as_bytes()).without(&self.secrets);
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
    pub identity: Option<CloudIdentity>,
    /// The name and the value of the header that marks an object of this upload.
    pub mark: (&'static str, String),
    /// False once the server has turned out not to know checksums.
    pub checksums: AtomicBool,
}

impl CloudObject {
    /// The header that marks an object of this upload.
    pub fn mark(&self) -> (&'static str, &str) {
        (self.mark.0, &self.mark.1)
    }

    /// Repeats a request until `take` accepts its response: None stands for a failure.
    pub fn send<T>(
        &self,
        request: &UploadRequest<'_>,
        cancel: &dyn Cancel,
        take: impl Fn(&CloudResponse) -> Option<Result<T>>,
    ) -> Result<T> {
        let invalidate = |used| {
            if let Some(identity) = &self.identity {
                identity.credentials.invalidate(used);
            }
        };
        let (wrap, take) = (|client| (client, Arc::default()), &take);
        let taken = self.requests.send(cancel, wrap, invalidate, |client, sent| async move {
            let checksums = request.checksum.is_some() && self.checksums.load(Ordering::Relaxed);
            let mut response = self.send_once(request, checksums, &client, &sent).await?;
            if checksums && UNKNOWN_CHECKSUM.contains(&response.code()) {
                response = self.send_once(request, false, &client, &sent).await?;
                if response.status.is_success() {
                    self.checksums.store(false, Ordering::Relaxed);
                }
            }
            take(&response).ok_or_else(|| response.failure())
        });
        taken.map_err(|error| match self.identity {
            Some(_) => error,
            None => with_anonymous_hint(error, self.cloud),
        })?
    }

    /// The same for the last request of an upload, whose response may be lost: after a failure, it
    /// is a success if the object has `len` bytes, and the mark of this upload.
    pub fn send_last(
        &self,
        request: &UploadRequest<'_>,
        len: u64,
        cancel: &dyn Cancel,
        take: impl Fn(&CloudResponse) -> Option<Result<()>>,
    ) -> Result<()> {
        let is_there = || {
            let (field, mark) = self.mark();
            self.send(&UploadRequest::new(Method::HEAD, Bytes::new()), cancel, |response| {
                let is_whole = |size: &str| size.parse() == Ok(len);
                let is_marked = response.success()?.field(field) == Some(mark);
                Some(Ok(is_marked && response.field("content-length").is_some_and(is_whole)))
            })
        };
        self.send(request, cancel, take).or_else(|error| confirm_if_present(error, is_there))
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
        request.headers_mut().extend(header_map(&self.requests.options.headers)?);
        match &self.identity {
            Some(identity) => identity.authorization().await?(&mut request)?,
            None if self.cloud == Cloud::Azure => {
                let (name, value) = AZURE_VERSION;
                request.headers_mut().insert(name, HeaderValue::from_static(value));
            }
            None => {}
        }
        let secrets = secrets(&request, std::iter::empty());
        let mut client = client.clone();
        client.config.stall = stall;
        let mut response = client.send(request, Some(sent)).await?;
        let text = read_document(&mut response, stall).await?;
        let (status, fields) = (response.status(), response.headers().clone());
        let text = String::from_utf8_lossy(&text).into_owned();
        Ok(CloudResponse { status, fields, text, secrets })
    }
}

#[cfg(test)]
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
            let mark = ("x-mark", String::new());
            let object = CloudObject { requests, cloud, url, identity, mark, checksums };
            let bytes = Bytes::from_static(b"some bytes");
            while simulated_cloud.now() < 24 * 3600 {
                // A token that was revoked is renewed once.
                if simulated_cloud.now() == 43_320 {
                    simulated_cloud.revoke_all();
                }
                object.send(&UploadRequest::new(Method::PUT, bytes.clone()), &Never, done).unwrap();
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
