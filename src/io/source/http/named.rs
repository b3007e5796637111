//! The address that the caller named: one that stays, or one that is signed, and expires.

use std::future::Future;
use std::pin::Pin;
use std::sync::Arc;
use std::time::{Instant, SystemTime};

use reqwest::header::HeaderMap;
use reqwest::{Response, StatusCode};

use super::client::{OneClient, Target};
use super::reply::{Identity, Range, refusal, says_expired};
use crate::error::Error;
use crate::io::net::{Failure, Tries};
use crate::sys::brief::Brief;
use crate::sys::clock;

/// Bytes of a refusal that are looked at.
const LONGEST_REFUSAL: usize = 16 << 10;

/// Work that a thread does on its event loop.
pub type Work<'w, T> = Pin<Box<dyn Future<Output = Result<T, Failure>> + Send + 'w>>;

/// Signs an address.
pub trait Sign: Send + Sync {
    /// A new signature, and until when it is good.
    fn sign(&self) -> Work<'_, (Target, SystemTime)>;

    /// What was signed with at that time has expired, says a server.
    fn refused(&self, used: Instant);

    /// Whether 401 says that what was signed with has expired, as of tokens.
    fn shows_tokens(&self) -> bool;

    /// What tells its object from all others, without secrets.
    fn name(&self) -> String;

    /// Whether it is one version of its object, and not the latest.
    fn is_version(&self) -> bool {
        false
    }

    /// The server that is asked, for messages. None: they have the address alone.
    fn host(&self) -> Option<String> {
        None
    }

    /// True if a redirect with these fields is an answer, which is not followed.
    fn is_answer(&self, _headers: &HeaderMap) -> bool {
        false
    }

    /// True if these fields, of a refusal from there, say where the object is instead, and the next
    /// signature is for that place.
    fn is_elsewhere(&self, _asked: &Target, _headers: &HeaderMap) -> bool {
        false
    }

    /// The meaning of a refusal. `said` is the beginning of its body.
    fn refusal(&self, status: StatusCode, headers: &HeaderMap, _said: &[u8]) -> Failure {
        refusal(status, headers, format!("the server answered {status}"))
    }

    /// Signs the address of another file in the same folder.
    fn beside(&self, name: &str) -> Box<dyn Sign>;
}

/// The address that the caller named.
pub enum Named {
    /// As it is.
    Fixed(Arc<Target>),
    /// With a signature, which is kept as long as it is good.
    Signed { signer: Box<dyn Sign>, known: Brief<Option<Signed>> },
}

/// A signature, until when it is good, and when it was made.
pub struct Signed {
    target: Arc<Target>,
    until: SystemTime,
    since: Instant,
}

impl Named {
    /// One that is signed when it is used.
    #[cfg(any(feature = "clouds", feature = "s3"))]
    pub fn signed(signer: Box<dyn Sign>) -> Self {
        Named::Signed { signer, known: Brief::new(None) }
    }

    /// The address of another file in the same folder.
    pub fn beside(&self, name: &str) -> Option<Self> {
        Some(match self {
            Named::Fixed(target) => Named::Fixed(Arc::new(target.beside(name)?)),
            Named::Signed { signer, .. } => {
                Named::Signed { signer: signer.beside(name), known: Brief::new(None) }
            }
        })
    }

    /// Whether it is one version of its file, which says nothing of those beside it.
    pub fn is_version(&self) -> bool {
        match self {
            Named::Fixed(target) => target.is_version(),
            Named::Signed { signer, .. } => signer.is_version(),
        }
    }

    /// What tells its file from all others, without secrets; None where a query may do that.
    pub fn name(&self) -> Option<String> {
        match self {
            Named::Fixed(target) => target.name(),
            Named::Signed { signer, .. } => Some(signer.name()),
        }
    }

    /// Names the server that was asked in an error, where the address does not.
    pub fn with_host(&self, error: Error) -> Error {
        let host = match self {
            Named::Fixed(_) => None,
            Named::Signed { signer, .. } => signer.host(),
        };
        match host {
            Some(host) => error.at_host(&host),
            None => error,
        }
    }

    /// Where to ask now, and since when that is good. Signs if there is no signature, or if it is
    /// about to expire.
    async fn target(&self) -> Result<(Arc<Target>, Instant), Failure> {
        let (signer, known) = match self {
            Named::Fixed(target) => return Ok((Arc::clone(target), clock::now())),
            Named::Signed { signer, known } => (signer, known),
        };
        let good = |signed: &&Signed| clock::date() < signed.until;
        if let Some(signed) = known.lock().as_ref().filter(good) {
            return Ok((Arc::clone(&signed.target), signed.since));
        }
        let (target, until) = match signer.sign().await {
            Ok(signed) => signed,
            Err(failure) => {
                // An old one serves as long as the server takes it.
                let old = known.lock().as_ref().map(|old| (Arc::clone(&old.target), old.since));
                return old.filter(|_| !failure.is_given_up()).ok_or(failure);
            }
        };
        // Not before its credentials were found, or they would seem newer than what a server refuses.
        let since = clock::now();
        let target = Arc::new(target);
        *known.lock() = Some(Signed { target: Arc::clone(&target), until, since });
        Ok((target, since))
    }

