//! Who asks a server: keys that were given, or those that AWS's own chain finds.
//!
//! What the chain finds is kept for the process, as long as its variables and files stay as they
//! are, and is asked for again before it expires. A process that was forked off asks anew.

use std::fmt;
use std::path::PathBuf;
use std::sync::{Arc, Mutex};
use std::time::{Duration, Instant, SystemTime};

use aws_config::imds::region::ImdsRegionProvider;
use aws_config::provider_config::ProviderConfig;
use aws_config::{BehaviorVersion, SdkConfig};
use aws_credential_types::provider::error::CredentialsError;
use aws_credential_types::provider::future;
use aws_sdk_s3::config::{Credentials, ProvideCredentials, Region, SharedCredentialsProvider};

use super::OnDemand;
use crate::io::net::place::{Place, Places, locked};
#[cfg(test)]
use crate::io::net::simulated::Day;
use crate::io::net::{NetOptions, guarded};
use crate::sys::clock;

/// What expires is asked for again so long before, or when a tenth of its time is left.
pub const MARGIN: Duration = Duration::from_secs(5 * 60);
/// How often it is asked for in the end, if it cannot be had.
const SOON: Duration = Duration::from_secs(1);
/// How long it holds that there are no credentials: to find that out may take seconds.
const NONE_HOLDS: Duration = Duration::from_secs(60);

/// When to ask again for what expires.
pub fn good_until(now: SystemTime, expiry: SystemTime) -> SystemTime {
    let left = expiry.duration_since(now).unwrap_or(Duration::ZERO);
    expiry.checked_sub(MARGIN.min(left / 10)).unwrap_or(now)
}

/// When to ask again where what there is serves for want of something newer.
pub fn again(now: SystemTime, expiry: SystemTime) -> SystemTime {
    let left = expiry.duration_since(now).unwrap_or(Duration::ZERO);
    now.checked_add((left / 10).max(SOON)).unwrap_or(now)
}

/// Who asks a server.
#[derive(Debug, Clone)]
pub enum Keys {
    /// The keys of the call, or of its configuration file.
    Given(Credentials),
    /// Whoever the machine is.
    Found(Chain),
}

impl Keys {
    /// The present ones.
    pub async fn get(&self) -> Result<Credentials, CredentialsError> {
        match self {
            Keys::Given(credentials) => Ok(credentials.clone()),
            Keys::Found(chain) => chain.get().await,
        }
    }

    /// A server has refused those that were used at that time, because they have expired.
    pub fn refused(&self, used: Instant) {
        if let Keys::Found(chain) = self {
            chain.known().refused(used);
        }
    }
}

impl ProvideCredentials for Keys {
    fn provide_credentials<'a>(&'a self) -> future::ProvideCredentials<'a>
    where
        Self: 'a,
    {
        future::ProvideCredentials::new(self.get())
    }
}

/// AWS's own chain: environment, shared files and profiles, web identity, roles of the machine.
#[derive(Clone)]
pub struct Chain {
    place: Arc<Place>,
    net: NetOptions,
}

impl fmt::Debug for Chain {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        // The environment may hold secrets.
        f.write_str("Chain")
    }
}

/// What the chain has found.
#[derive(Default)]
struct Known {
    /// Held while it is asked, so that only one does.
    asking: tokio::sync::Mutex<()>,
    found: Mutex<Found>,
    /// With the time at which it was found.
    region: Mutex<Option<(Option<String>, Instant)>>,
}

#[derive(Default)]
struct Found {
    provider: Option<SharedCredentialsProvider>,
    /// With the time until which they are good, if they expire, and when they were found.
    credentials: Option<(Result<Credentials, Nobody>, Option<SystemTime>, Instant)>,
}

const ENVIRONMENT_CHANGED: &str =
    "credentials must be asked for again, and the environment that names them has changed";

/// There are no credentials.
#[derive(Debug, Clone, Copy, thiserror::Error)]
#[error("no credentials were found")]
struct Nobody;

static KNOWN: Places<Known> = Places::new();

