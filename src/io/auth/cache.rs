//! The cache of credentials. It keeps them per process while the variables and files that they come
//! from stay the same. Credentials are renewed before they expire, and looked up again when a
//! server refuses them.

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

use super::snapshot::{PerSnapshot, Snapshot};
use crate::io::transport::{Failure, with_guarded_polls};
use crate::sys::clock;
use crate::sys::sync::unpoisoned;

/// Credentials are renewed this long before they expire, or when a tenth of their time is left.
pub const RENEWAL_MARGIN: Duration = Duration::from_secs(5 * 60);
/// The shortest pause between two attempts to renew them.
const SHORTEST_PAUSE: Duration = Duration::from_secs(1);
/// Time for which their absence is cached: finding out may take seconds.
const ABSENCE_CACHED_FOR: Duration = Duration::from_secs(60);

/// The time at which credentials, or a signed URL, that expire then are renewed.
pub fn renew_at(now: SystemTime, expiry: SystemTime) -> SystemTime {
    let remaining = expiry.duration_since(now).unwrap_or(Duration::ZERO);
    expiry.checked_sub(RENEWAL_MARGIN.min(remaining / 10)).unwrap_or(now)
}

/// The time of the next attempt to renew what expires then.
pub fn retry_at(now: SystemTime, expiry: SystemTime) -> SystemTime {
    let remaining = expiry.duration_since(now).unwrap_or(Duration::ZERO);
    now.checked_add((remaining / 10).max(SHORTEST_PAUSE)).unwrap_or(now)
}

/// Credentials of a cloud.
#[derive(Clone)]
pub enum CloudCredential {
    #[cfg(feature = "s3")]
    Aws(AwsCredentials),
    #[cfg(feature = "clouds")]
    Google(Arc<GcpCredential>),
    #[cfg(feature = "clouds")]
    Azure(Arc<AzureCredential>),
}

impl CloudCredential {
    /// True if a chain has returned the same credential again.
    fn is_same(&self, other: &CloudCredential) -> bool {
        match (self, other) {
            #[cfg(feature = "s3")]
            (CloudCredential::Aws(one), CloudCredential::Aws(other)) => one == other,
            #[cfg(feature = "clouds")]
            (CloudCredential::Google(one), CloudCredential::Google(other)) => {
                Arc::ptr_eq(one, other)
            }
            #[cfg(feature = "clouds")]
            (CloudCredential::Azure(one), CloudCredential::Azure(other)) => Arc::ptr_eq(one, other),
            #[allow(unreachable_patterns)] // With S3 alone there is no other.
            _ => false,
        }
    }
}

/// Credentials that a chain has found.
pub struct FoundCredential {
    pub credential: CloudCredential,
    /// None if they do not expire, or if the chain renews them itself.
    pub expiry: Option<SystemTime>,
    /// The time at which the chain is asked again; None for never.
    pub renew_at: Option<SystemTime>,
}

/// Why there are no credentials.
#[derive(Debug)]
pub enum MissingCredentials {
    /// No credentials are configured: objects are read anonymously.
    Absent,
    /// They could not be obtained.
    Failed(Failure),
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

/// A future of this module.
pub type CredentialFuture<'p, T> =
    Pin<Box<dyn Future<Output = Result<T, MissingCredentials>> + Send + 'p>>;

/// A cloud's credential chain, which searches several sources in order.
pub trait CredentialChain: Send + Sync {
    fn get(&self) -> CredentialFuture<'_, FoundCredential>;
}

/// Builds a credential chain without contacting a server.
pub trait BuildCredentialChain: Send + Sync {
    /// The chain sets `has_responded` once a credential server has responded.
    fn build(
        &self,
        has_responded: &Arc<AtomicBool>,
    ) -> CredentialFuture<'_, Arc<dyn CredentialChain>>;

    /// True if the machine may have no credentials. Until a credential server has responded,
    /// failures then mean that there are none.
    fn is_optional(&self) -> bool {
        false
    }
}

/// The credentials of one snapshot of the environment.
#[derive(Clone)]
pub struct CredentialProvider {
    snapshot: Arc<Snapshot>,
    builder: Arc<dyn BuildCredentialChain>,
    /// True once credentials were found. After that, a failure to get them does not prove that
    /// there are none.
    has_found: Arc<AtomicBool>,
}

/// The cached state of a snapshot.
#[derive(Default)]
struct CredentialSlot {
    /// Held during a lookup, so that only one thread runs it.
    asking: tokio::sync::Mutex<()>,
    state: Mutex<CredentialSlotState>,
    /// True once a credential server has responded.
    has_responded: Arc<AtomicBool>,
}

#[derive(Default)]
struct CredentialSlotState {
    /// The chain, and when it was built.
    chain: Option<(Arc<dyn CredentialChain>, Instant)>,
    last: Option<LastResult>,
}

/// The last result.
struct LastResult {
    /// None for absent credentials.
    credential: Option<CloudCredential>,
    expiry: Option<SystemTime>,
    renew_at: Option<SystemTime>,
    since: Instant,
}

static CACHE: PerSnapshot<CredentialSlot> = PerSnapshot::new();

impl CredentialProvider {
    pub fn new(snapshot: Snapshot, builder: Arc<dyn BuildCredentialChain>) -> Self {
        CredentialProvider { snapshot: Arc::new(snapshot), builder, has_found: Arc::default() }
    }

