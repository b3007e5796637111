//! Credentials of AWS, Google and Azure. The libraries of the clouds find, fetch and keep them; here
//! are the settings that their providers are made of, and one wrapper of these providers.

#[cfg(feature = "s3")]
pub mod aws;
#[cfg(feature = "s3")]
mod aws_login;
#[cfg(feature = "clouds")]
pub mod azure;
#[cfg(feature = "clouds")]
pub mod google;
mod library;
mod provider;
#[cfg(feature = "clouds")]
mod settings;
mod store;
#[cfg(test)]
mod tests;

pub use library::{CloudCredential, MissingCredentials};
pub use provider::CredentialProvider;
#[cfg(test)]
pub use provider::renew_at;
#[cfg(feature = "clouds")]
pub use settings::{CloudIdentity, CloudSettings, IdentitySource, is_valid_name, parse_endpoint};
pub use store::{CredentialEnvironment, PerEnvironment};
#[cfg(test)]
pub use tests::simulated;
