//! The SDK's requests, sent by the same client as all others: with its proxies, certificates and
//! time limits.

use std::io::{self, ErrorKind};
use std::sync::Arc;
use std::sync::atomic::AtomicU64;
use std::time::Duration;

use aws_sdk_s3::config::http::{HttpRequest, HttpResponse};
use aws_sdk_s3::error::ConnectorError;
use aws_sdk_s3::primitives::SdkBody;
use aws_smithy_runtime_api::client::http::{
    HttpClient, HttpConnector, HttpConnectorFuture, HttpConnectorSettings, SharedHttpConnector,
};
use aws_smithy_runtime_api::client::runtime_components::RuntimeComponents;
use reqwest::{Body, Client, Request};

use crate::io::net::{Counted, Failure, NetOptions, Trust, unless_silent};
use crate::io::source::http::client;

/// Bytes of the longest answer that is read.
const LONGEST_ANSWER: usize = 4 << 20;

/// A client, and how long a server may say nothing.
#[derive(Debug, Clone)]
pub struct Connector {
    client: Client,
    stall: Duration,
    /// Bytes of bodies that were sent.
    pub sent: Arc<AtomicU64>,
}

impl Connector {
    /// A client that waits so long for a server that neither takes bytes nor sends any.
    pub fn new(client: Client, stall: Duration) -> Self {
        Connector { client, stall, sent: Arc::default() }
    }
}

impl HttpClient for Connector {
    fn http_connector(
        &self,
        _settings: &HttpConnectorSettings,
        _components: &RuntimeComponents,
    ) -> SharedHttpConnector {
        SharedHttpConnector::new(self.clone())
    }
}

/// Asks for credentials where the SDK knows them to be: a client is made when that is needed, and
/// believes whom the system trusts, whoever has the objects.
#[derive(Debug)]
pub struct OnDemand {
    options: NetOptions,
}

impl OnDemand {
    /// With the time limits and proxies of a source or a sink.
    pub fn new(options: &NetOptions) -> Self {
        let (headers, trust) = (Vec::new(), Trust::System);
        OnDemand { options: NetOptions { headers, trust, ..options.clone() } }
    }
}

impl HttpClient for OnDemand {
    fn http_connector(
        &self,
        settings: &HttpConnectorSettings,
        _components: &RuntimeComponents,
    ) -> SharedHttpConnector {
        // The SDK waits a second for what only machines of a cloud have.
        let connect = settings.connect_timeout().unwrap_or(self.options.connect);
        let stall = settings.read_timeout().map_or(self.options.stall, |read| connect + read);
        let options = NetOptions { connect, ..self.options.clone() };
        let client = client::Certificates::read(&options, true)
            .and_then(|all| client::connect(&options, &all).map_err(|error| error.to_string()));
        match client {
            Ok(client) => SharedHttpConnector::new(Connector::new(client, stall)),
            Err(error) => SharedHttpConnector::new(NoClient(error)),
        }
    }
}

/// Why there is no client.
#[derive(Debug)]
struct NoClient(String);

impl HttpConnector for NoClient {
    fn call(&self, _request: HttpRequest) -> HttpConnectorFuture {
        HttpConnectorFuture::ready(Err(failed(io::Error::other(self.0.clone()))))
    }
}

impl HttpConnector for Connector {
    fn call(&self, request: HttpRequest) -> HttpConnectorFuture {
        let Connector { client, stall, sent } = self.clone();
        HttpConnectorFuture::new(async move {
            let answer = send(&client, request, Arc::clone(&sent));
            let silent = || {
                let what = format!("the server said nothing for {} s", stall.as_secs_f64());
                Err(failed(io::Error::new(ErrorKind::TimedOut, what)))
            };
            unless_silent(stall, &sent, answer).await.unwrap_or_else(silent)
        })
    }
}

/// The kind says whether another try may help; see `Resolved::failure`.
fn failed(error: io::Error) -> ConnectorError {
    ConnectorError::other(error.into(), None)
}

async fn send(
    client: &Client,
    request: HttpRequest,
    sent: Arc<AtomicU64>,
) -> Result<HttpResponse, ConnectorError> {
    let of_reqwest = |e: reqwest::Error| failed(Failure::from(e).error);
    let odd =
        |e: &dyn std::fmt::Display| failed(io::Error::new(ErrorKind::InvalidInput, e.to_string()));
    let request = request.try_into_http1x().map_err(|e| odd(&e))?;
    let request = Request::try_from(request.map(|body| Body::wrap(Counted::new(body, sent))))
        .map_err(of_reqwest)?;
    let mut response = client.execute(request).await.map_err(of_reqwest)?;
    let status = response.status().as_u16().try_into().map_err(|e| odd(&e))?;
    let headers = response.headers().clone();
    // Objects are not read in this way: what is answered here are short documents.
    let mut body = Vec::new();
    while let Some(chunk) = response.chunk().await.map_err(of_reqwest)? {
        if body.len() + chunk.len() > LONGEST_ANSWER {
            let what = format!("an answer of more than {LONGEST_ANSWER} bytes");
            return Err(failed(io::Error::new(ErrorKind::InvalidData, what)));
        }
        body.extend_from_slice(&chunk);
    }
    let mut answer = HttpResponse::new(status, SdkBody::from(body));
    for (name, value) in &headers {
        if let Ok(value) = value.to_str() {
            answer.headers_mut().append(name.as_str().to_owned(), value.to_owned());
        }
    }
    Ok(answer)
}
