//! `http://` and `https://`: parallel requests for ranges, straight into the caller's memory.

mod cache_key;
mod client_pool;
mod file_url;
pub(crate) mod response;
mod sequential;
mod server_speed;

use std::cell::Cell;
use std::sync::Arc;

use reqwest::Url;
#[cfg(feature = "hf")]
use reqwest::{
    Method, StatusCode,
    header::{HeaderMap, LOCATION},
};

use super::cache::CacheEntry;
use super::{
    CachedHead, Capabilities, Facts, OpenOptions, OpenSibling, ReadAt, RequestChecksum, ServerFile,
    SourceIdentity, StreamSource,
};
use crate::cancel::Cancel;
use crate::error::{Error, Result};
use crate::io::transport::{
    Failure, RequestTarget, RetryBudget, TransportOptions, Trust, retry, show_text,
};
#[cfg(feature = "hf")]
use crate::io::transport::{follow, status_failure};
use crate::mem::Buffers;
use crate::memory_limit::CONNECTION;
use crate::sys::clock;
use crate::sys::fork_safe_mutex::ForkSafeMutex;
use crate::sys::to_usize;
use client_pool::ClientPool;
pub use file_url::FileUrl;
use file_url::RangeRequest;
#[cfg(any(feature = "clouds", feature = "s3"))]
pub use file_url::{Sign, SignFuture};
use response::{ByteRange, FirstResponse, Validators};
use server_speed::DEFAULT_GAP;

/// Bytes of the first request: prologue and index of files with some thousand tensors.
const HEAD_LEN: u64 = 1 << 20;
/// Bytes of a request: at 100 MB/s and 50 ms of latency a fourteenth of its time is latency.
const REQUEST_LEN: u64 = 64 << 20;
/// Initial connections of a load: as many as a server in the same rack can use.
const FIRST_CONNECTIONS: usize = 4;
/// Maximum connections of a load unless the caller sets a number. At 100 MB/s each, they fill a
/// network of 25 Gbit/s.
const MAX_CONNECTIONS: usize = 32;

/// A file of a server with ranges.
pub struct HttpSource {
    facts: Facts,
    url: Arc<FileUrl>,
    /// The location to which redirects have led; it may expire.
    moved: ForkSafeMutex<Option<Arc<RequestTarget>>>,
    clients: Arc<ClientPool>,
    transport: TransportOptions,
    validators: Validators,
    head: Arc<[u8]>,
    /// True if the server sends bytes before they are read, by HTTP/2.
    sends_ahead: bool,
}

/// Opens an address, without a request if the head of its file is cached. A file of a server
/// without ranges is read front to back.
pub fn open(address: &str, options: &OpenOptions, cancel: &dyn Cancel) -> Result<Arc<dyn ReadAt>> {
    let url = Url::parse(address).map_err(|e| {
        Error::InvalidArgument(format!("`{}` is not an address: {e}", show_text(address)))
    })?;
    let display_address = display_url(&url);
    open_as(url, display_address, None, options, cancel)
}

/// Opens an address; messages name it `display_address`.
pub fn open_as(
    url: Url,
    display_address: String,
    hub: Option<HubFile>,
    options: &OpenOptions,
    cancel: &dyn Cancel,
) -> Result<Arc<dyn ReadAt>> {
    let tls = url.scheme() == "https";
    let location = RequestTarget::new(url, options.transport.headers.clone());
    let url = FileUrl::Fixed(Arc::new(location));
    let clients = ClientPool::new(&options.transport, tls).map_err(Error::InvalidArgument)?;
    open_with_clients((url, tls), Arc::new(clients), display_address, hub, options, cancel)
}

/// Opens a URL; `tls` is true for `https://`.
pub fn open_url(
    url: FileUrl,
    tls: bool,
    display_address: String,
    options: &OpenOptions,
    cancel: &dyn Cancel,
) -> Result<Arc<dyn ReadAt>> {
    let clients = ClientPool::new(&options.transport, tls).map_err(Error::InvalidArgument)?;
    open_with_clients((url, tls), Arc::new(clients), display_address, None, options, cancel)
}

