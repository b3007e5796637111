//! The first request for a file: its head, and what the server can do.

use std::cell::Cell;
use std::sync::Arc;

use reqwest::StatusCode;

use super::client_pool::{ClientPool, PooledClient};
use super::fields::ByteRange;
use super::file_url::{FileUrl, RangeRequest};
use super::response::{First, FirstResponse, parse_first};
use crate::cancel::Cancel;
use crate::error::Result;
use crate::io::cache::CacheEntry;
use crate::io::transport::{Failure, Repeat, RequestTarget, RetryBudget, retry};
use crate::io::{CachedHead, OpenOptions};
use crate::sys::clock;

/// Bytes of the first request: prologue and index of files with some thousand tensors.
const HEAD_LEN: u64 = 1 << 20;
/// Statuses with which servers refuse every range.
const WITHOUT_RANGES: [u16; 2] = [400, 501];
/// Bytes that are a head, although the connection ended before the rest of it.
const SHORT_HEAD: usize = 64 << 10;

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
    /// The head that was cached, without a request.
    pub fn cached(head: &CachedHead) -> Result<Self> {
        let (first, bytes) = (FirstResponse::cached(head)?, Arc::clone(&head.first));
        Ok(Head { moved: None, first, bytes, fallback: None })
    }
}

/// Requests the head of a file. If the server has what is in the cache, only its headers are sent.
pub fn request_head(
    url: &FileUrl,
    clients: &ClientPool,
    display_address: &str,
    entry: Option<&CacheEntry>,
    options: &OpenOptions,
    cancel: &dyn Cancel,
) -> Result<Head> {
    let budget = RetryBudget::new("reading", display_address, &options.transport, cancel).opening();
    let range = ByteRange { start: 0, end: options.first.unwrap_or(HEAD_LEN) };
    let request = FirstRequest {
        url,
        clients,
        entry,
        range,
        is_conditional: Cell::new(true),
        broken: Cell::new(None),
    };
    let head = retry::run(&budget, || {
        clients.with_client(&budget, |client| {
            client.run(&budget, async {
                match request.head(client, &budget).await {
                    Err(failure) if request.refuses_ranges(&failure) => {
                        let what = failure.to_string();
                        request.whole(client, what).await.map_err(|_| failure)
                    }
                    head => head,
                }
            })
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
    /// The first answer that was none to a range.
    broken: Cell<Option<String>>,
}

impl FirstRequest<'_> {
    async fn head(&self, client: &PooledClient, budget: &RetryBudget<'_>) -> Result<Head, Failure> {
        let entry = self.entry.filter(|_| self.is_conditional.get());
        let if_none_match = entry.map(|entry| &*entry.version.tag);
        let range_request =
            RangeRequest { if_none_match, ..RangeRequest::range(self.range.start, self.range.end) };
        let begun = clock::now();
        let (moved, response) = self.url.request(client, None, range_request).await?;
        self.clients.speed().record_latency(clock::since(begun));
        let mut first = match parse_first(&response, Some(self.range))? {
            First::File(first) => first,
            First::BrokenRanges(what) => {
                let what = format!("the server answered {what} to {}", self.range.header_value());
                // Only a proxy's answer may be broken once; the refusal of a range is the server's.
                let is_refused = response.status() == StatusCode::RANGE_NOT_SATISFIABLE;
                return match self.broken.replace(Some(what.clone())) {
                    None if !is_refused => {
                        Err(Failure::transient(std::io::ErrorKind::InvalidData, what))
                    }
                    _ => self.whole(client, what).await,
                };
            }
        };
        let mut bytes = Vec::new();
        if first.not_modified {
            let copy = entry.map(|entry| (entry.version.len, &*entry.version.tag));
            let confirmed = first.confirm_copy(copy);
            self.is_conditional.set(confirmed.is_ok());
            confirmed?;
        } else if first.has_ranges && first.validators.len != Some(0) {
            // Without range support the body is the whole file; after an error it is an error page.
            let begun = clock::now();
            let read = client.read_body(response, &mut bytes, first.len, budget).await;
            match read {
                Err(failure) if failure.repeat() == Repeat::Never || bytes.len() < SHORT_HEAD => {
                    return Err(failure);
                }
                _ => {}
            }
            self.clients.speed().record_body(bytes.len() as u64, clock::since(begun));
        }
        Ok(Head { moved, first, bytes: bytes.into(), fallback: None })
    }

    /// True if a failure may be that of the range alone.
    fn refuses_ranges(&self, failure: &Failure) -> bool {
        matches!(self.url, FileUrl::Fixed(_))
            && failure.status().is_some_and(|status| WITHOUT_RANGES.contains(&status))
    }

    /// Requests the whole file, of a server whose ranges are broken.
    async fn whole(&self, client: &PooledClient, what: String) -> Result<Head, Failure> {
        let (moved, response) = self.url.request(client, None, RangeRequest::default()).await?;
        match parse_first(&response, None)? {
            First::File(first) if !first.has_ranges => {
                let fallback = Some(format!("{what}, so the file is read front to back"));
                Ok(Head { moved, first, bytes: Arc::default(), fallback })
            }
            _ => Err(Failure::transient(std::io::ErrorKind::InvalidData, what)),
        }
    }
}
