//! Settings that Google and Azure have in common.

use std::sync::Arc;

use object_store::RetryConfig;
use reqwest::Url;

use super::library::{LibraryProvider, MissingCredentials};
use super::provider::{CredentialProvider, MakingProvider};
use super::store::{self, CredentialEnvironment};
use crate::environment::read_guarded;
use crate::error::{Error, Result};
use crate::io::transport::{FixedSettings, StoreClient, TransportOptions, show_text};

/// The settings of a cloud, from the environment.
pub struct CloudSettings {
    pub endpoint: Url,
    /// The storage account, of Azure only.
    pub account: String,
    /// The project that pays for requests, of Google only.
    pub quota_project: Option<String>,
    pub identity: RequestIdentity,
    pub credentials: Arc<CredentialProvider>,
}

/// The identity that requests are made with.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum RequestIdentity {
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
    identity: RequestIdentity,
    fixed: FixedSettings,
    make: impl Fn(StoreClient) -> std::result::Result<LibraryProvider, MissingCredentials>
    + Send
    + Sync
    + 'static,
) -> Arc<CredentialProvider> {
    store::provider(environment, || {
        let has_responded = (identity == RequestIdentity::Machine).then(Arc::default);
        let client = StoreClient::new(options, fixed, has_responded.clone());
        let make = move || {
            let made = read_guarded(|| make(client.clone()));
            Box::pin(async { made }) as MakingProvider
        };
        CredentialProvider::new(make).of_machine(has_responded)
    })
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