/// The requests to a hub about a file.
#[derive(Clone)]
pub struct HubFile {
    /// Opens files of the same commit.
    pub open_sibling: OpenSibling,
    /// Requests the checksum.
    pub checksum: RequestChecksum,
}

/// Opens a URL with clients that may be shared with other files.
fn open_with_clients(
    (url, tls): (FileUrl, bool),
    clients: Arc<ClientPool>,
    display_address: String,
    hub: Option<HubFile>,
    options: &OpenOptions,
    cancel: &dyn Cancel,
) -> Result<Arc<dyn ReadAt>> {
    // Bytes that came without verified certificates must not be used for loads that verify them.
    let cache = options.cache.clone().filter(|_| options.transport.trust != Trust::Anything);
    let cache = cache.zip(url.cache_key());
    // Files may share a display address, so later responses must prove which file it is.
    let cached = options.cached_heads.of(&display_address);
    let cached = cached.filter(|head| head.tag.is_some() || head.modified.is_some());
    let mut entry = None;
    let (moved, first, head) = match cached {
        Some(head) => (None, FirstResponse::cached(head)?, Arc::clone(&head.first)),
        None => {
            entry = cache.as_ref().and_then(|(cache, key)| cache.latest(key));
            request_head(&url, &clients, &display_address, entry.as_ref(), options, cancel)?
        }
    };
    let url = Arc::new(url);
    let (open_sibling, checksum) = match hub {
        Some(HubFile { open_sibling, checksum }) => (open_sibling, Some(checksum)),
        None => (sibling_opener((&url, tls), &clients, &display_address, options), None),
    };
    let server = ServerFile { open_sibling: Some(open_sibling), checksum, ..ServerFile::default() };
    let facts = Facts { uri: display_address, server: Some(server), ..Facts::default() };
    let transport = options.transport.clone();
    if !first.has_ranges {
        let facts = Facts { identity: identity(first.validators.strong_tag()), ..facts };
        let (validators, address) = (first.validators, facts.uri.clone());
        let body = sequential::SequentialBody::new(url, clients, transport, validators, address);
        return Ok(Arc::new(StreamSource::with_facts(body, 0, facts)));
    }
    let sends_ahead = first.sends_ahead.unwrap_or(tls);
    let connection_limit = if sends_ahead { clients.limit() } else { Arc::default() };
    let facts = Facts { connection_limit, ..with_response(facts, &first) };
    let (moved, validators) = (ForkSafeMutex::new(moved), first.validators);
    let stall = transport.stall;
    let source =
        HttpSource { facts, url, moved, clients, transport, validators, head, sends_ahead };
    match cache {
        Some((cache, key)) => cache.wrap(Arc::new(source), &key, entry, stall),
        None => Ok(Arc::new(source)),
    }
}

fn identity(tag: Option<&str>) -> Option<SourceIdentity> {
    tag.map(|tag| SourceIdentity::Tag(tag.to_owned()))
}

/// The facts of a file of a server with ranges.
fn with_response(facts: Facts, first: &FirstResponse) -> Facts {
    let Validators { len, tag, modified } = first.validators.clone();
    let head = len.map(|len| {
        let (uri, headers) = (facts.uri.clone(), first.headers.clone());
        CachedHead { uri, len, tag, modified, headers, first: Arc::default() }
    });
    let identity = identity(head.as_ref().and_then(CachedHead::strong_tag));
    let server = facts.server.map(|server| ServerFile { head, ..server });
    Facts { len, identity, server, ..facts }
}

/// Requests the headers of an address. Refusals, and redirects to other hosts, are responses.
#[cfg(feature = "hf")]
pub fn headers(
    url: Url,
    display_address: &str,
    options: &TransportOptions,
    cancel: &dyn Cancel,
) -> Result<(StatusCode, HeaderMap)> {
    let tls = url.scheme() == "https";
    let clients = ClientPool::new(options, tls).map_err(Error::InvalidArgument)?;
    let from = RequestTarget::new(url, options.headers.clone());
    let leaves_origin = |at: &RequestTarget, headers: &HeaderMap| {
        let to = headers.get(LOCATION).and_then(|to| at.url.join(to.to_str().ok()?).ok());
        to.is_some_and(|to| to.origin() != at.url.origin())
    };
    let budget = RetryBudget::new("asking for", display_address, options, cancel).opening();
    retry::run(&budget, || {
        clients.with_client(&budget, |client| {
            client.run(&budget, async {
                let none = HeaderMap::new();
                let (_, response) =
                    follow(client.client(), Method::HEAD, &from, &none, leaves_origin).await?;
                let (status, headers) = (response.status(), response.headers());
                let failure =
                    status_failure(status, headers, format!("the server answered {status}"));
                if failure.is_transient() { Err(failure) } else { Ok((status, headers.clone())) }
            })
        })
    })
}

