//! The requests for credentials, sent by the same client as all others: with its proxies,
//! certificates and time limits.

use std::io::{self, ErrorKind};
use std::net::Ipv4Addr;
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, Ordering};
use std::time::Duration;

use async_trait::async_trait;
use bytes::Bytes;
use object_store::ClientOptions;
use object_store::client::{
    HttpClient, HttpConnector, HttpError, HttpErrorKind, HttpRequest, HttpResponse, HttpService,
};
use reqwest::header::HeaderValue;
use reqwest::{Body, Request, StatusCode};
use serde::Deserialize;
use serde_json::Value;

use crate::environment::reading;
use crate::error::Brief;
use crate::io::net::{Failure, NetOptions, Trust, timer};
use crate::io::source::http::client;

/// How long a machine may take to connect, and to say that it is somebody, where nothing has said
/// that it is.
const MACHINE: (Duration, Duration) = (Duration::from_secs(1), Duration::from_secs(3));
/// Bytes of the longest answer that is read.
const LONGEST_ANSWER: usize = 1 << 20;
/// Seconds: no token is good for longer, and no time is as late.
const LATEST: u64 = 100_000_000_000;
/// What requests to Google's metadata server begin with.
const METADATA_PATH: &str = "/computeMetadata/";

/// What the chains would read from the environment whenever they ask: it may have changed since they
/// were made, and then name somebody else.
#[derive(Debug, Clone, Default)]
pub struct Asks {
    /// Google's metadata server, by its names; the first one is asked in the place of all others.
    pub metadata: Vec<String>,
    /// What Azure's server of identities is shown.
    pub identity: Option<HeaderValue>,
}

impl Asks {
    fn settle(&self, request: &mut HttpRequest) -> io::Result<()> {
        let odd = |_| io::Error::new(ErrorKind::InvalidInput, "a request that is not well-formed");
        let uri = request.uri();
        let asked = uri.authority().map_or("", |found| found.as_str());
        if uri.path().starts_with(METADATA_PATH)
            && let Some(first) = self.metadata.first()
            && !self.metadata.iter().any(|name| name == asked)
        {
            let rest = uri.path_and_query().map_or("", |found| found.as_str());
            *request.uri_mut() = format!("http://{first}{rest}").parse().map_err(odd)?;
        }
        if request.headers().contains_key("metadata") {
            request.headers_mut().remove(IDENTITY);
            if let Some(value) = self.identity.clone() {
                request.headers_mut().insert(IDENTITY, value);
            }
        }
        Ok(())
    }
}

/// Azure's name of the header of identities.
const IDENTITY: &str = "x-identity-header";

/// Makes a client when one is needed, which is seldom. It believes whom the system trusts, whoever
/// has the objects.
#[derive(Debug, Clone)]
pub struct OnDemand {
    options: NetOptions,
    /// The machine may be nobody.
    machine: bool,
    asks: Asks,
    /// A server has answered.
    somebody: Arc<AtomicBool>,
}

impl OnDemand {
    /// With the time limits and proxies of a source, or for a machine that may be nobody.
    pub fn new(options: &NetOptions, machine: bool, asks: Asks) -> Self {
        let options = NetOptions { headers: Vec::new(), trust: Trust::System, ..options.clone() };
        OnDemand { options, machine, asks, somebody: Arc::default() }
    }

    /// The same, which takes note there of a server that answers.
    pub fn noting(self, somebody: &Arc<AtomicBool>) -> Self {
        OnDemand { somebody: Arc::clone(somebody), ..self }
    }

