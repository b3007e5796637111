//! The URL of a file: a fixed one, or a signed one that expires.

use std::future::Future;
use std::pin::Pin;
use std::sync::Arc;
use std::time::{Instant, SystemTime};

use reqwest::header::{HeaderMap, HeaderValue, IF_MATCH, IF_NONE_MATCH, RANGE};
use reqwest::{Method, Response, StatusCode, Url};

use super::cache_key::{cache_key, is_version};
use super::fields::{ByteRange, is_of_range};
use super::validators::Validators;
use crate::error::Error;
use crate::io::transport::{
    Client, ErrorDocument, Failure, RequestTarget, follow, read_beginning, status_failure,
};
use crate::sys::clock;
use crate::sys::fork_safe_mutex::ForkSafeMutex;

/// A future that a thread runs on its event loop.
pub type SignFuture<'p, T> = Pin<Box<dyn Future<Output = Result<T, Failure>> + Send + 'p>>;

/// A request that a server has refused.
pub struct Refusal<'r> {
    pub url: &'r Url,
    pub status: StatusCode,
    pub headers: &'r HeaderMap,
    pub reason: &'r ErrorDocument,
    /// The time at which its signature was made.
    pub signed: Instant,
}

impl Refusal<'_> {
    /// The failure that it means anywhere.
    pub fn failure(&self) -> Failure {
        let Refusal { status, headers, reason, .. } = self;
        status_failure(*status, headers, format!("the server answered {status}{reason}"))
    }
}

/// Signs the URL of an object.
pub trait Sign: Send + Sync {
    /// Returns a signed URL, and the time until which it is valid.
    fn sign(&self) -> SignFuture<'_, (RequestTarget, SystemTime)>;

    /// The failure that a refusal means. If a new signature may help, the failure is renewable, and
    /// the next signature is made with other credentials, or for another server.
    fn refusal(&self, refused: &Refusal<'_>) -> Failure;

    /// The name of the object in the cache, without secrets.
    fn cache_key(&self) -> String;

    /// True if it is a fixed version of its object.
    fn is_version(&self) -> bool {
        false
    }

    /// The server, for messages; None if the address names it.
    fn host(&self) -> Option<String> {
        None
    }

    /// True if a redirect with these headers is not followed.
    fn is_final(&self, _headers: &HeaderMap) -> bool {
        false
    }

    /// Signs the URL of another file in the same folder.
    fn sibling(&self, name: &str) -> Box<dyn Sign>;
}

/// The URL of a file.
pub enum FileUrl {
    /// The URL that the caller passed.
    Fixed(Arc<RequestTarget>),
    /// A signed URL. A signature is used while it is valid.
    Signed { signer: Box<dyn Sign>, cached: ForkSafeMutex<Option<SignedUrl>> },
}

/// A signed URL.
#[derive(Clone)]
pub struct SignedUrl {
    target: Arc<RequestTarget>,
    renew_at: SystemTime,
    since: Instant,
}

/// The range and the conditions of a request.
#[derive(Debug, Clone, Copy, Default)]
pub struct RangeRequest<'w> {
    /// None for the whole file.
    pub range: Option<ByteRange>,
    /// The file that was opened: another one is refused, if it has a strong `ETag`.
    pub if_match: Option<&'w Validators>,
    /// The `ETag` of a cached copy: the server responds with 304 if the file still has it.
    pub if_none_match: Option<&'w str>,
}

impl RangeRequest<'_> {
    /// A range of a file that was not opened before.
    pub fn range(range: ByteRange) -> Self {
        RangeRequest { range: Some(range), ..RangeRequest::default() }
    }

    fn headers(&self) -> HeaderMap {
        let range = self.range.map(ByteRange::header_value);
        let if_match = self.if_match.and_then(Validators::strong_tag).map(str::to_owned);
        let if_none_match = self.if_none_match.map(str::to_owned);
        let conditions = [(RANGE, range), (IF_MATCH, if_match), (IF_NONE_MATCH, if_none_match)];
        let fields = conditions
            .into_iter()
            .filter_map(|(name, text)| Some((name, HeaderValue::from_str(&text?).ok()?)));
        fields.collect()
    }
}

impl FileUrl {
    /// A URL that is signed when it is used.
    pub fn signed(signer: Box<dyn Sign>) -> Self {
        FileUrl::Signed { signer, cached: ForkSafeMutex::new(None) }
    }

    /// The URL of another file in the same folder.
    pub fn sibling(&self, name: &str) -> Option<Self> {
        Some(match self {
            FileUrl::Fixed(target) => FileUrl::Fixed(Arc::new(target.sibling(name)?)),
            FileUrl::Signed { signer, .. } => FileUrl::signed(signer.sibling(name)),
        })
    }

    /// True if it names one version of its file. Siblings have other versions.
    pub fn is_version(&self) -> bool {
        match self {
            FileUrl::Fixed(target) => is_version(&target.url),
            FileUrl::Signed { signer, .. } => signer.is_version(),
        }
    }

    /// The name of the file in the cache; None where its query may hold secrets.
    pub fn cache_key(&self) -> Option<String> {
        match self {
            FileUrl::Fixed(target) => cache_key(&target.url),
            FileUrl::Signed { signer, .. } => Some(signer.cache_key()),
        }
    }

    /// Adds the server to an error, where the address does not name it.
    pub fn with_host(&self, error: Error) -> Error {
        match self.signer().and_then(Sign::host) {
            Some(host) => error.at_host(&host),
            None => error,
        }
    }