/// The location to which redirects have led, the first response, and the first bytes of a file of a
/// server with ranges.
type HeadResponse = (Option<Arc<RequestTarget>>, FirstResponse, Arc<[u8]>);

/// Requests the head of a file. If the server has what is in the cache, only its headers are sent.
fn request_head(
    url: &FileUrl,
    clients: &ClientPool,
    display_address: &str,
    entry: Option<&CacheEntry>,
    options: &OpenOptions,
    cancel: &dyn Cancel,
) -> Result<HeadResponse> {
    let budget = RetryBudget::new("reading", display_address, &options.transport, cancel).opening();
    let range = ByteRange { start: 0, end: options.first.unwrap_or(HEAD_LEN) };
    // False once a server has responded 304 for another tag, as servers that compare tags weakly
    // may do.
    let is_conditional = Cell::new(true);
    let head = retry::run(&budget, || {
        clients.with_client(&budget, |client| {
            client.run(&budget, async {
                let entry = entry.filter(|_| is_conditional.get());
                let if_none_match = entry.map(|entry| &*entry.version().tag);
                let range_request =
                    RangeRequest { if_none_match, ..RangeRequest::range(range.start, range.end) };
                let begun = clock::now();
                let (moved, response) = url.request(client, None, range_request).await?;
                clients.speed().record_latency(clock::since(begun));
                let mut first = response::parse_first(&response, range)?;
                let mut bytes = Vec::new();
                if first.not_modified {
                    let copy = entry.map(CacheEntry::version);
                    let copy = copy.map(|copy| (copy.len, &*copy.tag));
                    let confirmed = first.confirm_copy(copy);
                    is_conditional.set(confirmed.is_ok());
                    confirmed?;
                } else if first.has_ranges && first.validators.len != Some(0) {
                    // Without range support the body is the whole file; after an error it is an
                    // error page.
                    let begun = clock::now();
                    bytes = client.read_body(response, first.len, &budget).await?;
                    clients.speed().record_body(bytes.len() as u64, clock::since(begun));
                }
                Ok((moved, first, bytes.into()))
            })
        })
    });
    head.map_err(|error| url.with_host(error))
}

/// Opens other files in the same folder, in the same way, by the same clients.
fn sibling_opener(
    (url, tls): (&Arc<FileUrl>, bool),
    clients: &Arc<ClientPool>,
    display_address: &str,
    options: &OpenOptions,
) -> OpenSibling {
    let (url, clients) = (Arc::clone(url), Arc::clone(clients));
    let (address, options) = (display_address.to_owned(), options.clone());
    Arc::new(move |name, first, cancel| {
        if url.is_version() {
            return Err(Error::Unsupported(format!(
                "`{address}` is one version of an index of shards, which does not say which \
                 versions of the shards belong to it: open the index without a version, or each \
                 shard with its own"
            )));
        }
        let Some(url) = url.sibling(name) else { return Ok(None) };
        let (path, query) =
            address.split_once('?').map_or((&*address, ""), |(path, _)| (path, "?..."));
        let folder = path.rsplit_once('/').map_or("", |(folder, _)| folder);
        let address = format!("{folder}/{name}{query}");
        let options = OpenOptions { first, ..options.clone() };
        let clients = Arc::clone(&clients);
        open_with_clients((url, tls), clients, address, None, &options, cancel).map(Some)
    })
}

/// The capabilities of servers with ranges.
pub(crate) fn capabilities(options: &TransportOptions) -> Capabilities {
    Capabilities {
        max_readers: options.max_connections,
        initial_readers: options.connections.unwrap_or(FIRST_CONNECTIONS),
        max_auto_readers: options.connections.unwrap_or(MAX_CONNECTIONS),
        request_len: REQUEST_LEN,
        merge_gap: DEFAULT_GAP,
        reader_memory: CONNECTION,
    }
}

