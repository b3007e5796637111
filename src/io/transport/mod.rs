//! One transport for all servers: clients and their connections, sending, retries, TLS, redirects.
//! Nothing here knows what is read or written.

#[cfg(feature = "s3")]
mod aws_sdk;
mod certificate;
#[cfg(feature = "http")]
mod client;
mod connections;
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
#[cfg(all(test, any(feature = "clouds", feature = "s3")))]
pub(crate) mod simulated;
#[cfg(feature = "clouds")]
mod store_client;
#[cfg(all(test, feature = "http"))]
mod tests;
pub(crate) mod timer;
mod tls;
mod tls_failure;
mod trust;
#[cfg(any(feature = "clouds", feature = "s3"))]
mod upload_body;

#[cfg(feature = "http")]
pub(crate) use self::{
    client::{Client, ClientConfig, CredentialClient, HTTP2_WINDOW},
    redirects::{RequestTarget, follow, header_map, secrets},
    refusal::{ErrorDocument, header_text, request_ids, status_failure, xml_element},
    send::{read_beginning, read_chunk, read_document},
};
pub(crate) use self::{
    connections::{ConnectionPool, PooledConnection, run_once, with_guarded_polls},
    failure::{Failure, Repeat, lookup_failure, refused_socket},
    lookup::lookup,
    retry::RetryBudget,
    tls::Tls,
    tls_failure::tls_failure,
    trust::{REDIS_SETTINGS, S3_SETTINGS},
};
#[cfg(feature = "s3")]
pub(crate) use aws_sdk::{SdkClient, credential_client, sdk_client};
pub use failure::show_text;
pub use options::TransportOptions;
#[cfg(feature = "clouds")]
pub(crate) use store_client::{FixedSettings, StoreClient};
pub use trust::Trust;
#[cfg(any(feature = "clouds", feature = "s3"))]
pub(crate) use upload_body::UploadBody;

/// True if a URL can hold the name of an object unchanged. URL parsers drop tabs and line ends and
/// resolve `.` and `..`, so that such a name would be that of another object.
pub(crate) fn fits_in_url(key: &str) -> bool {
    !key.contains(char::is_control) && !has_dot_component(key)
}

/// True if the name of an object has a component `.` or `..`.
pub(crate) fn has_dot_component(key: &str) -> bool {
    key.split('/').any(|part| matches!(part, "." | ".."))
}
