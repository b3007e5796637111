//! The first request for a file: its head, and what the server can do.

use std::cell::Cell;
use std::io::ErrorKind;
use std::sync::Arc;
use std::time::Duration;

use reqwest::StatusCode;

use super::client_pool::{ClientPool, scatter};
use super::fields::ByteRange;
use super::file_url::{FileUrl, RangeRequest};
use super::response::{FirstResponse, parse_first};
use super::validators::Validators;
use crate::cancel::Cancel;
use crate::environment::CACHE_OFFLINE;
use crate::error::{Error, Result};
use crate::io::cache::CacheEntry;
use crate::io::transport::{Client, Failure, Repeat, RequestTarget, RetryBudget, retry};
use crate::io::{CachedHead, OpenOptions};
use crate::mem::Buffers;
use crate::stats::OLDER_COPY;
use crate::sys::{clock, to_usize};

/// Bytes of the first request: prologue and index of files with some thousand tensors.
const HEAD_LEN: u64 = 1 << 20;
/// Time limit for a response where there is a copy that can be used instead.
pub const LIMIT_WITH_COPY: Duration = Duration::from_secs(10);
/// Statuses with which servers refuse every range.
const WITHOUT_RANGES: [u16; 2] = [400, 501];
/// Bytes that are a head, although the connection ended before the rest of it.
const SHORT_HEAD: u64 = 64 << 10;

/// A file after its first request.
pub struct Head {
    /// The location to which redirects have led.
    pub moved: Option<Arc<RequestTarget>>,
    pub first: FirstResponse,
    /// The first bytes of a file of a server with ranges.
    pub bytes: Arc<[u8]>,
    /// The reason why it is read front to back, if the server's ranges are broken.
    pub fallback: Option<String>,
}

impl Head {
    /// The head that was cached, without a request. One that contradicts itself is an error.
    pub fn cached(head: &CachedHead) -> Result<Self> {
        let CachedHead { uri, len, tag, modified, headers, first: bytes } = head.clone();
        if bytes.len() as u64 > len {
            return Err(Error::InvalidArgument(format!(
                "the cached header of `{uri}` is invalid: expected at most the {len} bytes of the \
                 file, found {}",
                bytes.len()
            )));
        }
        let validators = Validators { len: Some(len), tag, modified, is_immutable: false };
        let first = FirstResponse { has_ranges: true, validators, headers, sends_ahead: None };
        Ok(Head { moved: None, first, bytes, fallback: None })
    }
}

/// The head of a file: of its complete copy in the cache if the address names a version, or if the
/// server is not to be asked; else that of its server or, if this fails and may, of the copy.
pub fn find_head(
    (url, clients): (&FileUrl, &ClientPool),
    display_address: &str,
    entry: Option<&CacheEntry>,
    is_version: bool,
    options: &OpenOptions,
    cancel: &dyn Cancel,
) -> Result<Head> {
    let copy = entry.filter(|entry| entry.is_complete());
    let of_copy = |copy: &CacheEntry, why: Option<String>| {
        let (uri, tag) = (display_address.to_owned(), Some(copy.version.tag.clone()));
        let head = CachedHead { uri, len: copy.version.len, tag, ..CachedHead::default() };
        let fallback = why.map(|why| {
            format!("{OLDER_COPY} of `{display_address}` is used, which may not be current: {why}")
        });
        Ok(Head { fallback, ..Head::cached(&head)? })
    };
    let cache = options.cache.as_ref();
    let is_offline = cache.is_some_and(|cache| cache.is_offline);
    match copy {
        Some(copy) if is_version => return of_copy(copy, None),
        Some(copy) if is_offline => {
            return of_copy(copy, Some(format!("{} is set", CACHE_OFFLINE.name)));
        }
        None if is_offline => {
            let what = format!("{} is set, and the cache has no complete copy", CACHE_OFFLINE.name);
            return Err(Error::failed("opening", display_address, ErrorKind::NotFound, what));
        }
        _ => {}
    }
    let copy = copy.filter(|_| cache.is_some_and(|cache| cache.stale_if_error));
    let mut options = options.clone();
    if copy.is_some() {
        options.transport.limit_all(LIMIT_WITH_COPY);
    }
    match (request_head(url, clients, display_address, entry, &options, cancel), copy) {
        (Err(error), Some(copy)) if is_unreachable(&error) => {
            of_copy(copy, Some(error.to_string()))
        }
        (head, _) => head,
    }
}

/// True if there was no response, or that of a server that has failed, unless the reason is an
/// untrusted certificate.
pub fn is_unreachable(error: &Error) -> bool {
    use ErrorKind::{InvalidData, InvalidInput, NotFound, PermissionDenied};
    let others = [PermissionDenied, InvalidInput, InvalidData, NotFound];
    matches!(error, Error::Io { error, .. } if !others.contains(&error.kind()))
}

