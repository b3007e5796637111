//! Settings that Google and Azure have in common.

use std::io::{self, ErrorKind};
use std::sync::Arc;

use object_store::RetryConfig;
use object_store::client::CredentialProvider as StoreProvider;
use reqwest::Url;

use super::library::{CloudCredential, LibraryProvider, MissingCredentials};
use super::provider::{CredentialProvider, MakingProvider};
use super::store::{CredentialEnvironment, PROVIDERS};
use crate::environment::read_guarded;
use crate::error::{Error, Result};
use crate::io::transport::{Failure, FixedSettings, StoreClient, TransportOptions, show_text};

/// The settings of a cloud, from the environment.
pub struct CloudSettings {
    pub endpoint: Url,
    pub source: IdentitySource,
    pub identity: CloudIdentity,
}

/// The identity of requests.
#[derive(Clone)]
pub struct CloudIdentity {
    /// The storage account, of Azure only.
    pub account: Arc<str>,
    /// The project that pays for requests, of Google only.
    pub quota_project: Option<Arc<str>>,
    pub credentials: Arc<CredentialProvider>,
}

/// The source of the identity of requests.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum IdentitySource {
    /// No identity, as the settings demand.
    Anonymous,
    /// The identity of the settings; it is an error if its credentials cannot be obtained.
    Configured,
    /// The identity of the machine, if it has one.
    Machine,
}

/// The credentials of a store of object_store, which `make` builds with a client of the transport.
pub fn store_provider(
    environment: &Arc<CredentialEnvironment>,
    options: &TransportOptions,
    source: IdentitySource,
    fixed: FixedSettings,
    make: impl Fn(StoreClient) -> std::result::Result<LibraryProvider, MissingCredentials>
    + Send
    + Sync
    + 'static,
) -> Arc<CredentialProvider> {
    PROVIDERS.get(environment, || {
        let has_responded = (source == IdentitySource::Machine).then(Arc::default);
        let client = StoreClient::new(options, fixed, has_responded.clone());
        let make = move || {
            let made = read_guarded(|| make(client.clone()));
            Box::pin(async { made }) as MakingProvider
        };
        CredentialProvider::new(make, has_responded)
    })
}

/// A provider of object_store.
pub fn library<T: Send + Sync + 'static>(
    provider: &Arc<dyn StoreProvider<Credential = T>>,
    wrap: fn(Arc<T>) -> CloudCredential,
) -> LibraryProvider {
    let provider = Arc::clone(provider);
    Arc::new(move || {
        let provider = Arc::clone(&provider);
        Box::pin(async move {
            let found = provider.get_credential().await.map_err(missing_of_store)?;
            Ok((wrap(found), None))
        })
    })
}

/// The failure of object_store: permanent where a file or a server says that there are no
/// credentials.
pub fn missing_of_store(error: object_store::Error) -> MissingCredentials {
    let error: Box<dyn std::error::Error> = error.into();
    for cause in std::iter::successors(Some(&*error), |&error| error.source()) {
        if let Some(found) = cause.downcast_ref::<Failure>() {
            return MissingCredentials::of(found.copy());
        }
        if let Some(found) = cause.downcast_ref::<io::Error>() {
            let refused = [ErrorKind::PermissionDenied, ErrorKind::NotFound];
            let permanent = refused.contains(&found.kind());
            let make = if permanent { Failure::permanent } else { Failure::transient };
            return MissingCredentials::of(make(found.kind(), found.to_string()));
        }
        if let Some(found) = cause.downcast_ref::<serde_json::Error>() {
            // The text of the error may quote the file.
            let (line, column) = (found.line(), found.column());
            let what = format!(
                "cannot parse the credentials file, or the response of the credential service: \
                 unknown type or invalid JSON, at line {line}, column {column}"
            );
            return MissingCredentials::failed(ErrorKind::InvalidData, &what);
        }
    }
    MissingCredentials::failed(ErrorKind::PermissionDenied, &error.to_string())
}

/// Retries are the transport's, so that a caller's limits and interrupts hold.
pub fn without_retries() -> RetryConfig {
    RetryConfig { max_retries: 0, ..RetryConfig::default() }
}

/// True if a variable says yes, as the libraries of the clouds read it.
pub fn is_truthy(value: &str) -> bool {
    let lower = value.trim().to_ascii_lowercase();
    matches!(lower.as_str(), "1" | "true" | "on" | "yes" | "y")
}

/// The address of a server that a variable names, with its scheme: credentials are sent there.
pub fn parse_endpoint(text: &str) -> Result<Url> {
    let address = show_text(text);
    let found = Some(text).filter(|text| text.contains("://") && !text.contains(char::is_control));
    let found = found.and_then(|text| Url::parse(text).ok());
    let found = found.filter(|url| matches!(url.scheme(), "http" | "https"));
    // The address names servers in messages and in the cache: it may hold no secrets.
    let has_no_secrets =
        |url: &Url| url.username().is_empty() && url.password().is_none() && url.query().is_none();
    found.filter(Url::has_host).filter(has_no_secrets).ok_or_else(|| {
        let what = format!(
            "expected the https:// or http:// address of a server, without user and query, found \
             `{address}`"
        );
        Error::InvalidArgument(what)
    })
}

/// The name of a server, with or without a port.
pub fn check_host<'t>(variable: &str, text: &'t str) -> Result<&'t str> {
    let is_valid = text.bytes().all(|b| b.is_ascii_alphanumeric() || b"-_.:[]".contains(&b))
        && !text.ends_with(':')
        && Url::parse(&format!("http://{text}/")).is_ok();
    let what = format!("{variable}: expected the name of a server, found `{}`", show_text(text));
    Some(text).filter(|_| is_valid).ok_or(Error::InvalidArgument(what))
}

/// Checks a value that is sent in a header.
pub fn check_printable<'t>(variable: &str, text: &'t str) -> Result<&'t str> {
    let what = format!("{variable}: expected printable ASCII, found other characters");
    let is_valid = text.bytes().all(|b| (b' '..=b'~').contains(&b));
    Some(text).filter(|_| is_valid).ok_or(Error::InvalidArgument(what))
}

/// True if a text can be the name of a bucket, a container or an account.
pub fn is_valid_name(text: &str) -> bool {
    !text.is_empty()
        && text.bytes().all(|b| b.is_ascii_alphanumeric() || b"-_.$".contains(&b))
        && !matches!(text, "." | "..")
}
