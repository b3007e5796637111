//! Providers of the libraries that have the credentials of a simulated cloud.

use std::sync::Arc;

use crate::io::auth::provider::CredentialProvider;
use crate::io::transport::simulated::SimulatedCloud;

#[cfg(feature = "s3")]
pub use of_aws::aws;
#[cfg(feature = "clouds")]
pub use of_object_store::{azure, google};

#[cfg(feature = "s3")]
mod of_aws {
    use aws_credential_types::provider::error::CredentialsError;
    use aws_credential_types::provider::future;
    use aws_sdk_s3::config::{Credentials, ProvideCredentials, SharedCredentialsProvider};

    use super::*;
    use crate::io::auth::aws::{library, provider};
    use crate::io::transport::TransportOptions;
    use crate::sys::clock;

    /// Has the chain of AWS in a region find the credentials of a simulated cloud.
    pub fn aws(server: &Arc<SimulatedCloud>, region: &str, options: &TransportOptions) {
        let found = SharedCredentialsProvider::new(SimulatedProvider(Arc::clone(server)));
        provider(region.to_owned(), options).use_provider(library(found));
    }

    #[derive(Debug)]
    struct SimulatedProvider(Arc<SimulatedCloud>);

    impl ProvideCredentials for SimulatedProvider {
        fn provide_credentials<'a>(&'a self) -> future::ProvideCredentials<'a>
        where
            Self: 'a,
        {
            let issued = self.0.issue().map(|(name, hold)| {
                Credentials::new(name, "secret", None, clock::date().checked_add(hold), "day")
            });
            let unavailable = || CredentialsError::provider_error("no answer");
            future::ProvideCredentials::ready(issued.ok_or_else(unavailable))
        }
    }
}

#[cfg(feature = "clouds")]
mod of_object_store {
    use std::io::{self, ErrorKind};
    use std::sync::Mutex;
    use std::time::{Duration, Instant};

    use object_store::azure::AzureCredential;
    use object_store::client::CredentialProvider as StoreProvider;
    use object_store::gcp::GcpCredential;

    use super::*;
    use crate::io::auth::library::CloudCredential;
    use crate::io::auth::provider::MakingProvider;
    use crate::io::auth::settings::library;
    use crate::sys::clock;
    use crate::sys::sync::unpoisoned;

    /// Keeps a token until five minutes before its end, as object_store does.
    #[derive(Debug)]
    struct SimulatedProvider<T> {
        server: Arc<SimulatedCloud>,
        make: fn(String) -> T,
        cached: Mutex<Option<(Arc<T>, Instant)>>,
    }

    #[async_trait::async_trait]
    impl<T: std::fmt::Debug + Send + Sync> StoreProvider for SimulatedProvider<T> {
        type Credential = T;

        async fn get_credential(&self) -> object_store::Result<Arc<T>> {
            let mut cached = unpoisoned(self.cached.lock());
            let soon = clock::now() + Duration::from_secs(300);
            if let Some((token, _)) = cached.as_ref().filter(|(_, expiry)| soon < *expiry) {
                return Ok(Arc::clone(token));
            }
            let away = || io::Error::new(ErrorKind::TimedOut, "no answer");
            let failed = || object_store::Error::Generic { store: "day", source: Box::new(away()) };
            let (name, hold) = self.server.issue().ok_or_else(failed)?;
            let token = Arc::new((self.make)(name));
            Ok(Arc::clone(&cached.insert((token, clock::now() + hold)).0))
        }
    }

    fn provider<T: std::fmt::Debug + Send + Sync + 'static>(
        server: &Arc<SimulatedCloud>,
        make: fn(String) -> T,
        wrap: fn(Arc<T>) -> CloudCredential,
    ) -> Arc<CredentialProvider> {
        let server = Arc::clone(server);
        let make = move || {
            let (server, cached) = (Arc::clone(&server), Mutex::default());
            let made: Arc<dyn StoreProvider<Credential = T>> =
                Arc::new(SimulatedProvider { server, make, cached });
            let made = library(&made, wrap);
            Box::pin(async { Ok(made) }) as MakingProvider
        };
        Arc::new(CredentialProvider::new(make, None))
    }

    pub fn google(server: &Arc<SimulatedCloud>) -> Arc<CredentialProvider> {
        provider(server, |bearer| GcpCredential { bearer }, CloudCredential::Google)
    }

    pub fn azure(server: &Arc<SimulatedCloud>) -> Arc<CredentialProvider> {
        provider(server, AzureCredential::BearerToken, CloudCredential::Azure)
    }
}
