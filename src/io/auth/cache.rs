//! The one cache of credentials. They are kept for the process as long as the variables and files that
//! name them stay the same. They are renewed before they expire, and looked up again when a server
//! refuses them.

use std::future::Future;
use std::io::ErrorKind;
use std::pin::Pin;
use std::sync::atomic::{AtomicBool, Ordering};
use std::sync::{Arc, Mutex};
use std::time::{Duration, Instant, SystemTime};

#[cfg(feature = "s3")]
use aws_credential_types::Credentials as AwsCredentials;
#[cfg(feature = "clouds")]
use object_store::{azure::AzureCredential, gcp::GcpCredential};

use super::snapshot::{PerSnapshot, Snapshot, locked};
use crate::io::transport::{Failure, guarded};
use crate::sys::clock;

/// Credentials are renewed this long before they expire, or when a tenth of their time is left.
pub const RENEWAL_MARGIN: Duration = Duration::from_secs(5 * 60);
/// The shortest pause between two attempts to renew them.
const SHORTEST_PAUSE: Duration = Duration::from_secs(1);
/// Time for which their absence is cached: finding out may take seconds.
const ABSENCE: Duration = Duration::from_secs(60);

/// The time at which credentials, or a signed URL, that expire then are renewed.
pub fn good_until(now: SystemTime, expiry: SystemTime) -> SystemTime {
    let left = expiry.duration_since(now).unwrap_or(Duration::ZERO);
    expiry.checked_sub(RENEWAL_MARGIN.min(left / 10)).unwrap_or(now)
}

/// The time of the next attempt to renew what expires then.
pub fn retry_at(now: SystemTime, expiry: SystemTime) -> SystemTime {
    let left = expiry.duration_since(now).unwrap_or(Duration::ZERO);
    now.checked_add((left / 10).max(SHORTEST_PAUSE)).unwrap_or(now)
}

/// Credentials of a cloud.
#[derive(Clone)]
pub enum Credential {
    #[cfg(feature = "s3")]
    Aws(AwsCredentials),
    #[cfg(feature = "clouds")]
    Google(Arc<GcpCredential>),
    #[cfg(feature = "clouds")]
    Azure(Arc<AzureCredential>),
}

impl Credential {
    /// True if a chain has given the same answer again.
    fn is_same(&self, other: &Credential) -> bool {
        match (self, other) {
            #[cfg(feature = "s3")]
            (Credential::Aws(one), Credential::Aws(other)) => one == other,
            #[cfg(feature = "clouds")]
            (Credential::Google(one), Credential::Google(other)) => Arc::ptr_eq(one, other),
            #[cfg(feature = "clouds")]
            (Credential::Azure(one), Credential::Azure(other)) => Arc::ptr_eq(one, other),
            #[allow(unreachable_patterns)] // With S3 alone there is no other.
            _ => false,
        }
    }
}

/// Credentials that a chain has found.
pub struct FoundCredential {
    pub credential: Credential,
    /// None if they do not expire, or if the chain renews them itself.
    pub expiry: Option<SystemTime>,
    /// The time at which the chain is asked again; None for never.
    pub good_until: Option<SystemTime>,
}

/// Why there are no credentials.
#[derive(Debug)]
pub enum Missing {
    /// Nothing names any: objects are read anonymously.
    Absent,
    /// They could not be obtained.
    Failed(Failure),
}

impl From<Missing> for Failure {
    fn from(missing: Missing) -> Self {
        match missing {
            // Only for a request whose bucket was opened with credentials, which are gone now.
            Missing::Absent => {
                Failure::transient(ErrorKind::PermissionDenied, "no credentials were found")
            }
            Missing::Failed(failure) => failure,
        }
    }
}

/// A future of this module.
pub type Pending<'p, T> = Pin<Box<dyn Future<Output = Result<T, Missing>> + Send + 'p>>;

/// A cloud's chain of places in which credentials are found.
pub trait Chain: Send + Sync {
    fn get(&self) -> Pending<'_, FoundCredential>;
}

/// Builds a chain, which asks no server yet.
pub trait BuildChain: Send + Sync {
    /// `answered` is to be set once a server of credentials has answered.
    fn build(&self, answered: &Arc<AtomicBool>) -> Pending<'_, Arc<dyn Chain>>;

    /// True if failures mean that there are no credentials unless a server of credentials answers:
    /// the machine may have none.
    fn is_optional(&self) -> bool {
        false
    }
}

/// The credentials of one snapshot of the environment.
#[derive(Clone)]
pub struct CredentialProvider {
    snapshot: Arc<Snapshot>,
    builder: Arc<dyn BuildChain>,
    /// True once credentials were found. After that, a failure to get them does not prove that there
    /// are none.
    has_found: Arc<AtomicBool>,
}

/// The cached state of a snapshot.
#[derive(Default)]
struct Slot {
    /// Held while the chain is asked, so that only one thread asks.
    asking: tokio::sync::Mutex<()>,
    state: Mutex<SlotState>,
    /// True once a server of credentials has answered.
    answered: Arc<AtomicBool>,
}

