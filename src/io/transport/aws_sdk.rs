//! The client of the transport as the HTTP client of AWS's SDK.

use std::fmt::Display;
use std::io::ErrorKind;
use std::sync::Arc;
use std::sync::atomic::AtomicU64;

use aws_sdk_s3::config::http::{HttpRequest, HttpResponse};
use aws_sdk_s3::error::ConnectorError;
use aws_sdk_s3::primitives::SdkBody;
use aws_smithy_runtime_api::client::http::{
    HttpClient, HttpConnector, HttpConnectorFuture, HttpConnectorSettings, SharedHttpConnector,
};
use aws_smithy_runtime_api::client::runtime_components::RuntimeComponents;
use reqwest::{Body, Request, Url};

use super::send::read_document;
use super::{Client, CredentialClient, Failure, UploadBody};

/// Sends the SDK's requests. Errors carry a [`Failure`].
#[derive(Debug, Clone)]
pub struct SdkClient {
    client: Client,
    /// Bytes of bodies that were sent.
    pub sent: Arc<AtomicU64>,
}

impl SdkClient {
    pub fn new(client: Client) -> Self {
        SdkClient { client, sent: Arc::default() }
    }
}

impl HttpClient for SdkClient {
    fn http_connector(
        &self,
        _settings: &HttpConnectorSettings,
        _components: &RuntimeComponents,
    ) -> SharedHttpConnector {
        SharedHttpConnector::new(self.clone())
    }
}

impl HttpConnector for SdkClient {
    fn call(&self, request: HttpRequest) -> HttpConnectorFuture {
        let SdkClient { client, sent } = self.clone();
        HttpConnectorFuture::new(async move {
            send(&client, request, sent).await.map_err(connector_error)
        })
    }
}

impl HttpClient for CredentialClient {
    fn http_connector(
        &self,
        settings: &HttpConnectorSettings,
        _components: &RuntimeComponents,
    ) -> SharedHttpConnector {
        let mut options = self.options.clone();
        // The SDK allows a second for a service that only machines of AWS have.
        options.connect = settings.connect_timeout().unwrap_or(options.connect);
        options.stall =
            settings.read_timeout().map_or(options.stall, |read| options.connect + read);
        SharedHttpConnector::new(CredentialClient { options })
    }
}

impl HttpConnector for CredentialClient {
    fn call(&self, request: HttpRequest) -> HttpConnectorFuture {
        let url = Url::parse(request.uri());
        let (host, tls) = url
            .as_ref()
            .map_or(("", true), |url| (url.host_str().unwrap_or(""), url.scheme() == "https"));
        match self.connect(host, tls) {
            Ok(client) => SdkClient::new(client).call(request),
            Err(failure) => HttpConnectorFuture::ready(Err(connector_error(failure))),
        }
    }
}

/// A failure as the error of the SDK's client.
fn connector_error(failure: Failure) -> ConnectorError {
    ConnectorError::other(failure.into(), None)
}

async fn send(
    client: &Client,
    request: HttpRequest,
    sent: Arc<AtomicU64>,
) -> Result<HttpResponse, Failure> {
    let odd = |e: &dyn Display| Failure::permanent(ErrorKind::InvalidInput, e.to_string());
    let request = request.try_into_http1x().map_err(|e| odd(&e))?;
    let counted = Arc::clone(&sent);
    let request =
        Request::try_from(request.map(|body| Body::wrap(UploadBody::new(body, counted))))?;
    let mut response = client.send(request, Some(&sent)).await?;
    // The SDK reads no objects in this way, only the documents of its API.
    let body = read_document(&mut response, client.stall()).await?;
    let status = response.status().as_u16().try_into().map_err(|e| odd(&e))?;
    let mut whole = HttpResponse::new(status, SdkBody::from(body));
    for (name, value) in response.headers() {
        if let Ok(value) = value.to_str() {
            whole.headers_mut().append(name.as_str().to_owned(), value.to_owned());
        }
    }
    Ok(whole)
}
