//! Signatures of reads, in headers: the SDK makes a request and signs it, and in place of sending
//! it, its headers are kept. So every rule of the SDK holds: endpoints, sessions of express
//! buckets, access points.

use std::io::ErrorKind;
use std::time::{Duration, SystemTime};

use aws_sdk_s3::Client;
use aws_sdk_s3::config::http::HttpRequest;
use aws_sdk_s3::error::ConnectorError;
use aws_smithy_runtime_api::client::http::{HttpConnector, HttpConnectorFuture};
use reqwest::Url;

use super::address::S3Address;
use super::refusal::cause;
use super::resolve::S3Bucket;
use crate::io::transport::{
    CredentialClient, Failure, RequestTarget, TransportOptions, sdk_client,
};
use crate::sys::clock;

/// Time for which a signature is used. Buckets may refuse older ones; making one takes a fraction
/// of a millisecond.
const USED_FOR: Duration = Duration::from_secs(1);
/// The query of the SDK's own requests for sessions of express buckets.
const SESSION: &str = "session";

impl S3Bucket {
    /// A client that signs requests, and sends only its own ones for sessions.
    pub fn signing_client(&self, options: &TransportOptions) -> Client {
        self.client(sdk_client(SigningClient(CredentialClient { options: options.clone() })))
    }

    /// Signs a request for an object. The headers of the caller are sent, too. Returns the time
    /// until which the signature is used.
    pub async fn sign(
        &self,
        client: &Client,
        address: &S3Address,
        headers: &[(String, String)],
    ) -> Result<(RequestTarget, SystemTime), Failure> {
        let request = client
            .get_object()
            .bucket(&address.bucket)
            .key(&address.key)
            .set_version_id(address.version.clone())
            .set_request_payer(self.payer());
        let Err(error) = request.send().await else {
            return Err(Failure::permanent(ErrorKind::InvalidInput, "the request was not signed"));
        };
        let Some(Signed { url, headers: of_signature }) = cause(&error) else {
            return Err(self.failure(error));
        };
        let url = Url::parse(url)
            .map_err(|e| Failure::permanent(ErrorKind::InvalidInput, e.to_string()))?;
        let headers = headers.iter().chain(of_signature).cloned().collect();
        let now = clock::date();
        let until = now.checked_add(USED_FOR).unwrap_or(now);
        let of_credentials = self.credentials.as_ref().and_then(|keys| keys.used_until());
        let until = of_credentials.map_or(until, |of_credentials| until.min(of_credentials));
        Ok((RequestTarget::new(url, headers), until))
    }
}

/// A signed request, as the error of its call.
#[derive(Debug, thiserror::Error)]
#[error("a request is signed, and not sent")]
struct Signed {
    url: String,
    headers: Vec<(String, String)>,
}

/// The client of the SDK that sends nothing but requests for sessions.
#[derive(Debug, Clone)]
struct SigningClient(CredentialClient);

impl HttpConnector for SigningClient {
    fn call(&self, request: HttpRequest) -> HttpConnectorFuture {
        let (_, query) = request.uri().split_once('?').unwrap_or(("", ""));
        if query.split('&').any(|field| field.trim_end_matches('=') == SESSION) {
            return self.0.call(request);
        }
        // It has the names of the signed headers, each after `=` or `;`.
        let authorization = request.headers().get("authorization").unwrap_or("");
        let signed: Vec<_> = authorization.split(['=', ';', ',']).collect();
        let is_kept = |name| name == "authorization" || (name != "host" && signed.contains(&name));
        let headers = request.headers().iter().filter(|(name, _)| is_kept(name));
        let headers = headers.map(|(name, value)| (name.to_owned(), value.to_owned())).collect();
        let signed = Signed { url: request.uri().to_owned(), headers };
        HttpConnectorFuture::ready(Err(ConnectorError::other(signed.into(), None)))
    }
}
