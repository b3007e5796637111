//! Signatures of reads, in headers: the SDK makes a request and signs it, and in place of sending
//! it, its headers are kept. So every rule of the SDK holds: endpoints, sessions of express
//! buckets, access points.

use std::io::ErrorKind;
use std::sync::Arc;
use std::time::{Duration, SystemTime};

use aws_sdk_s3::Client;
use aws_sdk_s3::config::http::{HttpRequest, HttpResponse};
use aws_sdk_s3::config::interceptors::BeforeTransmitInterceptorContextRef;
use aws_sdk_s3::config::retry::RetryConfig;
use aws_sdk_s3::config::{ConfigBag, Intercept, RuntimeComponents};
use aws_sdk_s3::error::BoxError;
use aws_sdk_s3::primitives::SdkBody;
use aws_smithy_runtime_api::client::http::{HttpConnector, HttpConnectorFuture};
use reqwest::Url;

use super::address::S3Address;
use super::resolve::S3Bucket;
use crate::environment::read_guarded;
use crate::io::transport::{
    ClientConfig, Failure, RequestTarget, SdkClient, TransportOptions, connector_error, sdk_client,
};
use crate::sys::clock;
use crate::sys::fork_safe_mutex::ForkSafeMutex;

/// Time for which a signature is used. Buckets may refuse older ones; making one takes a fraction
/// of a millisecond.
const USED_FOR: Duration = Duration::from_secs(1);
/// The query of the SDK's own requests for sessions of express buckets.
const SESSION: &str = "session";

impl S3Bucket {
    /// A client that signs requests, and sends only its own ones for sessions.
    pub fn signing_client(&self, options: &TransportOptions) -> Client {
        let sessions = sdk_client(SigningClient(Arc::new(options.clone())));
        let config = self.sdk().http_client(sessions).retry_config(RetryConfig::disabled());
        read_guarded(|| Client::from_conf(config.build()))
    }

    /// Signs a request for an object. The headers of the caller are sent, too. Returns the time
    /// until which the signature is used.
    pub async fn sign(
        &self,
        client: &Client,
        address: &S3Address,
        headers: &[(String, String)],
    ) -> Result<(RequestTarget, SystemTime), Failure> {
        let signed = Signed::default();
        let request = client
            .get_object()
            .bucket(&address.bucket)
            .key(&address.key)
            .set_version_id(address.version.clone())
            .set_request_payer(self.payer());
        let sent = request.customize().interceptor(signed.clone()).send().await;
        sent.map_err(|error| self.failure(error))?;
        let failed = |what: &str| Failure::permanent(ErrorKind::InvalidInput, what);
        let signed = signed.0.lock().take();
        let (url, of_signature) = signed.ok_or_else(|| failed("the request was not signed"))?;
        let url = Url::parse(&url).map_err(|e| failed(&e.to_string()))?;
        let headers = headers.iter().cloned().chain(of_signature).collect();
        let now = clock::date();
        let until = now.checked_add(USED_FOR).unwrap_or(now);
        let of_credentials = self.credentials.as_ref().and_then(|keys| keys.used_until());
        let until = of_credentials.map_or(until, |of_credentials| until.min(of_credentials));
        Ok((RequestTarget::new(url, headers), until))
    }
}

/// The address and the headers of a signed request.
type SignedRequest = (String, Vec<(String, String)>);

/// Keeps a request when it is signed.
#[derive(Debug, Clone, Default)]
struct Signed(Arc<ForkSafeMutex<Option<SignedRequest>>>);

impl Intercept for Signed {
    fn name(&self) -> &'static str {
        "Signed"
    }

    fn read_before_transmit(
        &self,
        context: &BeforeTransmitInterceptorContextRef<'_>,
        _components: &RuntimeComponents,
        _config: &mut ConfigBag,
    ) -> Result<(), BoxError> {
        let request = context.request();
        let authorization = request.headers().get("authorization").unwrap_or("");
        let (_, names) = authorization.split_once("SignedHeaders=").unwrap_or(("", ""));
        let names = names.split(',').next().unwrap_or("");
        let is_kept = |name: &str| {
            name == "authorization" || (name != "host" && names.split(';').any(|of| of == name))
        };
        let headers = request.headers().iter().filter(|(name, _)| is_kept(name));
        let headers = headers.map(|(name, value)| (name.to_owned(), value.to_owned())).collect();
        *self.0.lock() = Some((request.uri().to_owned(), headers));
        Ok(())
    }
}

/// The client of the SDK that sends nothing but requests for sessions.
#[derive(Debug, Clone)]
struct SigningClient(Arc<TransportOptions>);

impl HttpConnector for SigningClient {
    fn call(&self, request: HttpRequest) -> HttpConnectorFuture {
        let (_, query) = request.uri().split_once('?').unwrap_or(("", ""));
        if !query.split('&').any(|field| field.trim_end_matches('=') == SESSION) {
            let status = 200_u16
                .try_into()
                .map_err(|_| connector_error(Failure::permanent(ErrorKind::Other, "status")));
            return HttpConnectorFuture::ready(
                status.map(|status| HttpResponse::new(status, SdkBody::empty())),
            );
        }
        let client = ClientConfig::new(&self.0, true)
            .map_err(|what| Failure::permanent(ErrorKind::InvalidInput, what))
            .and_then(|config| config.client());
        match client {
            Ok(client) => SdkClient::new(client).call(request),
            Err(failure) => HttpConnectorFuture::ready(Err(connector_error(failure))),
        }
    }
}
