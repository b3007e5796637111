//! The client of the transport as the HTTP client of object_store's chains, which ask servers for
//! tokens.

use std::io::ErrorKind;
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

use crate::error::Shortened;
use crate::io::transport::{
    CREDENTIALS_SETTINGS, ClientConfig, Failure, TransportOptions, is_of_machine, is_transient,
    read_document,
};

/// Time limits for connecting to, and for the response of, a metadata service that may not exist.
const MACHINE_LIMITS: (Duration, Duration) = (Duration::from_secs(1), Duration::from_secs(3));
/// The latest expiry of a token that is accepted, in seconds: later ones overflow in date
/// arithmetic.
const MAX_EXPIRY: u64 = 100_000_000_000;
/// The path with which requests to Google's metadata server begin.
const METADATA_PATH: &str = "/computeMetadata/";

/// Settings that object_store's chains read from the environment at each request, fixed at the time
/// of the snapshot: the environment may name other credentials since.
#[derive(Debug, Clone, Default)]
pub struct FixedSettings {
    /// The names of Google's metadata server; the first one replaces all others.
    pub metadata: Vec<String>,
    /// The header of Azure's identity service.
    pub identity_header: Option<HeaderValue>,
}

impl FixedSettings {
    fn apply(&self, request: &mut HttpRequest) -> Result<(), Failure> {
        let malformed = |_| {
            Failure::permanent(
                ErrorKind::InvalidInput,
                "the credential provider made an invalid request",
            )
        };
        let uri = request.uri();
        let asked = uri.authority().map_or("", |found| found.as_str());
        if uri.path().starts_with(METADATA_PATH)
            && let Some(first) = self.metadata.first()
            && !self.metadata.iter().any(|name| name == asked)
        {
            let rest = uri.path_and_query().map_or("", |found| found.as_str());
            *request.uri_mut() = format!("http://{first}{rest}").parse().map_err(malformed)?;
        }
        if request.headers().contains_key("metadata") {
            request.headers_mut().remove(IDENTITY_HEADER);
            if let Some(value) = self.identity_header.clone() {
                request.headers_mut().insert(IDENTITY_HEADER, value);
            }
        }
        Ok(())
    }
}

/// The header of Azure's identity service.
const IDENTITY_HEADER: &str = "x-identity-header";

/// Makes a client for each request, of which there are few.
#[derive(Debug, Clone)]
pub struct TokenClient {
    options: TransportOptions,
    /// True if the machine may have no metadata service.
    may_be_absent: bool,
    settings: FixedSettings,
    /// Set once a token server has responded.
    has_responded: Arc<AtomicBool>,
}

impl TokenClient {
    /// A client with the options of a source or sink, except their headers and certificates.
    pub fn new(options: &TransportOptions, may_be_absent: bool, settings: FixedSettings) -> Self {
        let (headers, trust_settings) = (Vec::new(), CREDENTIALS_SETTINGS);
        let trust = options.credential_trust.clone();
        let options = TransportOptions { headers, trust, trust_settings, ..options.clone() };
        TokenClient { options, may_be_absent, settings, has_responded: Arc::default() }
    }

    /// The same client; it sets `has_responded` once a token server has responded.
    pub fn reporting(self, has_responded: &Arc<AtomicBool>) -> Self {
        TokenClient { has_responded: Arc::clone(has_responded), ..self }
    }

    /// True if the machine may have no metadata service.
    pub fn may_be_absent(&self) -> bool {
        self.may_be_absent
    }

    async fn send(&self, mut request: HttpRequest) -> Result<HttpResponse, Failure> {
        self.settings.apply(&mut request)?;
        let mut options = self.options.clone();
        if self.may_be_absent && !self.has_responded.load(Ordering::Relaxed) {
            (options.connect, options.stall) = MACHINE_LIMITS;
        }
        let host = request.uri().host().unwrap_or("").to_owned();
        let tls = request.uri().scheme_str() == Some("https");
        let config = ClientConfig::new(&options, tls)
            .map_err(|what| Failure::permanent(ErrorKind::Other, what))?;
        let client =
            if is_of_machine(&host) { config.client_without_proxy() } else { config.client() }?;
        let body = |body: object_store::client::HttpRequestBody| {
            Body::from(body.as_bytes().cloned().unwrap_or_else(Bytes::new))
        };
        let mut response = client.send(Request::try_from(request.map(body))?, None).await?;
        let (status, headers) = (response.status(), response.headers().clone());
        if is_token_server(status, headers.contains_key("metadata-flavor")) {
            self.has_responded.store(true, Ordering::Relaxed);
        }
        let body = read_document(&mut response, client.stall()).await?;
        if !status.is_success() {
            return Err(refusal_failure(&host, status, &body));
        }
        check_expiry(&host, &body)?;
        let mut whole = HttpResponse::new(body.into());
        *whole.status_mut() = status;
        *whole.headers_mut() = headers;
        Ok(whole)
    }
}

impl HttpConnector for TokenClient {
    fn connect(&self, _options: &ClientOptions) -> object_store::Result<HttpClient> {
        Ok(HttpClient::new(self.clone()))
    }
}

