//! Who asks a server: what a cloud's own chain finds, kept for the process as long as its variables
//! and files stay as they are. The chain itself asks again before something expires.

use std::io::{self, ErrorKind};
use std::sync::atomic::{AtomicBool, Ordering};
use std::sync::{Arc, Mutex};
use std::time::{Duration, Instant};

use object_store::RetryConfig;
use object_store::azure::{AzureCredential, AzureCredentialProvider};
#[cfg(test)]
use object_store::client::CredentialProvider;
use object_store::gcp::{GcpCredential, GcpCredentialProvider};

#[cfg(test)]
use super::connector::Asks;
use super::connector::OnDemand;
#[cfg(test)]
use super::object::Cloud;
use crate::environment::reading;
use crate::io::net::place::{Place, Places, locked};
use crate::io::net::{Failure, guarded};
#[cfg(test)]
use crate::io::net::{NetOptions, simulated::Day};
use crate::sys::clock;

/// How long it holds that a machine is nobody: to find that out may take seconds.
const NONE_HOLDS: Duration = Duration::from_secs(60);

/// What a cloud is told of who asks.
#[derive(Clone)]
pub enum Credential {
    Google(Arc<GcpCredential>),
    Azure(Arc<AzureCredential>),
}

impl Credential {
    /// Whether it is the same answer of a chain.
    fn is(&self, other: &Credential) -> bool {
        match (self, other) {
            (Credential::Google(one), Credential::Google(other)) => Arc::ptr_eq(one, other),
            (Credential::Azure(one), Credential::Azure(other)) => Arc::ptr_eq(one, other),
            _ => false,
        }
    }
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
pub type Build = Arc<dyn Fn(OnDemand) -> object_store::Result<Provider> + Send + Sync>;

/// Who asks.
#[derive(Clone)]
pub struct Keys {
    place: Arc<Place>,
    connector: OnDemand,
    build: Build,
}

/// What is known of a place.
#[derive(Default)]
struct Known {
    /// With the time at which it was made.
    provider: Mutex<Option<(Provider, Instant)>>,
    /// The last credential, and when it was found: it serves where no other is to be had.
    last: Mutex<Option<(Credential, Instant)>>,
    /// A server of tokens has answered.
    somebody: Arc<AtomicBool>,
    /// When a machine was found to be nobody.
    nobody: Mutex<Option<Instant>>,
}

static KNOWN: Places<Known> = Places::new();

/// Requests are tried again here, not there: a caller's limits and Ctrl-C hold.
pub fn once() -> RetryConfig {
    RetryConfig { max_retries: 0, ..RetryConfig::default() }
}

impl Keys {
    pub fn new(place: Place, connector: OnDemand, build: Build) -> Self {
        Keys { place: Arc::new(place), connector, build }
    }

    /// The present ones. If they cannot be had, the last ones serve until a server refuses them.
    pub async fn get(&self) -> Result<Credential, Failure> {
        let known = KNOWN.of(&self.place);
        let asked = match self.provider(&known) {
            Ok(provider) => guarded(provider.get()).await,
            Err(error) => Err(error),
        };
        known.keep(asked)
    }

    /// Whether a machine is somebody: once a server of tokens has answered it stays that.
    pub async fn are_there(&self) -> bool {
        let known = KNOWN.of(&self.place);
        if known.somebody.load(Ordering::Relaxed) {
            return true;
        }
        if locked(&known.nobody).is_some_and(|since| clock::since(since) < NONE_HOLDS) {
            return false;
        }
        let got = self.get().await.is_ok();
        // One that answers and gives none is an error, after all tries of whoever reads.
        let found = got || known.somebody.load(Ordering::Relaxed);
        *locked(&known.nobody) = (!found).then(clock::now);
        found
    }

    /// A server has refused those that were used at that time: they are asked for anew.
    pub fn refused(&self, used: Instant) {
        KNOWN.of(&self.place).refused(used);
    }

