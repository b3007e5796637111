//! Tests of the wrapper of the libraries' providers.

use std::io::ErrorKind;
use std::sync::{Arc, Mutex};
use std::time::{Duration, Instant, SystemTime};

use aws_credential_types::Credentials;
use aws_credential_types::provider::error::CredentialsError;
use aws_credential_types::provider::{self, SharedCredentialsProvider, future};
use aws_sdk_s3::config::ProvideCredentials;

use crate::io::auth::aws::{library, missing_of_aws};
use crate::io::auth::library::{CloudCredential, Found, MissingCredentials};
use crate::io::auth::provider::{
    CredentialProvider, MakingProvider, ProviderState, renew_at, retry_at,
};
use crate::io::transport::Failure;
use crate::sys::sync::unpoisoned;

fn expiring(name: &str, seconds: i64) -> Credentials {
    let (now, by) = (SystemTime::now(), Duration::from_secs(seconds.unsigned_abs()));
    let expiry = if seconds < 0 { now - by } else { now + by };
    Credentials::new(name, "secret", None, Some(expiry), "test")
}

fn found(credentials: Credentials) -> Found {
    let expiry = credentials.expiry();
    Ok((CloudCredential::Aws(credentials), expiry))
}

fn failed() -> Found {
    Err(MissingCredentials::Failed(Failure::transient(ErrorKind::TimedOut, "no answer")))
}

fn name(found: Result<CloudCredential, MissingCredentials>) -> Result<String, MissingCredentials> {
    match found? {
        CloudCredential::Aws(found) => Ok(found.access_key_id().to_owned()),
        #[cfg(feature = "clouds")]
        CloudCredential::Google(found) => Ok(found.bearer.clone()),
        #[cfg(feature = "clouds")]
        CloudCredential::Azure(_) => panic!("of another cloud"),
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
    let state = ProviderState::default();
    let keep = |found| name(state.keep(found));
    let current = || state.current().map(name);
    assert!(current().is_none());
    // Absence is known for a while.
    let absent = || Err(MissingCredentials::Absent);
    assert!(matches!(keep(absent()), Err(MissingCredentials::Absent)));
    assert!(matches!(current().unwrap(), Err(MissingCredentials::Absent)));
    assert_eq!(keep(found(expiring("one", 3600))).unwrap(), "one");
    assert_eq!(current().unwrap().unwrap(), "one");
    // The credential server is temporarily unavailable.
    assert_eq!(keep(failed()).unwrap(), "one");
    // Expired credentials are looked for at once, and are not absent later.
    assert_eq!(keep(found(expiring("two", -1))).unwrap(), "two");
    assert!(current().is_none());
    assert!(matches!(keep(failed()), Err(MissingCredentials::Failed(_))));
    let Err(MissingCredentials::Failed(failure)) = keep(absent()) else { panic!("absent") };
    assert!(format!("{failure:?}").contains("repeat: Attempts"), "{failure:?}");
    assert!(current().is_none());
    // Refused credentials are dropped, unless they are newer than the refused request.
    let used = Instant::now();
    keep(found(expiring("three", 3600))).unwrap();
    state.invalidate(used.checked_sub(Duration::from_secs(1)).unwrap());
    assert!(current().is_some());
    state.invalidate(Instant::now());
    assert!(current().is_none());
}

#[test]
#[cfg(feature = "clouds")]
fn tokens_without_expiry_are_used_until_they_are_refused() {
    let state = ProviderState::default();
    let token = |bearer: &str| {
        let bearer = bearer.to_owned();
        Ok((CloudCredential::Google(Arc::new(object_store::gcp::GcpCredential { bearer })), None))
    };
    let keep = |found| name(state.keep(found));
    assert!(keep(failed()).is_err());
    let before = Instant::now();
    assert_eq!(keep(token("one")).unwrap(), "one");
    assert_eq!(keep(failed()).unwrap(), "one");
    assert_eq!(keep(token("two")).unwrap(), "two");
    state.invalidate(before);
    assert_eq!(keep(failed()).unwrap(), "two");
    state.invalidate(Instant::now());
    assert!(keep(failed()).is_err());
}

/// Counts how often it is made and asked: its credentials are named so.
#[derive(Debug)]
struct Counting {
    made: usize,
    asked: Arc<Mutex<usize>>,
}

impl ProvideCredentials for Counting {
    fn provide_credentials<'a>(&'a self) -> future::ProvideCredentials<'a>
    where
        Self: 'a,
    {
        let mut asked = unpoisoned(self.asked.lock());
        *asked += 1;
        let name = format!("provider {}, question {asked}", self.made);
        let found: provider::Result = Ok(expiring(&name, 3600));
        future::ProvideCredentials::ready(found)
    }
}

#[test]
fn a_refused_credential_has_its_provider_made_anew() {
    let (made, asked) = (Mutex::new(0), Arc::new(Mutex::new(0)));
    let counting = move |made| {
        library(SharedCredentialsProvider::new(Counting { made, asked: Arc::clone(&asked) }))
    };
    let first_of_next = counting(9);
    let make = move || {
        let mut made = unpoisoned(made.lock());
        *made += 1;
        let found = counting(*made);
        Box::pin(async { Ok(found) }) as MakingProvider
    };
    let provider = CredentialProvider::new(make, None);
    let runtime = tokio::runtime::Builder::new_current_thread().build().unwrap();
    let get = || name(runtime.block_on(provider.get())).unwrap();
    let before = Instant::now();
    for _ in 0..3 {
        assert_eq!(get(), "provider 1, question 1");
        provider.invalidate(before);
    }
    provider.invalidate(Instant::now());
    for _ in 0..3 {
        assert_eq!(get(), "provider 2, question 2");
    }
    // A refusal that arrives late, while the next provider is asked.
    let used = Instant::now();
    provider.invalidate(used);
    provider.use_provider(first_of_next);
    provider.invalidate(used);
    assert_eq!(get(), "provider 9, question 3");
}

#[test]
fn absent_credentials_differ_from_an_unavailable_service() {
    let unavailable = missing_of_aws(CredentialsError::provider_error("no answer"));
    let MissingCredentials::Failed(failure) = unavailable else { panic!("absent") };
    assert!(format!("{failure:?}").contains("repeat: Attempts"), "{failure:?}");
    assert!(matches!(
        missing_of_aws(CredentialsError::not_loaded("none")),
        MissingCredentials::Absent
    ));
}
