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

use super::proxies::is_of_machine;
use super::send::read_document;
use super::trust::AWS_CREDENTIALS_SETTINGS;
use super::{Client, ClientConfig, Failure, TransportOptions, UploadBody};

/// Sends the SDK's requests. Errors carry a [`Failure`].
#[derive(Debug, Clone)]
pub struct SdkClient {
    client: Client,
    /// The client without a proxy for services of this machine, for credentials.
    direct: Option<Client>,
    /// Bytes of bodies that were sent.
    pub sent: Arc<AtomicU64>,
}

impl SdkClient {
    pub fn new(client: Client) -> Self {
        SdkClient { client, direct: None, sent: Arc::default() }
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
        let SdkClient { client, direct, sent } = self.clone();
        let host = request.uri().parse().ok().and_then(|url: Url| Some(url.host_str()?.to_owned()));
        let direct = direct.filter(|_| host.as_deref().is_some_and(is_of_machine));
        let client = direct.unwrap_or(client);
        HttpConnectorFuture::new(async move {
            send(&client, request, sent).await.map_err(connector_error)
        })
    }
}

/// Makes a client when the SDK looks for credentials, with the time limits that the SDK knows.
#[derive(Debug)]
pub struct LazySdkClient {
    options: TransportOptions,
}

impl LazySdkClient {
    /// A client with the options of a source or sink, except their headers and certificates.
    pub fn new(options: &TransportOptions) -> Self {
        let (headers, trust_settings) = (Vec::new(), AWS_CREDENTIALS_SETTINGS);
        let trust = options.credential_trust.clone();
        let options = TransportOptions { headers, trust, trust_settings, ..options.clone() };
        LazySdkClient { options }
    }
}

impl HttpClient for LazySdkClient {
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
        let client = ClientConfig::new(&options, true)
            .map_err(|what| Failure::permanent(ErrorKind::InvalidInput, what))
            .and_then(|config| Ok((config.client()?, config.client_without_proxy()?)));
        match client {
            Ok((client, direct)) => SharedHttpConnector::new(SdkClient {
                direct: Some(direct),
                ..SdkClient::new(client)
            }),
            Err(failure) => SharedHttpConnector::new(NoClient(failure)),
        }
    }
}

/// The reason why no client could be made, as the response to each request.
#[derive(Debug)]
struct NoClient(Failure);

impl HttpConnector for NoClient {
    fn call(&self, _request: HttpRequest) -> HttpConnectorFuture {
        HttpConnectorFuture::ready(Err(connector_error(self.0.copy())))
    }
}

/// A failure as the error of the SDK's client.
pub fn connector_error(failure: Failure) -> ConnectorError {
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

#[cfg(test)]
#[allow(clippy::unwrap_used)]
mod tests {
    use super::*;
    use crate::io::transport::Trust;

    #[test]
    fn certificates_and_headers_of_the_call_are_not_for_credentials() {
        let mut options = TransportOptions::from_environment().unwrap();
        options.trust = Trust::Anything;
        options.headers.push(("authorization".to_owned(), "of the call".to_owned()));
        let client = LazySdkClient::new(&options);
        assert_eq!(client.options.trust, Trust::Default);
        assert!(client.options.headers.is_empty());
    }
}