/// The variables and files of AWS's chain.
fn place(region: String) -> Place {
    let counts = |name: &[u8]| name == b"HOME" || name.starts_with(b"AWS_");
    Place::now(region, counts, |place| {
        let home = place.variable("HOME").map(PathBuf::from);
        let file = |name: &str, usual: &str| {
            let named = place.variable(name).map(PathBuf::from);
            named.or_else(|| Some(home.as_ref()?.join(".aws").join(usual)))
        };
        let files =
            [file("AWS_CONFIG_FILE", "config"), file("AWS_SHARED_CREDENTIALS_FILE", "credentials")];
        files.into_iter().flatten().collect()
    })
}

/// The settings of environment and profile; asks no server.
pub async fn settings(region: String, net: &NetOptions) -> SdkConfig {
    let loader = aws_config::defaults(BehaviorVersion::latest()).region(Region::new(region));
    loader.http_client(OnDemand::new(net)).load().await
}

impl Chain {
    /// That of the environment as it is now.
    pub fn now(region: String, net: &NetOptions) -> Self {
        Chain { place: Arc::new(place(region)), net: net.clone() }
    }

    fn known(&self) -> Arc<Known> {
        KNOWN.of(&self.place)
    }

    /// The region that a machine of the cloud says it is in.
    pub async fn region(&self) -> Option<String> {
        let known = self.known();
        let _asking = known.asking.lock().await;
        let holds = |(region, since): &(Option<String>, Instant)| {
            region.is_some() || clock::since(*since) < NONE_HOLDS
        };
        let before = locked(&known.region).clone().filter(holds);
        if let Some((region, _)) = before {
            return region;
        }
        let config = ProviderConfig::default().with_http_client(OnDemand::new(&self.net));
        let provider = ImdsRegionProvider::builder().configure(&config).build();
        let region = provider.region().await.map(|region| region.to_string());
        locked(&known.region).insert((region, clock::now())).0.clone()
    }

    async fn get(&self) -> Result<Credentials, CredentialsError> {
        let known = self.known();
        if let Some(found) = known.good() {
            return found;
        }
        let _asking = known.asking.lock().await;
        if let Some(found) = known.good() {
            return found;
        }
        let provider = locked(&known.found).provider.clone();
        let asked = guarded(async {
            let provider = match provider {
                Some(provider) => Some(provider),
                // Of the environment as it is now, which may be that of somebody else since.
                None if !place(String::new()).has_the_variables_of(&self.place) => {
                    return Err(CredentialsError::provider_error(ENVIRONMENT_CHANGED));
                }
                None => {
                    settings(self.place.name().to_owned(), &self.net).await.credentials_provider()
                }
            };
            let provider = provider.ok_or_else(|| CredentialsError::not_loaded(Nobody))?;
            let found = provider.provide_credentials().await;
            Ok((provider, found))
        });
        let (provider, found) = asked.await?;
        known.keep(provider, found)
    }
}

impl Known {
    /// What was found before, and still holds.
    fn good(&self) -> Option<Result<Credentials, CredentialsError>> {
        let found = locked(&self.found);
        let (credentials, until, _) = found.credentials.as_ref()?;
        if until.is_some_and(|until| clock::date() >= until) {
            return None;
        }
        Some(credentials.clone().map_err(CredentialsError::not_loaded))
    }

    /// Takes note of an answer. Where there is none, what was found before serves until it expires.
    fn keep(
        &self,
        provider: SharedCredentialsProvider,
        answer: Result<Credentials, CredentialsError>,
    ) -> Result<Credentials, CredentialsError> {
        let now = clock::date();
        let mut found = locked(&self.found);
        let before = found.credentials.take().and_then(|(before, ..)| before.ok());
        let before = before.filter(|old| old.expiry().is_some_and(|expiry| expiry > now));
        found.provider = Some(provider);
        let (credentials, until): (_, fn(_, _) -> _) = match (answer, before) {
            (Ok(new), _) => (new, good_until),
            (Err(_), Some(old)) => (old, again),
            (Err(error), None) => {
                if matches!(error, CredentialsError::CredentialsNotLoaded(_)) {
                    let until = now.checked_add(NONE_HOLDS);
                    found.credentials = Some((Err(Nobody), until, clock::now()));
                }
                return Err(error);
            }
        };
        let until = credentials.expiry().map(|expiry| until(now, expiry));
        found.credentials = Some((Ok(credentials.clone()), until, clock::now()));
        Ok(credentials)
    }

