//! The credential providers of the libraries: of AWS's SDK, and of object_store for Google and Azure.

use std::io::ErrorKind;
use std::pin::Pin;
use std::sync::Arc;
use std::time::SystemTime;

#[cfg(feature = "s3")]
use aws_credential_types::Credentials as AwsCredentials;
#[cfg(feature = "clouds")]
use object_store::{azure::AzureCredential, gcp::GcpCredential};

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
        Self::of(Failure::permanent(kind, what))
    }

    /// The same for a failure of a library or a server.
    pub fn of(failure: Failure) -> Self {
        let what = format!("finding credentials: {failure}");
        MissingCredentials::Failed(failure.with_text(what))
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

/// A credential, and the time at which it expires, as far as the library says it.
pub type Found = Result<(CloudCredential, Option<SystemTime>), MissingCredentials>;

/// Work that may ask a server.
pub type Asking<T> = Pin<Box<dyn Future<Output = T> + Send>>;

/// A provider of a library.
pub type LibraryProvider = Arc<dyn Fn() -> Asking<Found> + Send + Sync>;