/// The address for messages; None if it cannot be parsed.
pub fn display_address(address: &str) -> Option<String> {
    Url::parse(address).ok().map(|url| display_url(&url))
}

fn display_url(url: &Url) -> String {
    let mut url = url.clone();
    let query = url.query().is_some();
    url.set_query(None);
    url.set_fragment(None);
    // Neither can fail for addresses that have a host.
    let _ = url.set_username("");
    let _ = url.set_password(None);
    if query { format!("{url}?...") } else { url.to_string() }
}

impl HttpSource {
    /// Requests a range; `done` is the position after the last byte that arrived.
    fn attempt(
        &self,
        range: ByteRange,
        buffers: &mut Buffers<'_>,
        done: &mut u64,
        budget: &RetryBudget<'_>,
    ) -> Result<(), Failure> {
        let at = self.moved.lock().clone();
        let mut refused = false;
        let outcome = self.clients.with_client(budget, |client| {
            client.run(budget, async {
                let if_match = Some(&self.validators);
                let range_request =
                    RangeRequest { if_match, ..RangeRequest::range(range.start, range.end) };
                let begun = clock::now();
                let (moved, response) =
                    self.url.request(client, at.as_ref(), range_request).await?;
                self.clients.speed().record_latency(clock::since(begun));
                refused = response::may_be_another_file(&response);
                self.validators.check(&response, range)?;
                let begun = clock::now();
                client.scatter(response, range, buffers, done, budget).await?;
                self.clients.speed().record_body(range.end - range.start, clock::since(begun));
                Ok(moved)
            })
        });
        let unchanged = if refused { self.check_file(at.as_ref(), budget) } else { Ok(()) };
        let outcome = unchanged.and(outcome);
        // The location may be a signed URL that has expired: after a failure the first one gives
        // another.
        let moved = outcome.as_ref().map_or(None, Clone::clone);
        *self.moved.lock() = moved;
        outcome.map(drop).map_err(|failure| failure.if_redirected(at.is_some()))
    }

    /// Fails if the server has another file than the one that was opened, and says what differs.
    /// Uses a new connection, because a server may close that of its refusal.
    fn check_file(
        &self,
        at: Option<&Arc<RequestTarget>>,
        budget: &RetryBudget<'_>,
    ) -> Result<(), Failure> {
        let client = self.clients.new_client(budget)?;
        client.run(budget, async {
            let (_, response) = self.url.request(&client, at, RangeRequest::range(0, 1)).await?;
            self.validators.check_first(&response, ByteRange { start: 0, end: 1 })
        })
    }
}

impl ReadAt for HttpSource {
    fn facts(&self) -> &Facts {
        &self.facts
    }

    fn capabilities(&self) -> Capabilities {
        let found = capabilities(&self.transport);
        let sends_ahead = if self.sends_ahead { u64::from(self.clients.window()) } else { 0 };
        let merge_gap = self.clients.speed().merge_gap(found.initial_readers);
        Capabilities { reader_memory: found.reader_memory + sends_ahead, merge_gap, ..found }
    }

    fn read_at(
        &self,
        offset: u64,
        buffers: &mut Buffers<'_>,
        cancel: &dyn Cancel,
    ) -> Result<usize> {
        let len = self.validators.len.unwrap_or(u64::MAX);
        let end = offset.saturating_add(buffers.remaining() as u64).min(len);
        if end <= offset {
            return Ok(0);
        }
        let mut done = offset;
        if let Some(from_head) = self.head.get(to_usize(offset)..) {
            done += buffers.fill_from(from_head) as u64;
        }
        if done < end {
            let budget = RetryBudget::new("reading", &self.facts.uri, &self.transport, cancel);
            let read = retry::run(&budget, || {
                let range = ByteRange { start: done, end };
                let outcome = self.attempt(range, buffers, &mut done, &budget);
                budget.set_position(done);
                outcome
            });
            read.map_err(|error| self.url.with_host(error))?;
        }
        Ok(to_usize(end - offset))
    }
}

#[cfg(test)]
#[cfg(any(feature = "clouds", feature = "s3"))]
mod tests;