    fn refused(&self, used: Instant) {
        let mut found = locked(&self.found);
        // Somebody else may have asked again since.
        if found.credentials.as_ref().is_some_and(|(_, _, since)| *since <= used) {
            *found = Found::default();
        }
    }
}

/// Has the chain find those of a simulated day.
#[cfg(test)]
pub fn found_on(day: &Arc<Day>, region: &str, net: &NetOptions) {
    let chain = Chain::now(region.to_owned(), net);
    let provider = SharedCredentialsProvider::new(OfDay(Arc::clone(day)));
    locked(&chain.known().found).provider = Some(provider);
}

#[cfg(test)]
#[derive(Debug)]
struct OfDay(Arc<Day>);

#[cfg(test)]
impl ProvideCredentials for OfDay {
    fn provide_credentials<'a>(&'a self) -> future::ProvideCredentials<'a>
    where
        Self: 'a,
    {
        let given = self.0.give().map(|(name, hold)| {
            Credentials::new(name, "secret", None, clock::date().checked_add(hold), "day")
        });
        let nobody = || CredentialsError::provider_error("nobody is there");
        future::ProvideCredentials::ready(given.ok_or_else(nobody))
    }
}

#[cfg(test)]
#[allow(clippy::unwrap_used)]
mod tests {
    use super::*;

    fn expiring(name: &str, seconds: i64) -> Credentials {
        let (now, by) = (SystemTime::now(), Duration::from_secs(seconds.unsigned_abs()));
        let expiry = if seconds < 0 { now - by } else { now + by };
        Credentials::new(name, "secret", None, Some(expiry), "test")
    }

    #[test]
    fn asked_for_again_before_they_expire() {
        let now = SystemTime::now();
        let after = |seconds| now + Duration::from_secs(seconds);
        assert_eq!(good_until(now, after(3600)), after(3300));
        assert_eq!(good_until(now, after(100)), after(90));
        assert_eq!(good_until(after(100), now), now);
        // Ever more often, if they cannot be had.
        assert_eq!(again(now, after(300)), after(30));
        assert_eq!(again(now, after(2)), after(1));
        assert_eq!(again(now, now), after(1));
    }

    #[test]
    fn what_was_found_serves_until_it_expires() {
        let known = Known::default();
        let keep = |answer| {
            let provider = SharedCredentialsProvider::new(expiring("provider", 1));
            known.keep(provider, answer).map(|found| found.access_key_id().to_owned())
        };
        let failed = || CredentialsError::provider_error("it does not answer");
        let none = || CredentialsError::not_loaded("none");
        assert!(known.good().is_none());
        assert_eq!(keep(Ok(expiring("one", 3600))).unwrap(), "one");
        assert_eq!(known.good().unwrap().unwrap().access_key_id(), "one");
        // Another machine is not there for a moment.
        assert_eq!(keep(Err(failed())).unwrap(), "one");
        // What has expired is asked for again at once.
        assert_eq!(keep(Ok(expiring("two", -1))).unwrap(), "two");
        assert!(known.good().is_none());
        assert!(keep(Err(failed())).is_err());
        assert!(known.good().is_none());
        // That there are none is known for a while.
        assert!(keep(Err(none())).is_err());
        assert!(known.good().unwrap().is_err());
        // What a server refuses is forgotten, unless it is newer.
        let used = Instant::now();
        keep(Ok(expiring("three", 3600))).unwrap();
        known.refused(used.checked_sub(Duration::from_secs(1)).unwrap());
        assert!(known.good().is_some());
        known.refused(Instant::now());
        assert!(known.good().is_none());
    }
}
