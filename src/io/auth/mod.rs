//! Credentials of AWS, Google and Azure: the places in which each cloud's own clients find them,
//! one cache, and their use in requests.

#[cfg(feature = "clouds")]
mod authorize;
#[cfg(feature = "s3")]
pub mod aws;
#[cfg(feature = "clouds")]
pub mod azure;
#[cfg(feature = "clouds")]
pub mod azure_account;
mod cache;
#[cfg(feature = "clouds")]
pub mod google;
#[cfg(feature = "s3")]
pub mod s3cfg;
#[cfg(feature = "clouds")]
mod settings;
mod snapshot;
#[cfg(feature = "clouds")]
pub(crate) mod token_chain;
#[cfg(feature = "clouds")]
mod token_client;

#[cfg(feature = "clouds")]
pub use authorize::AZURE_VERSION;
pub use cache::{CloudCredential, CredentialProvider, MissingCredentials, renew_at};
#[cfg(feature = "clouds")]
pub use settings::RequestIdentity;
