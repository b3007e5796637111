//! The requests for credentials, sent by the same client as all others: with its proxies,
//! certificates and time limits.

use std::io::{self, ErrorKind};
use std::time::Duration;

use async_trait::async_trait;
use bytes::Bytes;
use object_store::ClientOptions;
use object_store::client::{
    HttpClient, HttpConnector, HttpError, HttpErrorKind, HttpRequest, HttpResponse, HttpService,
};
use reqwest::{Body, Request, StatusCode};
use serde::Deserialize;

use crate::error::Brief;
use crate::io::net::{Failure, NetOptions, Trust};
use crate::io::source::http::client;

/// How long a machine may take to say that it is somebody, where nothing says that it is.
const MACHINE: (Duration, Duration) = (Duration::from_secs(1), Duration::from_secs(3));
/// Bytes of the longest answer that is read.
const LONGEST_ANSWER: usize = 1 << 20;

/// Makes a client when one is needed, which is seldom. It believes whom the system trusts, whoever
/// has the objects.
#[derive(Debug, Clone)]
pub struct OnDemand(NetOptions);

impl OnDemand {
    /// With the time limits and proxies of a source, or for a machine that may be nobody.
    pub fn new(options: &NetOptions, machine: bool) -> Self {
        let mut options =
            NetOptions { headers: Vec::new(), trust: Trust::System, ..options.clone() };
        if machine {
            (options.connect, options.stall) = MACHINE;
        }
        OnDemand(options)
    }

    async fn send(&self, request: HttpRequest) -> io::Result<HttpResponse> {
        let options = &self.0;
        let of_reqwest = |e: reqwest::Error| Failure::from(e).error;
        let host = request.uri().host().unwrap_or("").to_owned();
        let all = client::Certificates::read(options, true).map_err(io::Error::other)?;
        let client = client::connect(options, &all).map_err(of_reqwest)?;
        let body = |body: object_store::client::HttpRequestBody| {
            Body::from(body.as_bytes().cloned().unwrap_or_else(Bytes::new))
        };
        let request = Request::try_from(request.map(body)).map_err(of_reqwest)?;
        let asked = async {
            let mut response = client.execute(request).await?;
            let mut body = Vec::new();
            while let Some(chunk) = response.chunk().await? {
                body.extend_from_slice(&chunk);
                if body.len() > LONGEST_ANSWER {
                    break;
                }
            }
            Ok((response, body))
        };
        let (response, body) = tokio::time::timeout(options.stall, asked)
            .await
            .map_err(|_| {
                let seconds = options.stall.as_secs();
                let what = format!("`{host}` did not answer within {seconds} s");
                io::Error::new(ErrorKind::TimedOut, what)
            })?
            .map_err(of_reqwest)?;
        let status = response.status();
        if body.len() > LONGEST_ANSWER {
            let what = format!("`{host}` sent more than {LONGEST_ANSWER} bytes");
            return Err(io::Error::new(ErrorKind::InvalidData, what));
        }
        if !status.is_success() {
            return Err(refused(&host, status, &body));
        }
        let mut answer = HttpResponse::new(body.into());
        *answer.status_mut() = status;
        *answer.headers_mut() = response.headers().clone();
        Ok(answer)
    }
}

impl HttpConnector for OnDemand {
    fn connect(&self, _options: &ClientOptions) -> object_store::Result<HttpClient> {
        Ok(HttpClient::new(self.clone()))
    }
}

#[async_trait]
impl HttpService for OnDemand {
    async fn call(&self, request: HttpRequest) -> Result<HttpResponse, HttpError> {
        let answer = self.send(request).await;
        answer.map_err(|error| HttpError::new(HttpErrorKind::Unknown, error))
    }
}

/// What servers of tokens say of a refusal.
#[derive(Deserialize)]
struct Said {
    error: String,
    #[serde(default)]
    error_description: String,
}

/// A refusal, and what the server says of it. Its kind says whether another try may help.
fn refused(host: &str, status: StatusCode, body: &[u8]) -> io::Error {
    let said =
        serde_json::from_slice(body).map_or(String::new(), |Said { error, error_description }| {
            let line = error_description.lines().next().unwrap_or("");
            format!(": {}: {}", Brief(&error), Brief(line))
        });
    let later = status.is_server_error()
        || matches!(status, StatusCode::REQUEST_TIMEOUT | StatusCode::TOO_MANY_REQUESTS);
    let kind = if later { ErrorKind::Other } else { ErrorKind::PermissionDenied };
    io::Error::new(kind, format!("`{host}` answered {status}{said}"))
}