#[async_trait]
impl HttpService for TokenClient {
    async fn call(&self, request: HttpRequest) -> Result<HttpResponse, HttpError> {
        let response = self.send(request).await;
        response.map_err(|failure| HttpError::new(HttpErrorKind::Unknown, failure))
    }
}

/// True if a response comes from a token server. False for another server at the same address, and
/// for a machine whose metadata service is disabled. Google's server marks its responses with a
/// header.
fn is_token_server(status: StatusCode, google: bool) -> bool {
    let of_google = google && status == StatusCode::FORBIDDEN;
    status.is_success() || of_google || is_transient_for_tokens(status)
}

/// Azure's metadata service responds with 410 while it is updated.
fn is_transient_for_tokens(status: StatusCode) -> bool {
    is_transient(status) || status == StatusCode::GONE
}

/// Refuses expiries that overflow date arithmetic.
fn check_expiry(host: &str, body: &[u8]) -> Result<(), Failure> {
    let document = serde_json::from_slice(body).unwrap_or(Value::Null);
    let number = |value: &Value| value.as_u64().or_else(|| value.as_str()?.parse().ok());
    let mut times = ["expires_in", "expires_on"].into_iter().filter_map(|name| document.get(name));
    if times.any(|time| number(time).is_some_and(|time| time > MAX_EXPIRY)) {
        let what = format!("`{host}` issued a token whose expiry is too far in the future");
        return Err(Failure::transient(ErrorKind::InvalidData, what));
    }
    Ok(())
}

/// The error document of a token server.
#[derive(Deserialize)]
struct TokenErrorDocument {
    error: String,
    #[serde(default)]
    error_description: String,
}

/// The failure of a refused request.
fn refusal_failure(host: &str, status: StatusCode, body: &[u8]) -> Failure {
    let text = serde_json::from_slice(body).map_or(
        String::new(),
        |TokenErrorDocument { error, error_description }| {
            let line = error_description.lines().next().unwrap_or("");
            format!(": {}: {}", Shortened(&error), Shortened(line))
        },
    );
    let what = format!("`{host}` answered {status}{text}");
    if is_transient_for_tokens(status) {
        return Failure::transient(ErrorKind::Other, what);
    }
    Failure::permanent(ErrorKind::PermissionDenied, what)
}

#[cfg(test)]
#[allow(clippy::unwrap_used)]
mod tests {
    use object_store::client::HttpRequestBody;

    use super::*;
    use crate::io::transport::Trust;

    #[test]
    fn configured_metadata_server_replaces_all_others() {
        let applied = |settings: &FixedSettings, uri: &str| {
            let mut request = HttpRequest::new(HttpRequestBody::empty());
            *request.uri_mut() = uri.parse().unwrap();
            request.headers_mut().insert("metadata", HeaderValue::from_static("true"));
            request.headers_mut().insert(IDENTITY_HEADER, HeaderValue::from_static("another"));
            settings.apply(&mut request).unwrap();
            let header = request.headers().get(IDENTITY_HEADER).cloned();
            (request.uri().to_string(), header)
        };
        let value = Some(HeaderValue::from_static("mine"));
        let settings = FixedSettings {
            metadata: vec!["a:1".into(), "b".into()],
            identity_header: value.clone(),
        };
        let path = "/computeMetadata/v1?x=1";
        for (asked, found) in [("a:1", "a:1"), ("b", "b"), ("169.254.169.254", "a:1")] {
            let (uri, header) = applied(&settings, &format!("http://{asked}{path}"));
            assert_eq!((uri, header), (format!("http://{found}{path}"), value.clone()));
        }
        let elsewhere = "http://169.254.169.254/metadata/identity";
        assert_eq!(applied(&FixedSettings::default(), elsewhere), (elsewhere.to_owned(), None));
    }

    #[test]
    fn certificates_and_headers_of_the_call_are_not_for_credentials() {
        let mut options = TransportOptions::from_environment().unwrap();
        options.trust = Trust::Anything;
        options.headers.push(("authorization".to_owned(), "of the call".to_owned()));
        let client = TokenClient::new(&options, false, FixedSettings::default());
        assert_eq!(client.options.trust, Trust::Default);
        assert!(client.options.headers.is_empty());
    }

    #[test]
    fn token_servers_are_recognised() {
        assert!(is_token_server(StatusCode::FORBIDDEN, true));
        for status in [200, 408, 410, 429, 500, 503] {
            assert!(is_token_server(StatusCode::from_u16(status).unwrap(), false), "{status}");
        }
        for status in [302, 400, 401, 403, 404, 405] {
            assert!(!is_token_server(StatusCode::from_u16(status).unwrap(), false), "{status}");
        }
    }

    #[test]
    fn impossible_expiries_are_refused() {
        let late = u64::MAX;
        for bad in [format!(r#"{{"expires_in":{late}}}"#), format!(r#"{{"expires_on":"{late}"}}"#)]
        {
            assert!(check_expiry("h", bad.as_bytes()).is_err());
        }
        for good in [r#"{"expires_in":3600,"expires_on":"1800000000"}"#, "no json", "[]"] {
            assert!(check_expiry("h", good.as_bytes()).is_ok());
        }
    }
}
