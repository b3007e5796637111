//! The client of credential services as the HTTP client of object_store.

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
use reqwest::header::{HeaderMap, HeaderValue};
use reqwest::{Body, Request, StatusCode};
use serde_json::Value;
use url::form_urlencoded;

use super::trust::CREDENTIALS_SETTINGS;
use super::{
    CredentialClient, ErrorDocument, Failure, Repeat, TransportOptions, read_document,
    status_failure,
};

/// Time limits for connecting to, and for the response of, a metadata service that may not exist.
const MACHINE_LIMITS: (Duration, Duration) = (Duration::from_secs(1), Duration::from_secs(3));
/// The latest expiry of a token that is accepted, in seconds: later ones overflow in date
/// arithmetic.
const MAX_EXPIRY: u64 = 100_000_000_000;
/// The path with which requests to Google's metadata server begin.
const METADATA_PATH: &str = "/computeMetadata/";
/// The header of Azure's identity service.
const IDENTITY_HEADER: &str = "x-identity-header";

/// Endings of the names of secrets in forms.
const SECRETS: [&str; 3] = ["_secret", "_token", "_assertion"];

/// Sends the requests of object_store's credential providers.
#[derive(Debug, Clone)]
pub struct StoreClient {
    client: CredentialClient,
    settings: FixedSettings,
    /// Set once a token server has responded. None if the service is known to exist.
    has_responded: Option<Arc<AtomicBool>>,
}

/// Settings that object_store reads from the environment at each request, fixed at the time at which
/// the file was opened: the environment may name other credentials since.
#[derive(Debug, Clone, Default)]
pub struct FixedSettings {
    /// The names of Google's metadata server; the first one replaces all others.
    pub metadata: Vec<String>,
    /// The header of Azure's identity service.
    pub identity_header: Option<HeaderValue>,
}

impl StoreClient {
    /// A client with the options of a source or sink, except their headers and certificates.
    pub fn new(
        options: &TransportOptions,
        settings: FixedSettings,
        has_responded: Option<Arc<AtomicBool>>,
    ) -> Self {
        let client = CredentialClient::new(options, CREDENTIALS_SETTINGS);
        StoreClient { client, settings, has_responded }
    }

    async fn send(&self, mut request: HttpRequest) -> Result<HttpResponse, Failure> {
        self.settings.apply(&mut request)?;
        let host = request.uri().host().unwrap_or("").to_owned();
        let mut client = self.client.clone();
        if self.has_responded.as_ref().is_some_and(|responded| !responded.load(Ordering::Relaxed)) {
            (client.options.connect, client.options.stall) = MACHINE_LIMITS;
        }
        let client = client.connect(&host, request.uri().scheme_str() == Some("https"))?;
        let sent = request.body().as_bytes().cloned().unwrap_or_else(Bytes::new);
        let request = request.map(|_| Body::from(sent.clone()));
        let mut response = client.send(Request::try_from(request)?, None).await?;
        let (status, headers) = (response.status(), response.headers().clone());
        if let Some(has_responded) = &self.has_responded
            && is_token_server(status, headers.contains_key("metadata-flavor"))
        {
            has_responded.store(true, Ordering::Relaxed);
        }
        let body = read_document(&mut response, client.config.stall).await?;
        if !status.is_success() {
            let reason = ErrorDocument::read(&headers, &body).without(&secrets(&sent));
            let what = format!("`{host}` answered {status}{reason}");
            return Err(if is_transient_for_tokens(status) {
                Failure::transient(ErrorKind::Other, what)
            } else {
                Failure::permanent(ErrorKind::PermissionDenied, what)
            });
        }
        check_expiry(&host, &body)?;
        let mut whole = HttpResponse::new(body.into());
        (*whole.status_mut(), *whole.headers_mut()) = (status, headers);
        Ok(whole)
    }
}

impl HttpConnector for StoreClient {
    fn connect(&self, _options: &ClientOptions) -> object_store::Result<HttpClient> {
        Ok(HttpClient::new(self.clone()))
    }
}

#[async_trait]
impl HttpService for StoreClient {
    async fn call(&self, request: HttpRequest) -> Result<HttpResponse, HttpError> {
        let response = self.send(request).await;
        response.map_err(|failure| HttpError::new(HttpErrorKind::Unknown, failure))
    }
}

impl FixedSettings {
    fn apply(&self, request: &mut HttpRequest) -> Result<(), Failure> {
        let uri = request.uri();
        let asked = uri.authority().map_or("", |found| found.as_str());
        if uri.path().starts_with(METADATA_PATH)
            && let Some(first) = self.metadata.first()
            && !self.metadata.iter().any(|name| name == asked)
        {
            let rest = uri.path_and_query().map_or("", |found| found.as_str());
            *request.uri_mut() = format!("http://{first}{rest}").parse().map_err(|_| {
                let what = "the credential provider made an invalid request";
                Failure::permanent(ErrorKind::InvalidInput, what)
            })?;
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

/// True if a response comes from a token server. False for another server at the same address, and
/// for a machine whose metadata service is disabled. Google's server marks its responses with a
/// header.
fn is_token_server(status: StatusCode, google: bool) -> bool {
    let of_google = google && status == StatusCode::FORBIDDEN;
    status.is_success() || of_google || is_transient_for_tokens(status)
}

/// Azure's metadata service responds with 410 while it is updated.
fn is_transient_for_tokens(status: StatusCode) -> bool {
    let failure = status_failure(status, &HeaderMap::new(), String::new());
    failure.repeat != Repeat::Never || status == StatusCode::GONE
}

/// The secrets in the form of a request, which its response may repeat.
fn secrets(form: &[u8]) -> Vec<String> {
    let is_secret = |name: &str| SECRETS.iter().any(|part| name.ends_with(part));
    let fields = form_urlencoded::parse(form).filter(|(name, _)| is_secret(name));
    fields.map(|(_, value)| value.into_owned()).filter(|value| !value.is_empty()).collect()
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

#[cfg(test)]
mod tests {
    use object_store::client::HttpRequestBody;

    use super::*;

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
    fn secrets_of_requests_are_recognised() {
        let form = b"grant_type=refresh_token&client_secret=a%20secret-hu5hw0rd&refresh_token=";
        assert_eq!(secrets(form), ["a secret-hu5hw0rd"]);
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
