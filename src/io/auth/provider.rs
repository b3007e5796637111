//! The one wrapper of the libraries' credential providers. It makes a provider when one is needed,
//! and anew after `fork` and after a server has refused its credential. While a provider fails, its
//! last credential is used until it expires or is refused.

use std::fmt;
use std::sync::atomic::{AtomicBool, Ordering};
use std::sync::{Arc, Mutex};
use std::time::{Duration, Instant, SystemTime};

use super::library::{Asking, CloudCredential, Found, LibraryProvider, MissingCredentials};
use crate::io::transport::with_guarded_polls;
use crate::sys::clock;
use crate::sys::process::PerProcess;
use crate::sys::sync::unpoisoned;

/// Credentials are renewed this long before they expire, or when a tenth of their time is left.
const RENEWAL_MARGIN: Duration = Duration::from_secs(5 * 60);
/// The shortest pause between two attempts to renew them.
const SHORTEST_PAUSE: Duration = Duration::from_secs(1);
/// Time for which their absence is known: finding out may take seconds.
const ABSENCE_KNOWN_FOR: Duration = Duration::from_secs(60);

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

/// The making of a library's provider.
pub type MakingProvider = Asking<Result<LibraryProvider, MissingCredentials>>;

/// The credentials of some settings.
pub struct CredentialProvider {
    make: Box<dyn Fn() -> MakingProvider + Send + Sync>,
    /// Set once a service of this machine has responded. Until then, its failures mean that the
    /// machine has no credentials. None if credentials are configured.
    has_responded: Option<Arc<AtomicBool>>,
    state: PerProcess<ProviderState>,
}

#[derive(Default)]
pub struct ProviderState {
    /// Held while the library is asked, so that only one thread asks.
    asking: tokio::sync::Mutex<()>,
    known: Mutex<Known>,
}

#[derive(Default)]
struct Known {
    /// The provider, and the time at which it was made.
    provider: Option<(LibraryProvider, Instant)>,
    last: Option<LastCredential>,
    /// True once there were credentials. After that, a failure to get them does not prove that
    /// there are none.
    has_found: bool,
}

/// The last credential.
struct LastCredential {
    /// None if there are no credentials.
    credential: Option<CloudCredential>,
    expiry: Option<SystemTime>,
    /// The time at which the library is asked again; None for never.
    ask_at: Option<SystemTime>,
    since: Instant,
}

impl CredentialProvider {
    /// Credentials of the provider that `make` makes.
    pub fn new(
        make: impl Fn() -> MakingProvider + Send + Sync + 'static,
        has_responded: Option<Arc<AtomicBool>>,
    ) -> Self {
        CredentialProvider { make: Box::new(make), has_responded, state: PerProcess::new() }
    }

    /// The current credentials.
    pub async fn get(&self) -> Result<CloudCredential, MissingCredentials> {
        let state = self.state.get();
        if let Some(known) = state.current() {
            return known;
        }
        let _asking = state.asking.lock().await;
        if let Some(known) = state.current() {
            return known;
        }
        let found = with_guarded_polls(self.ask(state)).await;
        let responded = self.has_responded.as_ref().is_none_or(|it| it.load(Ordering::Relaxed));
        state.keep(found.map_err(|why| if responded { why } else { MissingCredentials::Absent }))
    }

    /// The time until which the last credential is used without a question to the library.
    #[cfg(feature = "s3")]
    pub fn used_until(&self) -> Option<SystemTime> {
        unpoisoned(self.state.get().known.lock()).last.as_ref()?.ask_at
    }

    /// Asks the library.
    async fn ask(&self, state: &ProviderState) -> Found {
        let made = unpoisoned(state.known.lock()).provider.clone();
        let provider = match made {
            Some((provider, _)) => provider,
            None => {
                let made = (self.make)().await?;
                let made = (made, clock::now());
                unpoisoned(state.known.lock()).provider.insert(made).0.clone()
            }
        };
        provider().await
    }

    /// Drops the credentials that were in use at that time, because a server has refused them, and
    /// their provider, which may have cached them.
    pub fn invalidate(&self, used: Instant) {
        self.state.get().invalidate(used);
    }
}

impl fmt::Debug for CredentialProvider {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        // The environment may hold secrets.
        f.write_str("CredentialProvider")
    }
}

impl ProviderState {
    /// The last credential, while the library need not be asked.
    pub fn current(&self) -> Option<Result<CloudCredential, MissingCredentials>> {
        let known = unpoisoned(self.known.lock());
        let last = known.last.as_ref()?;
        let is_old = last.ask_at.is_some_and(|at| clock::date() >= at);
        (!is_old).then(|| last.credential.clone().ok_or(MissingCredentials::Absent))
    }

    /// Keeps what the library has found, or else the last credential while it is valid.
    pub fn keep(&self, found: Found) -> Result<CloudCredential, MissingCredentials> {
        let now = clock::date();
        let mut known = unpoisoned(self.known.lock());
        let valid = known.last.take().filter(|last| {
            last.credential.is_some() && last.expiry.is_none_or(|expiry| expiry > now)
        });
        let last = match (found, valid) {
            (Ok((credential, expiry)), valid) => {
                known.has_found = true;
                let is_same = |last: &LastCredential| last.credential.as_ref() == Some(&credential);
                let since = valid.filter(is_same).map_or_else(clock::now, |last| last.since);
                let ask_at = match expiry {
                    _ if credential.is_kept_by_library() => Some(now),
                    expiry => expiry.map(|expiry| renew_at(now, expiry)),
                };
                LastCredential { credential: Some(credential), expiry, ask_at, since }
            }
            (Err(_), Some(last)) => {
                let ask_at = Some(retry_at(now, last.expiry.unwrap_or(now)));
                LastCredential { ask_at, ..last }
            }
            (Err(MissingCredentials::Absent), None) if !known.has_found => {
                let ask_at = now.checked_add(ABSENCE_KNOWN_FOR);
                LastCredential { credential: None, expiry: None, ask_at, since: clock::now() }
            }
            (Err(missing), None) => return Err(MissingCredentials::Failed(missing.into())),
        };
        known.last.insert(last).credential.clone().ok_or(MissingCredentials::Absent)
    }

    pub fn invalidate(&self, used: Instant) {
        let mut known = unpoisoned(self.known.lock());
        // Another thread may have renewed them since.
        if known.last.as_ref().is_none_or(|last| last.since <= used) {
            known.last = None;
            known.provider.take_if(|(_, made)| *made <= used);
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    impl CredentialProvider {
        /// Replaces the provider of the library.
        pub fn use_provider(&self, provider: LibraryProvider) {
            unpoisoned(self.state.get().known.lock()).provider = Some((provider, clock::now()));
        }
    }
}
