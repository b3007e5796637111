//! The client of the transport as the HTTP client of AWS's SDK.

use std::fmt::Display;
use std::io::ErrorKind;
use std::sync::Arc;
use std::sync::atomic::AtomicU64;

use aws_sdk_s3::config::http::{HttpRequest, HttpResponse};
use aws_sdk_s3::error::ConnectorError;
use aws_sdk_s3::primitives::SdkBody;
use aws_smithy_runtime_api::client::http::{
    HttpConnector, HttpConnectorFuture, SharedHttpClient, SharedHttpConnector, http_client_fn,
};
use reqwest::header::{HeaderValue, USER_AGENT};
use reqwest::{Body, Request, Url};

use super::client::OUR_NAME;
use super::redirects::{header_map, secrets};
use super::refusal::hide;
use super::send::read_document;
use super::trust::AWS_CREDENTIALS_SETTINGS;
use super::{Client, CredentialClient, Failure, TransportOptions, UploadBody};

/// The header with the token of temporary credentials.
const TOKEN: &str = "x-amz-security-token";
/// The header with the names of the SDK and of the program.
const SDK_NAME: &str = "x-amz-user-agent";

/// Sends the SDK's requests. Errors carry a [`Failure`].
#[derive(Debug, Clone)]
pub struct SdkClient {
    client: Client,
    /// Headers of the caller, which are not signed.
    headers: Vec<(String, String)>,
    /// Bytes of bodies that were sent.
    pub sent: Arc<AtomicU64>,
}

impl SdkClient {
    pub fn new(client: Client, headers: Vec<(String, String)>) -> Self {
        SdkClient { client, headers, sent: Arc::default() }
    }

    async fn send(&self, request: HttpRequest) -> Result<HttpResponse, Failure> {
        let odd = |e: &dyn Display| Failure::permanent(ErrorKind::InvalidInput, e.to_string());
        let request = request.try_into_http1x().map_err(|e| odd(&e))?;
        let counted = Arc::clone(&self.sent);
        let mut request =
            Request::try_from(request.map(|body| Body::wrap(UploadBody::new(body, counted))))?;
        // The SDK has the name of the program in its own field only.
        let sdk = request.headers().get(SDK_NAME).and_then(|name| name.to_str().ok()).unwrap_or("");
        if let Ok(name) = HeaderValue::from_str(&format!("{OUR_NAME} {sdk}")) {
            request.headers_mut().insert(USER_AGENT, name);
        }
        request.headers_mut().extend(header_map(&self.headers)?);
        let token = request.headers().get(TOKEN).and_then(|token| token.to_str().ok());
        let secrets = secrets(&request, token.into_iter());
        let mut response = self.client.send(request, Some(&self.sent)).await?;
        // The SDK reads no objects in this way, only the documents of its API.
        let mut body = read_document(&mut response, self.client.config.stall).await?;
        if !response.status().is_success() {
            body = hide(String::from_utf8_lossy(&body).into_owned(), &secrets).into_bytes();
        }
        let status = response.status().as_u16().try_into().map_err(|e| odd(&e))?;
        let mut whole = HttpResponse::new(status, SdkBody::from(body));
        for (name, value) in response.headers() {
            if let Ok(value) = value.to_str() {
                whole.headers_mut().append(name.as_str().to_owned(), value.to_owned());
            }
        }
        Ok(whole)
    }
}

/// A client for the SDK that sends by a connector, whatever its settings.
pub fn sdk_client(connector: impl HttpConnector + Clone + 'static) -> SharedHttpClient {
    http_client_fn(move |_, _| SharedHttpConnector::new(connector.clone()))
}

impl HttpConnector for SdkClient {
    fn call(&self, request: HttpRequest) -> HttpConnectorFuture {
        let client = self.clone();
        HttpConnectorFuture::new(async move { client.send(request).await.map_err(connector_error) })
    }
}

/// The client of the SDK's credential providers, with the options of a source or sink.
pub fn credential_client(options: &TransportOptions) -> SharedHttpClient {
    let client = CredentialClient::new(options, AWS_CREDENTIALS_SETTINGS);
    http_client_fn(move |settings, _| {
        let mut client = client.clone();
        let TransportOptions { connect, stall, .. } = &mut client.options;
        // The SDK allows a second for a service that only machines of AWS have.
        *connect = settings.connect_timeout().unwrap_or(*connect);
        *stall = settings.read_timeout().map_or(*stall, |read| *connect + read);
        SharedHttpConnector::new(client)
    })
}

impl HttpConnector for CredentialClient {
    fn call(&self, request: HttpRequest) -> HttpConnectorFuture {
        let url = Url::parse(request.uri()).ok();
        let host = url.as_ref().and_then(Url::host_str).unwrap_or("");
        match self.connect(host, url.as_ref().is_none_or(|url| url.scheme() == "https")) {
            Ok(client) => SdkClient::new(client, Vec::new()).call(request),
            Err(failure) => HttpConnectorFuture::ready(Err(connector_error(failure))),
        }
    }
}

/// A failure as the error of the SDK's client.
pub fn connector_error(failure: Failure) -> ConnectorError {
    ConnectorError::other(failure.into(), None)
}
