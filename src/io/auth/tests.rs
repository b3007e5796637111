//! Tests of credentials, and the credentials of a simulated cloud.
#![allow(clippy::unwrap_used)]

#[cfg(feature = "clouds")]
mod clouds;
#[cfg(feature = "s3")]
mod provider;
pub mod simulated;
