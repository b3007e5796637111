//! The chains of Google and Azure, which object_store has.

use std::io::{self, ErrorKind};
use std::sync::Arc;
use std::sync::atomic::AtomicBool;

use object_store::RetryConfig;
use object_store::client::CredentialProvider as StoreProvider;

use super::cache::{
    BuildCredentialChain, CloudCredential, CredentialChain, CredentialFuture, FoundCredential,
    MissingCredentials,
};
use super::token_client::TokenClient;
use crate::environment::read_guarded;
use crate::io::transport::Failure;
use crate::sys::clock;

/// Retries are the transport's, so that a caller's limits and interrupts hold.
pub fn without_retries() -> RetryConfig {
    RetryConfig { max_retries: 0, ..RetryConfig::default() }
}

/// A provider of object_store, and the credential that it returns.
type BuiltProvider<T> = (Arc<dyn StoreProvider<Credential = T>>, fn(Arc<T>) -> CloudCredential);

/// Builds a chain of object_store over a client of the transport.
pub struct TokenChain<F> {
    client: TokenClient,
    build: F,
}

impl<F> TokenChain<F> {
    pub fn new<T>(client: TokenClient, build: F) -> Self
    where
        F: Fn(TokenClient) -> object_store::Result<BuiltProvider<T>>,
    {
        TokenChain { client, build }
    }
}

impl<T, F> BuildCredentialChain for TokenChain<F>
where
    T: std::fmt::Debug + Send + Sync + 'static,
    F: Fn(TokenClient) -> object_store::Result<BuiltProvider<T>> + Send + Sync,
{
    fn build(
        &self,
        has_responded: &Arc<AtomicBool>,
    ) -> CredentialFuture<'_, Arc<dyn CredentialChain>> {
        let client = self.client.clone().reporting(has_responded);
        Box::pin(async move {
            let (provider, wrap) =
                read_guarded(|| (self.build)(client)).map_err(missing_credentials)?;
            Ok(Arc::new(TokenProvider { provider, wrap }) as Arc<dyn CredentialChain>)
        })
    }

    fn is_optional(&self) -> bool {
        self.client.may_be_absent()
    }
}

struct TokenProvider<T> {
    provider: Arc<dyn StoreProvider<Credential = T>>,
    wrap: fn(Arc<T>) -> CloudCredential,
}

impl<T: std::fmt::Debug + Send + Sync + 'static> CredentialChain for TokenProvider<T> {
    fn get(&self) -> CredentialFuture<'_, FoundCredential> {
        Box::pin(async {
            let found = self.provider.get_credential().await.map_err(missing_credentials)?;
            // Asked each time: object_store caches tokens, and knows when they expire.
            let renew_at = Some(clock::date());
            Ok(FoundCredential { credential: (self.wrap)(found), expiry: None, renew_at })
        })
    }
}

/// The failure of a chain: permanent where a file or a server says that there are no credentials.
fn missing_credentials(error: object_store::Error) -> MissingCredentials {
    let error: Box<dyn std::error::Error> = error.into();
    let with_context = |failure: Failure| {
        let what = format!("finding credentials: {failure}");
        MissingCredentials::Failed(failure.with_text(what))
    };
    let mut cause = Some(&*error);
    while let Some(found) = cause {
        if let Some(found) = found.downcast_ref::<Failure>() {
            return with_context(found.copy());
        }
        if let Some(found) = found.downcast_ref::<io::Error>() {
            let refused = [ErrorKind::PermissionDenied, ErrorKind::NotFound];
            let permanent = refused.contains(&found.kind());
            let make = if permanent { Failure::permanent } else { Failure::transient };
            return with_context(make(found.kind(), found.to_string()));
        }
        if let Some(found) = found.downcast_ref::<serde_json::Error>() {
            // The text of the error may quote the file.
            let (line, column) = (found.line(), found.column());
            let what = format!(
                "cannot parse the credentials file, or the response of the credential service: \
                 unknown type or invalid JSON, at line {line}, column {column}"
            );
            return with_context(Failure::permanent(ErrorKind::InvalidData, what));
        }
        cause = found.source();
    }
    with_context(Failure::permanent(ErrorKind::PermissionDenied, error.to_string()))
}

/// Chains of a simulated cloud, for tests. They keep a token until five minutes before its end, as
/// those of the clouds do.
#[cfg(test)]
pub mod simulated {
    use std::sync::Mutex;
    use std::time::{Duration, Instant};

    use object_store::azure::AzureCredential;
    use object_store::gcp::GcpCredential;

    use super::*;
    use crate::io::auth::cache::CredentialProvider;
    use crate::io::auth::snapshot::Snapshot;
    use crate::io::auth::token_client::FixedSettings;
    use crate::io::transport::TransportOptions;
    use crate::io::transport::simulated::SimulatedCloud;
    use crate::sys::sync::unpoisoned;

    #[derive(Debug)]
    struct SimulatedTokenProvider<T> {
        server: Arc<SimulatedCloud>,
        make: fn(String) -> T,
        cached: Mutex<Option<(Arc<T>, Instant)>>,
    }

    #[async_trait::async_trait]
    impl<T: std::fmt::Debug + Send + Sync> StoreProvider for SimulatedTokenProvider<T> {
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
        options: &TransportOptions,
        make: fn(String) -> T,
        wrap: fn(Arc<T>) -> CloudCredential,
    ) -> CredentialProvider {
        let name = format!("{} on {:p}", std::any::type_name::<T>(), Arc::as_ptr(server));
        let server = Arc::clone(server);
        let client = TokenClient::new(options, false, FixedSettings::default());
        let chain = TokenChain::new(client, move |_| {
            let server = Arc::clone(&server);
            let provider: Arc<dyn StoreProvider<Credential = T>> =
                Arc::new(SimulatedTokenProvider { server, make, cached: Mutex::default() });
            Ok((provider, wrap))
        });
        CredentialProvider::new(Snapshot::take(name, |_| false, |_| Vec::new()), Arc::new(chain))
    }

    pub fn google(server: &Arc<SimulatedCloud>, options: &TransportOptions) -> CredentialProvider {
        provider(server, options, |bearer| GcpCredential { bearer }, CloudCredential::Google)
    }

    pub fn azure(server: &Arc<SimulatedCloud>, options: &TransportOptions) -> CredentialProvider {
        provider(server, options, AzureCredential::BearerToken, CloudCredential::Azure)
    }
}