    async fn send(&self, mut request: HttpRequest) -> io::Result<HttpResponse> {
        self.asks.settle(&mut request)?;
        let mut options = self.options.clone();
        if self.machine && !self.somebody.load(Ordering::Relaxed) {
            (options.connect, options.stall) = MACHINE;
        }
        let of_reqwest = |e: reqwest::Error| Failure::from(e).error;
        let host = request.uri().host().unwrap_or("").to_owned();
        let tls = request.uri().scheme_str() == Some("https");
        let all = client::Certificates::read(&options, tls).map_err(io::Error::other)?;
        let mut builder = client::builder(&options, &all);
        if is_on_the_machine(&host) {
            builder = builder.no_proxy();
        }
        let client = reading(|| builder.build()).map_err(of_reqwest)?;
        let body = |body: object_store::client::HttpRequestBody| {
            Body::from(body.as_bytes().cloned().unwrap_or_else(Bytes::new))
        };
        let request = Request::try_from(request.map(body)).map_err(of_reqwest)?;
        let asked = async {
            let mut response = client.execute(request).await?;
            let google = response.headers().contains_key("metadata-flavor");
            if is_somebody(response.status(), google) {
                self.somebody.store(true, Ordering::Relaxed);
            }
            let mut body = Vec::new();
            while let Some(chunk) = response.chunk().await? {
                body.extend_from_slice(&chunk);
                if body.len() > LONGEST_ANSWER {
                    break;
                }
            }
            Ok((response, body))
        };
        let (response, body) = timer::timeout(options.stall, asked)
            .await
            .map_err(|_| {
                let seconds = options.stall.as_secs_f64();
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
        check_times(&host, &body)?;
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

/// Whether no proxy leads there: it would speak for itself, or hear a token.
fn is_on_the_machine(host: &str) -> bool {
    host == "metadata.google.internal" || host.parse().is_ok_and(|ip: Ipv4Addr| ip.is_link_local())
}

/// Whether an answer is that of a server of tokens, rather than of a machine of somebody else, where
/// there is no such thing, or where it is forbidden to ask. Google's says that it is Google's.
fn is_somebody(status: StatusCode, google: bool) -> bool {
    let may_be_google = google && status == StatusCode::FORBIDDEN;
    status.is_success() || may_be_google || may_pass(status)
}

/// Whether another try may help.
fn may_pass(status: StatusCode) -> bool {
    let passing = [StatusCode::REQUEST_TIMEOUT, StatusCode::GONE, StatusCode::TOO_MANY_REQUESTS];
    status.is_server_error() || passing.contains(&status)
}

/// Refuses times that cannot be reckoned with.
fn check_times(host: &str, body: &[u8]) -> io::Result<()> {
    let said = serde_json::from_slice(body).unwrap_or(Value::Null);
    let number = |value: &Value| value.as_u64().or_else(|| value.as_str()?.parse().ok());
    let mut times = ["expires_in", "expires_on"].into_iter().filter_map(|name| said.get(name));
    if times.any(|time| number(time).is_some_and(|time| time > LATEST)) {
        let what = format!("`{host}` gave a token that would be good for ever");
        return Err(io::Error::new(ErrorKind::InvalidData, what));
    }
    Ok(())
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
    let kind = if may_pass(status) { ErrorKind::Other } else { ErrorKind::PermissionDenied };
    io::Error::new(kind, format!("`{host}` answered {status}{said}"))
}

#[cfg(test)]
#[allow(clippy::unwrap_used)]
mod tests {
    use object_store::client::HttpRequestBody;

    use super::*;

    #[test]
    fn the_server_that_was_named_is_asked() {
        let settled = |asks: &Asks, uri: &str| {
            let mut request = HttpRequest::new(HttpRequestBody::empty());
            *request.uri_mut() = uri.parse().unwrap();
            request.headers_mut().insert("metadata", HeaderValue::from_static("true"));
            request.headers_mut().insert(IDENTITY, HeaderValue::from_static("another"));
            asks.settle(&mut request).unwrap();
            let header = request.headers().get(IDENTITY).cloned();
            (request.uri().to_string(), header)
        };
        let value = Some(HeaderValue::from_static("mine"));
        let asks = Asks { metadata: vec!["a:1".into(), "b".into()], identity: value.clone() };
        let path = "/computeMetadata/v1?x=1";
        for (asked, found) in [("a:1", "a:1"), ("b", "b"), ("169.254.169.254", "a:1")] {
            let (uri, header) = settled(&asks, &format!("http://{asked}{path}"));
            assert_eq!((uri, header), (format!("http://{found}{path}"), value.clone()));
        }
        let elsewhere = "http://169.254.169.254/metadata/identity";
        assert_eq!(settled(&Asks::default(), elsewhere), (elsewhere.to_owned(), None));
    }

    #[test]
    fn who_answers() {
        assert!(is_somebody(StatusCode::FORBIDDEN, true));
        for status in [200, 408, 410, 429, 500, 503] {
            assert!(is_somebody(StatusCode::from_u16(status).unwrap(), false), "{status}");
        }
        for status in [302, 400, 401, 403, 404, 405] {
            assert!(!is_somebody(StatusCode::from_u16(status).unwrap(), false), "{status}");
        }
        assert!(
            is_on_the_machine("169.254.169.254") && is_on_the_machine("metadata.google.internal")
        );
        assert!(!is_on_the_machine("127.0.0.1") && !is_on_the_machine("example.org"));
    }

    #[test]
    fn times() {
        let late = u64::MAX;
        for bad in [format!(r#"{{"expires_in":{late}}}"#), format!(r#"{{"expires_on":"{late}"}}"#)]
        {
            assert!(check_times("h", bad.as_bytes()).is_err());
        }
        for good in [r#"{"expires_in":3600,"expires_on":"1800000000"}"#, "no json", "[]"] {
            assert!(check_times("h", good.as_bytes()).is_ok());
        }
    }
}