    fn provider(&self, known: &Known) -> object_store::Result<Provider> {
        if let Some((provider, _)) = locked(&known.provider).as_ref() {
            return Ok(provider.clone());
        }
        let connector = self.connector.clone().noting(&known.somebody);
        // Without the lock, which whoever holds the guard of the environment may wait for.
        let provider = reading(|| (self.build)(connector))?;
        let mut found = locked(&known.provider);
        Ok(found.get_or_insert_with(|| (provider, clock::now())).0.clone())
    }
}

impl Known {
    /// Takes note of an answer.
    fn keep(&self, answer: object_store::Result<Credential>) -> Result<Credential, Failure> {
        let mut last = locked(&self.last);
        match answer {
            Ok(found) => {
                if !last.as_ref().is_some_and(|(before, _)| before.is(&found)) {
                    *last = Some((found.clone(), clock::now()));
                }
                Ok(found)
            }
            Err(error) => last.as_ref().map(|(old, _)| old.clone()).ok_or_else(|| failure(error)),
        }
    }

    fn refused(&self, used: Instant) {
        // Somebody else may have asked again since.
        locked(&self.provider).take_if(|(_, since)| *since <= used);
        locked(&self.last).take_if(|(_, since)| *since <= used);
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

/// A chain on a simulated day, which keeps a token until five minutes before its end, as those of the
/// clouds do.
#[cfg(test)]
#[derive(Debug)]
struct OfDay<T> {
    day: Arc<Day>,
    make: fn(String) -> T,
    kept: Mutex<Option<(Arc<T>, Instant)>>,
}

#[cfg(test)]
#[async_trait::async_trait]
impl<T: std::fmt::Debug + Send + Sync> CredentialProvider for OfDay<T> {
    type Credential = T;

    async fn get_credential(&self) -> object_store::Result<Arc<T>> {
        let mut kept = locked(&self.kept);
        let soon = clock::now() + Duration::from_secs(300);
        if let Some((token, _)) = kept.as_ref().filter(|(_, expiry)| soon < *expiry) {
            return Ok(Arc::clone(token));
        }
        let nobody = || io::Error::new(ErrorKind::TimedOut, "nobody is there");
        let failed = || object_store::Error::Generic { store: "day", source: Box::new(nobody()) };
        let (name, hold) = self.day.give().ok_or_else(failed)?;
        let token = Arc::new((self.make)(name));
        Ok(Arc::clone(&kept.insert((token, clock::now() + hold)).0))
    }
}

#[cfg(test)]
impl Keys {
    /// Those of a simulated day.
    pub fn on(day: &Arc<Day>, cloud: Cloud, net: &NetOptions) -> Self {
        let (theirs, name) = (Arc::clone(day), format!("{cloud:?} on {:p}", Arc::as_ptr(day)));
        let build = move |_| {
            let day = Arc::clone(&theirs);
            Ok(match cloud {
                Cloud::Google => {
                    let make = |bearer| GcpCredential { bearer };
                    let kept = Mutex::default();
                    Provider::Google(Arc::new(OfDay { day, make, kept }))
                }
                Cloud::Azure => {
                    let make = AzureCredential::BearerToken;
                    let kept = Mutex::default();
                    Provider::Azure(Arc::new(OfDay { day, make, kept }))
                }
            })
        };
        let connector = OnDemand::new(net, false, Asks::default());
        Keys::new(Place::now(name, |_| false, |_| Vec::new()), connector, Arc::new(build))
    }
}

#[cfg(test)]
#[allow(clippy::unwrap_used)]
mod tests {
    use super::*;

    #[test]
    fn the_last_one_serves_until_it_is_refused() {
        let known = Known::default();
        let token = |bearer: &str| {
            Ok(Credential::Google(Arc::new(GcpCredential { bearer: bearer.to_owned() })))
        };
        let failed = || {
            let source = Box::new(io::Error::new(ErrorKind::TimedOut, "it does not answer"));
            Err(object_store::Error::Generic { store: "test", source })
        };
        let bearer = |answer| match known.keep(answer) {
            Ok(Credential::Google(found)) => Ok(found.bearer.clone()),
            Ok(_) => panic!("another cloud's"),
            Err(failure) => Err(failure),
        };
        assert_eq!(bearer(failed()).unwrap_err().error.kind(), ErrorKind::TimedOut);
        let before = Instant::now();
        assert_eq!(bearer(token("one")).unwrap(), "one");
        assert_eq!(bearer(failed()).unwrap(), "one");
        assert_eq!(bearer(token("two")).unwrap(), "two");
        known.refused(before);
        assert_eq!(bearer(failed()).unwrap(), "two");
        known.refused(Instant::now());
        assert!(bearer(failed()).is_err());
    }
}
