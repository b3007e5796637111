//! The credential providers of the libraries: of AWS's SDK, and of object_store for Google and Azure.

#[cfg(feature = "clouds")]
use std::io;
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
    super::aws_login::HOW_TO_USE_LOGINS,
    aws_config::imds::client::error::ImdsError,
    aws_credential_types::Credentials as AwsCredentials,
    aws_credential_types::provider::error::CredentialsError,
    aws_credential_types::provider::{ProvideCredentials as _, SharedCredentialsProvider},
    aws_sdk_s3::error::DisplayErrorContext,
    std::error::Error as _,
};

use crate::io::transport::Failure;

/// The feature of the SDK for sessions of `aws login`, which its error names.
#[cfg(feature = "s3")]
const LOGIN_FEATURE: &str = "credentials-login";

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
                let found = provider.provide_credentials().await;
                let found = found.map_err(missing_of_aws)?;
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

/// The failure of object_store: permanent where a file or a server says that there are no
/// credentials.
#[cfg(feature = "clouds")]
pub fn missing_of_store(error: object_store::Error) -> MissingCredentials {
    let error: Box<dyn std::error::Error> = error.into();
    let mut cause = Some(&*error);
    while let Some(found) = cause {
        if let Some(found) = found.downcast_ref::<Failure>() {
            let what = format!("finding credentials: {found}");
            return MissingCredentials::Failed(found.copy().with_text(what));
        }
        if let Some(found) = found.downcast_ref::<io::Error>() {
            let refused = [ErrorKind::PermissionDenied, ErrorKind::NotFound];
            let permanent = refused.contains(&found.kind());
            let make = if permanent { Failure::permanent } else { Failure::transient };
            let what = format!("finding credentials: {found}");
            return MissingCredentials::Failed(make(found.kind(), what));
        }
        if let Some(found) = found.downcast_ref::<serde_json::Error>() {
            // The text of the error may quote the file.
            let (line, column) = (found.line(), found.column());
            let what = format!(
                "cannot parse the credentials file, or the response of the credential service: \
                 unknown type or invalid JSON, at line {line}, column {column}"
            );
            return MissingCredentials::failed(ErrorKind::InvalidData, &what);
        }
        cause = found.source();
    }
    MissingCredentials::failed(ErrorKind::PermissionDenied, &error.to_string())
}

/// The failure of the SDK's chain.
#[cfg(feature = "s3")]
pub fn missing_of_aws(error: CredentialsError) -> MissingCredentials {
    if is_absent(&error) {
        return MissingCredentials::Absent;
    }
    let what = DisplayErrorContext(error).to_string();
    if what.contains(LOGIN_FEATURE) {
        let what = format!("a role is assumed with a session of `aws login`: {HOW_TO_USE_LOGINS}");
        return MissingCredentials::failed(ErrorKind::PermissionDenied, &what);
    }
    let what = format!("finding credentials: {what}");
    MissingCredentials::Failed(Failure::transient(ErrorKind::PermissionDenied, what))
}

/// True if no credentials are configured. Other clouds have their own service at the address of
/// AWS's metadata service. No response, or an unexpected one, from this address therefore also
/// means that there are none; a busy service does not.
#[cfg(feature = "s3")]
fn is_absent(error: &CredentialsError) -> bool {
    let of_metadata_service = error.source().and_then(|cause| cause.downcast_ref::<ImdsError>());
    match of_metadata_service {
        Some(ImdsError::ErrorResponse(error)) => {
            let status = error.response().status().as_u16();
            status < 500 && status != 429
        }
        Some(_) => true,
        None => matches!(error, CredentialsError::CredentialsNotLoaded(_)),
    }
}