    /// What was signed at that time has expired, says a server: the next request is signed anew.
    fn refused(&self, used: Instant) {
        if let Named::Signed { signer, known } = self {
            // Another thread may have signed since.
            known.lock().take_if(|signed| signed.since <= used);
            signer.refused(used);
        }
    }

    /// Asks there, or where a redirect has led to. A refusal says whether a signature has expired,
    /// which is not used again then.
    pub async fn ask(
        &self,
        client: &OneClient,
        at: Option<&Arc<Target>>,
        range: Option<Range>,
        opened: Option<&Identity>,
        tries: &Tries<'_>,
    ) -> Result<(Option<Arc<Target>>, Response), Failure> {
        let (from, since) = match at {
            Some(at) => (Arc::clone(at), clock::now()),
            None => self.target().await?,
        };
        let is_answer = |headers: &HeaderMap| match self {
            Named::Fixed(_) => false,
            Named::Signed { signer, .. } => signer.is_answer(headers),
        };
        let (target, mut response) = client.follow(&from, range, opened, is_answer).await?;
        let status = response.status();
        if let Named::Signed { signer, known } = self
            && is_refusal(status)
        {
            let mut said = Vec::new();
            while said.len() < LONGEST_REFUSAL {
                match client.chunk(&mut response, tries).await? {
                    more if more.is_empty() => break,
                    more => said.extend_from_slice(&more),
                }
            }
            let headers = response.headers();
            let failure = signer.refusal(status, headers, &said);
            let expired = says_expired(&said)
                || (status == StatusCode::UNAUTHORIZED && signer.shows_tokens());
            if expired {
                self.refused(since);
            }
            let elsewhere = signer.is_elsewhere(&target, headers);
            if elsewhere {
                known.lock().take();
            }
            return Err(failure.if_renewable(expired || elsewhere));
        }
        // What was named is not kept: its signature expires.
        let moved = if at.is_none() && target == *from { None } else { Some(Arc::new(target)) };
        Ok((moved, response))
    }
}

/// True if the body of an answer says why the server refuses. Those that are about the range, and
/// those that ask to wait, mean the same from all servers.
fn is_refusal(status: StatusCode) -> bool {
    let others = [
        StatusCode::REQUEST_TIMEOUT,
        StatusCode::TOO_MANY_REQUESTS,
        StatusCode::PRECONDITION_FAILED,
        StatusCode::RANGE_NOT_SATISFIABLE,
    ];
    (status.is_redirection() || status.is_client_error()) && !others.contains(&status)
}

#[cfg(test)]
#[cfg(any(feature = "clouds", feature = "s3"))]
#[allow(clippy::unwrap_used)]
mod tests {
    use std::io::ErrorKind;
    use std::sync::atomic::{AtomicU32, Ordering};

    use super::*;

    /// Signs the first and the third time only, for no time at all.
    struct Sometimes(AtomicU32);

    impl Sign for Sometimes {
        fn sign(&self) -> Work<'_, (Target, SystemTime)> {
            let number = self.0.fetch_add(1, Ordering::Relaxed);
            Box::pin(async move {
                if number % 2 == 1 {
                    return Err(Failure::passing(ErrorKind::TimedOut, "nobody answers"));
                }
                let url = format!("http://host/{number}").parse().unwrap();
                Ok((Target::new(url, Vec::new()), SystemTime::now()))
            })
        }

        fn refused(&self, _used: Instant) {}

        fn shows_tokens(&self) -> bool {
            true
        }

        fn name(&self) -> String {
            String::new()
        }

        fn beside(&self, _name: &str) -> Box<dyn Sign> {
            Box::new(Sometimes(AtomicU32::new(0)))
        }
    }

    #[test]
    fn an_old_signature_serves_until_it_is_refused() {
        let named = Named::signed(Box::new(Sometimes(AtomicU32::new(0))));
        let runtime = tokio::runtime::Builder::new_current_thread().build().unwrap();
        let place = || {
            let found = runtime.block_on(named.target());
            found.map(|(target, since)| (target.name().unwrap(), since))
        };
        assert_eq!(place().unwrap().0, "http://host/0?");
        assert_eq!(place().unwrap().0, "http://host/0?");
        let (third, since) = place().unwrap();
        assert_eq!(third, "http://host/2?");
        named.refused(since);
        assert!(place().is_err());
        assert_eq!(place().unwrap().0, "http://host/4?");
    }
}
