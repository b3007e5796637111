//! The credential providers of the libraries: of AWS's SDK, and of object_store for Google and Azure.

use std::io::ErrorKind;
#[cfg(feature = "clouds")]
use std::sync::Arc;
use std::time::SystemTime;

#[cfg(feature = "clouds")]
use object_store::{
    azure::{AzureCredential, AzureCredentialProvider},
    gcp::{GcpCredential, GcpCredentialProvider},
};
#[cfg(feature = "s3")]
use {
    super::aws::missing_of_aws,
    aws_credential_types::Credentials as AwsCredentials,
    aws_credential_types::provider::{ProvideCredentials as _, SharedCredentialsProvider},
};

#[cfg(feature = "clouds")]
use super::settings::missing_of_store;
use crate::io::transport::Failure;

/// Credentials of a cloud.
#[derive(Clone, PartialEq)]
pub enum CloudCredential {
    #[cfg(feature = "s3")]
    Aws(AwsCredentials),
    #[cfg(feature = "clouds")]
    Google(Arc<GcpCredential>),
    #[cfg(feature = "clouds")]
    Azure(Arc<AzureCredential>),
}

impl CloudCredential {
    /// True if its library keeps it, and renews it before it expires: object_store does.
    pub fn is_kept_by_library(&self) -> bool {
        match self {
            #[cfg(feature = "s3")]
            CloudCredential::Aws(_) => false,
            #[cfg(feature = "clouds")]
            _ => true,
        }
    }
}

/// Why there are no credentials.
#[derive(Debug)]
pub enum MissingCredentials {
    /// No credentials are configured: objects are read anonymously.
    Absent,
    /// They could not be obtained.
    Failed(Failure),
}

impl MissingCredentials {
    /// Credentials that cannot be obtained, for this reason.
    pub fn failed(kind: ErrorKind, what: &str) -> Self {
        let what = format!("finding credentials: {what}");
        MissingCredentials::Failed(Failure::permanent(kind, what))
    }
}

impl From<MissingCredentials> for Failure {
    fn from(missing: MissingCredentials) -> Self {
        match missing {
            // Only for a request whose bucket was opened with credentials that no longer exist.
            MissingCredentials::Absent => {
                Failure::transient(ErrorKind::PermissionDenied, "no credentials were found")
            }
            MissingCredentials::Failed(failure) => failure,
        }
    }
}

/// A provider of a library.
#[derive(Clone)]
pub enum LibraryProvider {
    #[cfg(feature = "s3")]
    Aws(SharedCredentialsProvider),
    #[cfg(feature = "clouds")]
    Google(GcpCredentialProvider),
    #[cfg(feature = "clouds")]
    Azure(AzureCredentialProvider),
}

impl LibraryProvider {
    /// Its credential, and the time at which that expires, as far as the library says it.
    pub async fn get(&self) -> Result<(CloudCredential, Option<SystemTime>), MissingCredentials> {
        match self {
            #[cfg(feature = "s3")]
            LibraryProvider::Aws(provider) => {
                let found = provider.provide_credentials().await.map_err(missing_of_aws)?;
                let expiry = found.expiry();
                Ok((CloudCredential::Aws(found), expiry))
            }
            #[cfg(feature = "clouds")]
            LibraryProvider::Google(provider) => {
                let found = provider.get_credential().await.map_err(missing_of_store)?;
                Ok((CloudCredential::Google(found), None))
            }
            #[cfg(feature = "clouds")]
            LibraryProvider::Azure(provider) => {
                let found = provider.get_credential().await.map_err(missing_of_store)?;
                Ok((CloudCredential::Azure(found), None))
            }
        }
    }
}