#[derive(Default)]
struct SlotState {
    /// The chain, and when it was built.
    chain: Option<(Arc<dyn Chain>, Instant)>,
    last: Option<Last>,
}

/// The last answer.
struct Last {
    /// None for absent credentials.
    credential: Option<Credential>,
    expiry: Option<SystemTime>,
    good_until: Option<SystemTime>,
    since: Instant,
}

static CACHE: PerSnapshot<Slot> = PerSnapshot::new();

impl CredentialProvider {
    pub fn new(snapshot: Snapshot, builder: Arc<dyn BuildChain>) -> Self {
        CredentialProvider { snapshot: Arc::new(snapshot), builder, has_found: Arc::default() }
    }

    /// The present credentials. While they cannot be renewed, the old ones serve until they expire or
    /// are refused.
    pub async fn get(&self) -> Result<Credential, Missing> {
        let entry = CACHE.of(&self.snapshot);
        if let Some(cached) = entry.cached() {
            return cached;
        }
        let _asking = entry.asking.lock().await;
        if let Some(cached) = entry.cached() {
            return cached;
        }
        let chain = locked(&entry.state).chain.as_ref().map(|(chain, _)| Arc::clone(chain));
        let asked = guarded(async {
            let chain = match chain {
                Some(chain) => chain,
                None => {
                    let chain = self.builder.build(&entry.answered).await?;
                    locked(&entry.state).chain = Some((Arc::clone(&chain), clock::now()));
                    chain
                }
            };
            chain.get().await
        });
        let has_found = self.has_found.load(Ordering::Relaxed);
        let found = match asked.await {
            Ok(found) => {
                self.has_found.store(true, Ordering::Relaxed);
                Ok(found)
            }
            Err(Missing::Absent) if has_found => Err(Missing::Failed(Missing::Absent.into())),
            Err(Missing::Failed(_))
                if self.builder.is_optional() && !has_found && !entry.has_answered() =>
            {
                Err(Missing::Absent)
            }
            missing => missing,
        };
        entry.keep(found)
    }

    /// Forgets the credentials that were used at that time: a server has refused them.
    pub fn refused(&self, used: Instant) {
        CACHE.of(&self.snapshot).refused(used);
    }
}

impl Slot {
    fn has_answered(&self) -> bool {
        self.answered.load(Ordering::Relaxed)
    }

    /// The last answer, while it holds.
    fn cached(&self) -> Option<Result<Credential, Missing>> {
        let state = locked(&self.state);
        let last = state.last.as_ref()?;
        let is_old = last.good_until.is_some_and(|until| clock::date() >= until);
        (!is_old).then(|| last.credential.clone().ok_or(Missing::Absent))
    }

    fn keep(&self, found: Result<FoundCredential, Missing>) -> Result<Credential, Missing> {
        let now = clock::date();
        let mut state = locked(&self.state);
        let before = state.last.take().filter(|last| {
            last.credential.is_some() && last.expiry.is_none_or(|expiry| expiry > now)
        });
        let last = match (found, before) {
            (Ok(FoundCredential { credential, expiry, good_until }), before) => {
                let same = before.filter(|before| {
                    before.credential.as_ref().is_some_and(|old| old.is_same(&credential))
                });
                let since = same.map_or_else(clock::now, |before| before.since);
                Last { credential: Some(credential), expiry, good_until, since }
            }
            (Err(_), Some(old)) => {
                let again = old.expiry.unwrap_or(now);
                Last { good_until: Some(retry_at(now, again)), ..old }
            }
            (Err(Missing::Absent), None) => {
                let good_until = now.checked_add(ABSENCE);
                Last { credential: None, expiry: None, good_until, since: clock::now() }
            }
            (Err(failed), None) => return Err(failed),
        };
        state.last.insert(last).credential.clone().ok_or(Missing::Absent)
    }

    fn refused(&self, used: Instant) {
        let mut state = locked(&self.state);
        // Another thread may have renewed them since.
        state.chain.take_if(|(_, since)| *since <= used);
        state.last.take_if(|last| last.since <= used);
    }
}

#[cfg(test)]
impl CredentialProvider {
    /// Replaces the chain, for tests.
    pub fn use_chain(&self, chain: Arc<dyn Chain>) {
        locked(&CACHE.of(&self.snapshot).state).chain = Some((chain, clock::now()));
    }
}

#[cfg(all(test, feature = "s3"))]
#[allow(clippy::unwrap_used)]
mod tests {
    use super::*;

    fn expiring(name: &str, seconds: i64) -> Result<FoundCredential, Missing> {
        let (now, by) = (SystemTime::now(), Duration::from_secs(seconds.unsigned_abs()));
        let expiry = if seconds < 0 { now - by } else { now + by };
        let credentials = AwsCredentials::new(name, "secret", None, Some(expiry), "test");
        let until = Some(good_until(now, expiry));
        Ok(FoundCredential {
            credential: Credential::Aws(credentials),
            expiry: Some(expiry),
            good_until: until,
        })
    }

