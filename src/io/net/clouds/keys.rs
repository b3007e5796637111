//! Who asks a server: what a cloud's own chain finds, kept for the process as long as its variables
//! and files stay as they are. The chain itself asks again before something expires.

use std::io::{self, ErrorKind};
use std::sync::{Arc, Mutex};
use std::time::{Duration, Instant};

use object_store::RetryConfig;
use object_store::azure::{AzureCredential, AzureCredentialProvider};
use object_store::gcp::{GcpCredential, GcpCredentialProvider};

use crate::environment::reading;
use crate::io::net::place::{Place, Places, locked};
use crate::io::net::{Failure, guarded};

/// How long it holds that a machine is nobody: to find that out may take seconds.
const NONE_HOLDS: Duration = Duration::from_secs(60);

/// What a cloud is told of who asks.
pub enum Credential {
    Google(Arc<GcpCredential>),
    Azure(Arc<AzureCredential>),
}

/// A cloud's chain.
#[derive(Clone)]
pub enum Provider {
    Google(GcpCredentialProvider),
    Azure(AzureCredentialProvider),
}

impl Provider {
    async fn get(&self) -> object_store::Result<Credential> {
        Ok(match self {
            Provider::Google(chain) => Credential::Google(chain.get_credential().await?),
            Provider::Azure(chain) => Credential::Azure(chain.get_credential().await?),
        })
    }
}

/// Makes a chain that has asked nobody yet.
pub type Build = Arc<dyn Fn() -> object_store::Result<Provider> + Send + Sync>;

/// Who asks.
#[derive(Clone)]
pub struct Keys {
    place: Arc<Place>,
    build: Build,
}

/// What is known of a place.
#[derive(Default)]
struct Known {
    /// With the time at which it was made.
    provider: Mutex<Option<(Provider, Instant)>>,
    /// When a machine was found to be nobody.
    nobody: Mutex<Option<Instant>>,
}

static KNOWN: Places<Known> = Places::new();

/// Requests are tried again here, not there: a caller's limits and Ctrl-C hold.
pub fn once() -> RetryConfig {
    RetryConfig { max_retries: 0, ..RetryConfig::default() }
}

impl Keys {
    pub fn new(place: Place, build: Build) -> Self {
        Keys { place: Arc::new(place), build }
    }

    /// The present ones.
    pub async fn get(&self) -> Result<Credential, Failure> {
        guarded(self.provider().map_err(failure)?.get()).await.map_err(failure)
    }

    /// Whether a machine is somebody.
    pub async fn are_there(&self) -> bool {
        let known = KNOWN.of(&self.place);
        if locked(&known.nobody).is_some_and(|since| since.elapsed() < NONE_HOLDS) {
            return false;
        }
        let found = self.get().await.is_ok();
        *locked(&known.nobody) = (!found).then(Instant::now);
        found
    }

    /// A server has refused those that were used at that time: they are asked for anew.
    pub fn refused(&self, used: Instant) {
        let known = KNOWN.of(&self.place);
        // Somebody else may have asked again since.
        locked(&known.provider).take_if(|(_, since)| *since <= used);
    }

    fn provider(&self) -> object_store::Result<Provider> {
        let known = KNOWN.of(&self.place);
        if let Some((provider, _)) = locked(&known.provider).as_ref() {
            return Ok(provider.clone());
        }
        // Without the lock, which whoever holds the guard of the environment may wait for.
        let provider = reading(|| (self.build)())?;
        let mut found = locked(&known.provider);
        Ok(found.get_or_insert_with(|| (provider, Instant::now())).0.clone())
    }
}

/// Why there are no credentials, and whether another try may help: not where a file or a server says
/// that there are none.
fn failure(error: object_store::Error) -> Failure {
    let error: Box<dyn std::error::Error> = error.into();
    let mut cause = Some(&*error);
    while let Some(found) = cause {
        if let Some(found) = found.downcast_ref::<io::Error>() {
            let refused = [ErrorKind::PermissionDenied, ErrorKind::NotFound];
            let make =
                if refused.contains(&found.kind()) { Failure::lasting } else { Failure::passing };
            return make(found.kind(), format!("finding credentials: {found}"));
        }
        if let Some(found) = found.downcast_ref::<serde_json::Error>() {
            // Its own words may be those of the file.
            let (line, column) = (found.line(), found.column());
            let what = format!(
                "finding credentials: what says who asks is of a kind that is not known, or not \
                 well-formed, at line {line}, column {column}"
            );
            return Failure::lasting(ErrorKind::InvalidData, what);
        }
        cause = found.source();
    }
    Failure::lasting(ErrorKind::PermissionDenied, format!("finding credentials: {error}"))
}