/// Requests the head of a file. If the server has what is in the cache, only its headers are sent.
fn request_head(
    url: &FileUrl,
    clients: &ClientPool,
    display_address: &str,
    entry: Option<&CacheEntry>,
    options: &OpenOptions,
    cancel: &dyn Cancel,
) -> Result<Head> {
    let budget = RetryBudget::new("reading", display_address, &options.transport, cancel).opening();
    let range = ByteRange { start: 0, end: options.first.unwrap_or(HEAD_LEN) };
    let (is_conditional, was_broken) = (Cell::new(true), Cell::new(false));
    let request = FirstRequest { url, clients, entry, range, is_conditional, was_broken };
    let head = retry::run(&budget, || {
        clients.with_client(&budget, async |client| match request.head(client, &budget).await {
            Err(failure) if request.refuses_ranges(&failure) => {
                request.whole(client, failure.to_string()).await.map_err(|_| failure)
            }
            head => head,
        })
    });
    head.map_err(|error| url.with_host(error))
}

struct FirstRequest<'r> {
    url: &'r FileUrl,
    clients: &'r ClientPool,
    entry: Option<&'r CacheEntry>,
    range: ByteRange,
    /// False once a server has responded 304 for another tag, as servers that compare tags weakly
    /// may do.
    is_conditional: Cell<bool>,
    /// True once an answer was none to a range.
    was_broken: Cell<bool>,
}

impl FirstRequest<'_> {
    async fn head(&self, client: &Client, budget: &RetryBudget<'_>) -> Result<Head, Failure> {
        let range = self.range;
        let entry = self.entry.filter(|_| self.is_conditional.get());
        let if_none_match = entry.map(|entry| &*entry.version.tag);
        let range_request = RangeRequest { if_none_match, ..RangeRequest::range(range) };
        let begun = clock::now();
        let (moved, response) = self.url.request(client, None, range_request).await?;
        self.clients.speed.record_latency(clock::since(begun));
        let status = response.status();
        let mut first = match parse_first(&response, Some(range))? {
            Ok(first) => first,
            Err(what) => {
                let what = format!("the server answered {what} to {}", range.header_value());
                // Only a proxy's answer may be broken once; the refusal of a range is the server's.
                let is_refused = status == StatusCode::RANGE_NOT_SATISFIABLE;
                if self.was_broken.replace(true) || is_refused {
                    return self.whole(client, what).await;
                }
                return Err(Failure::transient(ErrorKind::InvalidData, what));
            }
        };
        let mut bytes = Vec::new();
        if status == StatusCode::NOT_MODIFIED {
            let confirmed =
                first.confirm_copy(entry.map(|entry| (entry.version.len, &*entry.version.tag)));
            self.is_conditional.set(confirmed.is_ok());
            confirmed?;
        } else if first.has_ranges && first.validators.len != Some(0) {
            // Without range support the body is the whole file; after an error it is an error page.
            let (begun, mut done) = (clock::now(), 0);
            let range =
                ByteRange { end: first.validators.len.unwrap_or(0).min(range.end), ..range };
            bytes.resize(to_usize(range.end), 0);
            let mut buffers = Buffers::from_slice(&mut bytes);
            match scatter(response, range, &mut buffers, &mut done, budget).await {
                // Only a proxy's answer may be too long, once.
                Err(failure) if failure.error.kind() == ErrorKind::InvalidData => {
                    return Err(failure.with_repeat(Repeat::Attempts));
                }
                Err(failure) if failure.repeat == Repeat::Never || done < SHORT_HEAD => {
                    return Err(failure);
                }
                _ => bytes.truncate(to_usize(done)),
            }
            self.clients.speed.record_body(done, clock::since(begun));
        }
        Ok(Head { moved, first, bytes: bytes.into(), fallback: None })
    }

    /// True if a failure may be that of the range alone.
    fn refuses_ranges(&self, failure: &Failure) -> bool {
        matches!(self.url, FileUrl::Fixed(_))
            && failure.status.is_some_and(|status| WITHOUT_RANGES.contains(&status))
    }

    /// Requests the whole file, of a server whose ranges are broken.
    async fn whole(&self, client: &Client, what: String) -> Result<Head, Failure> {
        let (moved, response) = self.url.request(client, None, RangeRequest::default()).await?;
        match parse_first(&response, None)? {
            Ok(first) if !first.has_ranges => {
                let fallback = Some(format!("{what}, so the file is read front to back"));
                Ok(Head { moved, first, bytes: Arc::default(), fallback })
            }
            _ => Err(Failure::transient(ErrorKind::InvalidData, what)),
        }
    }
}