    fn signer(&self) -> Option<&dyn Sign> {
        if let FileUrl::Signed { signer, .. } = self { Some(&**signer) } else { None }
    }

    /// The current location of the file, and the time since which it is valid. Signs it if there is
    /// no signature, or if the signature is about to expire.
    async fn current_target(&self) -> Result<(Arc<RequestTarget>, Instant), Failure> {
        let (signer, cached) = match self {
            FileUrl::Fixed(target) => return Ok((Arc::clone(target), clock::now())),
            FileUrl::Signed { signer, cached } => (signer, cached),
        };
        let old = cached.lock().clone();
        let is_valid = |signed: &&SignedUrl| clock::date() < signed.renew_at;
        if let Some(SignedUrl { target, since, .. }) = old.as_ref().filter(is_valid) {
            return Ok((Arc::clone(target), *since));
        }
        let (target, renew_at) = match signer.sign().await {
            Ok((target, renew_at)) => (Arc::new(target), renew_at),
            Err(failure) => {
                // The old signature is used as long as the server accepts it. Another thread may
                // have found that it does not, or have made one.
                let old = cached.lock().clone().filter(|_| !failure.is_ended());
                return old.map(|old| (old.target, old.since)).ok_or(failure);
            }
        };
        // Taken after the credentials were found, so that they never seem newer than a refusal of
        // them.
        let since = clock::now();
        *cached.lock() = Some(SignedUrl { target: Arc::clone(&target), renew_at, since });
        Ok((target, since))
    }

    /// The failure that a refusal means. A signature that was refused is not used again.
    fn refusal(&self, refused: &Refusal<'_>) -> Failure {
        let FileUrl::Signed { signer, cached } = self else { return refused.failure() };
        let failure = signer.refusal(refused);
        if failure.renewable {
            // Another thread may have signed since.
            cached.lock().take_if(|signed| signed.since <= refused.signed);
        }
        failure
    }

    /// Sends a request to `at`, the target of an earlier redirect, or to the URL itself. Returns
    /// the new location if a redirect was followed.
    pub async fn request(
        &self,
        client: &Client,
        at: Option<&Arc<RequestTarget>>,
        range_request: RangeRequest<'_>,
    ) -> Result<(Option<Arc<RequestTarget>>, Response), Failure> {
        let (from, since) = match at {
            Some(at) => (Arc::clone(at), clock::now()),
            None => self.current_target().await?,
        };
        let is_final = |_: &RequestTarget, headers: &HeaderMap| {
            self.signer().is_some_and(|signer| signer.is_final(headers))
        };
        let headers = range_request.headers();
        let (target, mut response) = follow(client, Method::GET, &from, &headers, is_final).await?;
        let status = response.status();
        // Other statuses are refusals: these have the file, or answer a condition or a range.
        if !(status == StatusCode::NOT_MODIFIED || status.is_success() || is_of_range(status)) {
            let body = read_beginning(&mut response, client.config.stall).await;
            let headers = response.headers();
            let reason = ErrorDocument::read(headers, &body).without(&target.secrets());
            let (url, reason, signed) = (&target.url, &reason, since);
            return Err(self.refusal(&Refusal { url, status, headers, reason, signed }));
        }
        // The caller does not retain the URL itself, because its signature expires.
        let moved = (at.is_some() || target.url != from.url).then(|| Arc::new(target));
        Ok((moved, response))
    }
}

#[cfg(test)]
#[cfg(any(feature = "clouds", feature = "s3"))]
#[allow(clippy::unwrap_used)]
mod tests {
    use std::io::ErrorKind;
    use std::sync::atomic::{AtomicU32, Ordering};

    use super::*;

    /// Signs at the first and third call only; each signature expires at once.
    struct FlakySigner(AtomicU32);

    impl Sign for FlakySigner {
        fn sign(&self) -> SignFuture<'_, (RequestTarget, SystemTime)> {
            let number = self.0.fetch_add(1, Ordering::Relaxed);
            Box::pin(async move {
                if number % 2 == 1 {
                    return Err(Failure::transient(ErrorKind::TimedOut, "no answer"));
                }
                let url = format!("http://host/{number}").parse().unwrap();
                Ok((RequestTarget::new(url, Vec::new()), SystemTime::now()))
            })
        }

        fn refusal(&self, refused: &Refusal<'_>) -> Failure {
            refused.failure().if_renewable(true)
        }

        fn cache_key(&self) -> String {
            String::new()
        }

        fn sibling(&self, _name: &str) -> Box<dyn Sign> {
            Box::new(FlakySigner(AtomicU32::new(0)))
        }
    }

    #[test]
    fn old_signature_is_used_until_it_is_refused() {
        let url = FileUrl::signed(Box::new(FlakySigner(AtomicU32::new(0))));
        let runtime = tokio::runtime::Builder::new_current_thread().build().unwrap();
        let target = || {
            let found = runtime.block_on(url.current_target());
            found.map(|(target, since)| (target.url.to_string(), since))
        };
        assert_eq!(target().unwrap().0, "http://host/0");
        assert_eq!(target().unwrap().0, "http://host/0");
        let (third, since) = target().unwrap();
        assert_eq!(third, "http://host/2");
        let (status, reason) = (StatusCode::FORBIDDEN, &ErrorDocument::default());
        let (of, headers) = ("http://host/2".parse().unwrap(), &HeaderMap::new());
        url.refusal(&Refusal { url: &of, status, headers, reason, signed: since });
        assert!(target().is_err());
        assert_eq!(target().unwrap().0, "http://host/4");
    }
}