    fn failed() -> Result<FoundCredential, Missing> {
        Err(Missing::Failed(Failure::transient(ErrorKind::TimedOut, "no answer")))
    }

    fn name(found: Result<Credential, Missing>) -> Result<String, Missing> {
        match found? {
            Credential::Aws(found) => Ok(found.access_key_id().to_owned()),
            #[cfg(feature = "clouds")]
            _ => panic!("of another cloud"),
        }
    }

    #[test]
    fn credentials_are_renewed_before_they_expire() {
        let now = SystemTime::now();
        let after = |seconds| now + Duration::from_secs(seconds);
        assert_eq!(good_until(now, after(3600)), after(3300));
        assert_eq!(good_until(now, after(100)), after(90));
        assert_eq!(good_until(after(100), now), now);
        // Attempts become more frequent towards the end.
        assert_eq!(retry_at(now, after(300)), after(30));
        assert_eq!(retry_at(now, after(2)), after(1));
        assert_eq!(retry_at(now, now), after(1));
    }

    #[test]
    fn credentials_serve_until_they_expire_or_are_refused() {
        let entry = Slot::default();
        let keep = |found| name(entry.keep(found));
        let cached = || entry.cached().map(name);
        assert!(cached().is_none());
        assert_eq!(keep(expiring("one", 3600)).unwrap(), "one");
        assert_eq!(cached().unwrap().unwrap(), "one");
        // A server of credentials that is away for a moment.
        assert_eq!(keep(failed()).unwrap(), "one");
        // Expired credentials are looked for at once.
        assert_eq!(keep(expiring("two", -1)).unwrap(), "two");
        assert!(cached().is_none());
        assert!(matches!(keep(failed()), Err(Missing::Failed(_))));
        assert!(cached().is_none());
        // Absence is cached for a while.
        assert!(matches!(keep(Err(Missing::Absent)), Err(Missing::Absent)));
        assert!(matches!(cached().unwrap(), Err(Missing::Absent)));
        // Refused credentials are forgotten, unless they are newer than the refused request.
        let used = Instant::now();
        keep(expiring("three", 3600)).unwrap();
        entry.refused(used.checked_sub(Duration::from_secs(1)).unwrap());
        assert!(cached().is_some());
        entry.refused(Instant::now());
        assert!(cached().is_none());
    }

    /// A chain that gives these answers, the last one first.
    struct Scripted(Mutex<Vec<Result<FoundCredential, Missing>>>);

    impl Chain for Scripted {
        fn get(&self) -> Pending<'_, FoundCredential> {
            Box::pin(async { locked(&self.0).pop().unwrap() })
        }
    }

    impl BuildChain for Scripted {
        fn build(&self, _answered: &Arc<AtomicBool>) -> Pending<'_, Arc<dyn Chain>> {
            let answers = std::mem::take(&mut *locked(&self.0));
            Box::pin(async { Ok(Arc::new(Scripted(Mutex::new(answers))) as Arc<dyn Chain>) })
        }
    }

    #[test]
    fn credentials_that_were_found_are_not_absent_later() {
        let answers = vec![expiring("two", 3600), Err(Missing::Absent), expiring("one", -1)];
        let scope = "credentials_that_were_found".to_owned();
        let snapshot = Snapshot::take(scope, |_| false, |_| Vec::new());
        let provider = CredentialProvider::new(snapshot, Arc::new(Scripted(Mutex::new(answers))));
        let runtime = tokio::runtime::Builder::new_current_thread().build().unwrap();
        let get = || name(runtime.block_on(provider.get()));
        assert_eq!(get().unwrap(), "one");
        let Err(Missing::Failed(failure)) = get() else { panic!("absent, and cached") };
        assert!(format!("{failure:?}").contains("transient: true"), "{failure:?}");
        assert_eq!(get().unwrap(), "two");
    }

    #[test]
    #[cfg(feature = "clouds")]
    fn tokens_without_a_known_end_serve_until_they_are_refused() {
        let entry = Slot::default();
        let token = |bearer: &str| {
            let credential =
                Credential::Google(Arc::new(GcpCredential { bearer: bearer.to_owned() }));
            Ok(FoundCredential { credential, expiry: None, good_until: None })
        };
        let bearer = |found| match entry.keep(found) {
            Ok(Credential::Google(found)) => Ok(found.bearer.clone()),
            Ok(_) => panic!("of another cloud"),
            Err(missing) => Err(missing),
        };
        assert!(bearer(failed()).is_err());
        let before = Instant::now();
        assert_eq!(bearer(token("one")).unwrap(), "one");
        assert_eq!(bearer(failed()).unwrap(), "one");
        assert_eq!(bearer(token("two")).unwrap(), "two");
        entry.refused(before);
        assert_eq!(bearer(failed()).unwrap(), "two");
        entry.refused(Instant::now());
        assert!(bearer(failed()).is_err());
    }
}
