//! One transport for all servers: clients and their connections, sending, retries, TLS, redirects.
//! Nothing here knows what is read or written.

#[cfg(feature = "s3")]
mod aws_sdk;
mod certificate;
#[cfg(feature = "http")]
mod client;
mod connections;
#[cfg(any(feature = "clouds", feature = "s3"))]
mod credential_client;
mod failure;
mod lookup;
mod options;
#[cfg(feature = "http")]
mod proxies;
#[cfg(feature = "http")]
mod redirects;
#[cfg(feature = "http")]
mod refusal;
pub(crate) mod retry;
#[cfg(feature = "http")]
mod send;
#[cfg(test)]
#[cfg(any(feature = "clouds", feature = "s3"))]
pub(crate) mod simulated;
#[cfg(feature = "clouds")]
mod store_client;
#[cfg(test)]
#[cfg(feature = "http")]
#[allow(clippy::unwrap_used)]
mod tests;
pub(crate) mod timer;
mod tls;
mod tls_failure;
mod trust;
#[cfg(any(feature = "clouds", feature = "s3"))]
mod upload_body;

#[cfg(feature = "s3")]
pub(crate) use aws_sdk::SdkClient;
#[cfg(feature = "http")]
pub(crate) use client::{Client, ClientConfig, HTTP2_WINDOW};
pub(crate) use connections::{ConnectionPool, PooledConnection};
#[cfg(any(feature = "clouds", feature = "s3"))]
pub(crate) use connections::{run_once, with_guarded_polls};
#[cfg(any(feature = "clouds", feature = "s3"))]
pub(crate) use credential_client::CredentialClient;
pub(crate) use failure::{Failure, Repeat};
#[cfg(feature = "redis")]
pub(crate) use failure::{lookup_failure, refused_socket};
#[cfg(feature = "redis")]
pub(crate) use lookup::lookup;
pub use options::TransportOptions;
#[cfg(feature = "http")]
pub(crate) use redirects::{RequestTarget, follow};
#[cfg(feature = "clouds")]
pub(crate) use refusal::is_transient;
#[cfg(feature = "http")]
pub(crate) use refusal::{ErrorDocument, refusal, status_failure};
pub(crate) use retry::RetryBudget;
#[cfg(feature = "clouds")]
pub(crate) use send::read_document;
#[cfg(feature = "http")]
pub(crate) use send::{read_beginning, read_chunk};
#[cfg(feature = "clouds")]
pub(crate) use store_client::{FixedSettings, StoreClient};
pub(crate) use tls::Tls;
#[cfg(feature = "redis")]
pub(crate) use tls_failure::tls_failure;
#[cfg(feature = "s3")]
pub(crate) use trust::AWS_CREDENTIALS_SETTINGS;
#[cfg(feature = "redis")]
pub(crate) use trust::REDIS_SETTINGS;
#[cfg(feature = "s3")]
pub(crate) use trust::S3_SETTINGS;
pub use trust::Trust;
#[cfg(any(feature = "clouds", feature = "s3"))]
pub(crate) use upload_body::UploadBody;

/// An address in a message: without user, password, query and fragment, which may be secrets.
pub(crate) fn show_text(address: &str) -> &str {
    if address.contains('@') {
        return "...";
    }
    address.split(['?', '#']).next().unwrap_or(address)
}

/// True if a URL can hold the name of an object unchanged. URL parsers drop tabs and line ends and
/// resolve `.` and `..`, so that such a name would be that of another object.
#[cfg(any(feature = "clouds", feature = "s3"))]
pub(crate) fn fits_in_url(key: &str) -> bool {
    !key.contains(char::is_control) && !has_dot_component(key)
}

/// True if the name of an object has a component `.` or `..`.
#[cfg(any(feature = "clouds", feature = "s3"))]
pub(crate) fn has_dot_component(key: &str) -> bool {
    key.split('/').any(|part| matches!(part, "." | ".."))
}