    /// The current credentials. If renewal fails, the old credentials are used until they expire or
    /// are refused.
    pub async fn get(&self) -> Result<CloudCredential, MissingCredentials> {
        let entry = CACHE.get(&self.snapshot);
        if let Some(cached) = entry.cached() {
            return cached;
        }
        let _asking = entry.asking.lock().await;
        if let Some(cached) = entry.cached() {
            return cached;
        }
        let chain =
            unpoisoned(entry.state.lock()).chain.as_ref().map(|(chain, _)| Arc::clone(chain));
        let asked = with_guarded_polls(async {
            let chain = match chain {
                Some(chain) => chain,
                None => {
                    let chain = self.builder.build(&entry.has_responded).await?;
                    unpoisoned(entry.state.lock()).chain = Some((Arc::clone(&chain), clock::now()));
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
            Err(MissingCredentials::Absent) if has_found => {
                Err(MissingCredentials::Failed(MissingCredentials::Absent.into()))
            }
            Err(MissingCredentials::Failed(_))
                if self.builder.is_optional() && !has_found && !entry.has_responded() =>
            {
                Err(MissingCredentials::Absent)
            }
            missing => missing,
        };
        entry.store(found)
    }

    /// Removes the credentials that were in use at that time, because a server has refused them.
    pub fn invalidate(&self, used: Instant) {
        CACHE.get(&self.snapshot).invalidate(used);
    }
}

impl CredentialSlot {
    fn has_responded(&self) -> bool {
        self.has_responded.load(Ordering::Relaxed)
    }

    /// The last result, while it is valid.
    fn cached(&self) -> Option<Result<CloudCredential, MissingCredentials>> {
        let state = unpoisoned(self.state.lock());
        let last = state.last.as_ref()?;
        let is_old = last.renew_at.is_some_and(|until| clock::date() >= until);
        (!is_old).then(|| last.credential.clone().ok_or(MissingCredentials::Absent))
    }

    fn store(
        &self,
        found: Result<FoundCredential, MissingCredentials>,
    ) -> Result<CloudCredential, MissingCredentials> {
        let now = clock::date();
        let mut state = unpoisoned(self.state.lock());
        let before = state.last.take().filter(|last| {
            last.credential.is_some() && last.expiry.is_none_or(|expiry| expiry > now)
        });
        let last = match (found, before) {
            (Ok(FoundCredential { credential, expiry, renew_at }), before) => {
                let same = before.filter(|before| {
                    before.credential.as_ref().is_some_and(|old| old.is_same(&credential))
                });
                let since = same.map_or_else(clock::now, |before| before.since);
                LastResult { credential: Some(credential), expiry, renew_at, since }
            }
            (Err(_), Some(old)) => {
                let expiry = old.expiry.unwrap_or(now);
                LastResult { renew_at: Some(retry_at(now, expiry)), ..old }
            }
            (Err(MissingCredentials::Absent), None) => {
                let renew_at = now.checked_add(ABSENCE_CACHED_FOR);
                LastResult { credential: None, expiry: None, renew_at, since: clock::now() }
            }
            (Err(failed), None) => return Err(failed),
        };
        state.last.insert(last).credential.clone().ok_or(MissingCredentials::Absent)
    }

    fn invalidate(&self, used: Instant) {
        let mut state = unpoisoned(self.state.lock());
        // Another thread may have renewed them since.
        state.chain.take_if(|(_, since)| *since <= used);
        state.last.take_if(|last| last.since <= used);
    }
}

#[cfg(test)]
impl CredentialProvider {
    /// Replaces the chain, for tests.
    pub fn use_chain(&self, chain: Arc<dyn CredentialChain>) {
        unpoisoned(CACHE.get(&self.snapshot).state.lock()).chain = Some((chain, clock::now()));
    }
}

#[cfg(all(test, feature = "s3"))]
#[allow(clippy::unwrap_used)]
mod tests {
    use super::*;

    fn expiring(name: &str, seconds: i64) -> Result<FoundCredential, MissingCredentials> {
        let (now, by) = (SystemTime::now(), Duration::from_secs(seconds.unsigned_abs()));
        let expiry = if seconds < 0 { now - by } else { now + by };
        let credentials = AwsCredentials::new(name, "secret", None, Some(expiry), "test");
        let until = Some(renew_at(now, expiry));
        Ok(FoundCredential {
            credential: CloudCredential::Aws(credentials),
            expiry: Some(expiry),
            renew_at: until,
        })
    }

    fn failed() -> Result<FoundCredential, MissingCredentials> {
        Err(MissingCredentials::Failed(Failure::transient(ErrorKind::TimedOut, "no answer")))
    }

    fn name(
        found: Result<CloudCredential, MissingCredentials>,
    ) -> Result<String, MissingCredentials> {
        match found? {
            CloudCredential::Aws(found) => Ok(found.access_key_id().to_owned()),
            #[cfg(feature = "clouds")]
            _ => panic!("of another cloud"),
        }
    }

    #[test]
    fn credentials_are_renewed_before_they_expire() {
        let now = SystemTime::now();
        let after = |seconds| now + Duration::from_secs(seconds);
        assert_eq!(renew_at(now, after(3600)), after(3300));
        assert_eq!(renew_at(now, after(100)), after(90));
        assert_eq!(renew_at(after(100), now), now);
        // Attempts become more frequent towards the end.
        assert_eq!(retry_at(now, after(300)), after(30));
        assert_eq!(retry_at(now, after(2)), after(1));
        assert_eq!(retry_at(now, now), after(1));
    }

    #[test]
    fn credentials_are_used_until_they_expire_or_are_refused() {
        let entry = CredentialSlot::default();
        let store = |found| name(entry.store(found));
        let cached = || entry.cached().map(name);
        assert!(cached().is_none());
        assert_eq!(store(expiring("one", 3600)).unwrap(), "one");
        assert_eq!(cached().unwrap().unwrap(), "one");
        // The credential server is temporarily unavailable.
        assert_eq!(store(failed()).unwrap(), "one");
        // Expired credentials are looked for at once.
        assert_eq!(store(expiring("two", -1)).unwrap(), "two");
        assert!(cached().is_none());
        assert!(matches!(store(failed()), Err(MissingCredentials::Failed(_))));
        assert!(cached().is_none());
        // Absence is cached for a while.
        assert!(matches!(store(Err(MissingCredentials::Absent)), Err(MissingCredentials::Absent)));
        assert!(matches!(cached().unwrap(), Err(MissingCredentials::Absent)));
        // Refused credentials are forgotten, unless they are newer than the refused request.
        let used = Instant::now();
        store(expiring("three", 3600)).unwrap();
        entry.invalidate(used.checked_sub(Duration::from_secs(1)).unwrap());
        assert!(cached().is_some());
        entry.invalidate(Instant::now());
        assert!(cached().is_none());
    }

    /// A chain that returns these results, the last one first.
    struct ScriptedChain(Mutex<Vec<Result<FoundCredential, MissingCredentials>>>);

    impl CredentialChain for ScriptedChain {
        fn get(&self) -> CredentialFuture<'_, FoundCredential> {
            Box::pin(async { unpoisoned(self.0.lock()).pop().unwrap() })
        }
    }

    impl BuildCredentialChain for ScriptedChain {
        fn build(
            &self,
            _answered: &Arc<AtomicBool>,
        ) -> CredentialFuture<'_, Arc<dyn CredentialChain>> {
            let results = std::mem::take(&mut *unpoisoned(self.0.lock()));
            Box::pin(async {
                Ok(Arc::new(ScriptedChain(Mutex::new(results))) as Arc<dyn CredentialChain>)
            })
        }
    }

    #[test]
    fn credentials_that_were_found_are_not_absent_later() {
        let results =
            vec![expiring("two", 3600), Err(MissingCredentials::Absent), expiring("one", -1)];
        let scope = "credentials_that_were_found".to_owned();
        let snapshot = Snapshot::take(scope, |_| false, |_| Vec::new());
        let provider =
            CredentialProvider::new(snapshot, Arc::new(ScriptedChain(Mutex::new(results))));
        let runtime = tokio::runtime::Builder::new_current_thread().build().unwrap();
        let get = || name(runtime.block_on(provider.get()));
        assert_eq!(get().unwrap(), "one");
        let Err(MissingCredentials::Failed(failure)) = get() else { panic!("absent, and cached") };
        assert!(format!("{failure:?}").contains("repeat: Attempts"), "{failure:?}");
        assert_eq!(get().unwrap(), "two");
    }

    #[test]
    #[cfg(feature = "clouds")]
    fn tokens_without_expiry_are_used_until_they_are_refused() {
        let entry = CredentialSlot::default();
        let token = |bearer: &str| {
            let credential =
                CloudCredential::Google(Arc::new(GcpCredential { bearer: bearer.to_owned() }));
            Ok(FoundCredential { credential, expiry: None, renew_at: None })
        };
        let bearer = |found| match entry.store(found) {
            Ok(CloudCredential::Google(found)) => Ok(found.bearer.clone()),
            Ok(_) => panic!("of another cloud"),
            Err(missing) => Err(missing),
        };
        assert!(bearer(failed()).is_err());
        let before = Instant::now();
        assert_eq!(bearer(token("one")).unwrap(), "one");
        assert_eq!(bearer(failed()).unwrap(), "one");
        assert_eq!(bearer(token("two")).unwrap(), "two");
        entry.invalidate(before);
        assert_eq!(bearer(failed()).unwrap(), "two");
        entry.invalidate(Instant::now());
        assert!(bearer(failed()).is_err());
    }
}
