//! `http://` and `https://`: parallel requests for ranges, straight into the caller's memory.

mod cache_key;
mod client_pool;
pub(crate) mod fields;
mod file_url;
mod first_request;
pub(crate) mod response;
mod sequential;
mod server_speed;
mod source;
mod turns;
mod validators;

use std::sync::Arc;
use std::sync::atomic::AtomicBool;

use reqwest::Url;
#[cfg(feature = "hf")]
use reqwest::{
    Method, StatusCode,
    header::{HeaderMap, LOCATION},
};

use super::{
    CachedHead, Facts, OpenOptions, OpenSibling, ReadAt, RequestChecksum, ServerFile,
    SourceIdentity, StreamSource,
};
use crate::cancel::Cancel;
use crate::error::{Error, Result};
#[cfg(feature = "hf")]
use crate::io::transport::{Repeat, RetryBudget, follow, retry, status_failure};
use crate::io::transport::{RequestTarget, TransportOptions, Trust, show_text};
use crate::sys::fork_safe_mutex::ForkSafeMutex;
use client_pool::ClientPool;
pub use file_url::FileUrl;
#[cfg(any(feature = "clouds", feature = "s3"))]
pub use file_url::{Refusal, Sign, SignFuture};
use first_request::{Head, request_head};
use response::FirstResponse;
use source::HttpSource;
#[cfg(test)]
pub(crate) use source::capabilities;
use validators::Validators;

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
    let cached = options.cached_heads.get(&display_address);
    let cached = cached.filter(|head| head.tag.is_some() || head.modified.is_some());
    let mut entry = None;
    let found = match cached {
        Some(head) => Head::cached(head)?,
        None => {
            entry = cache.as_ref().and_then(|(cache, key)| cache.latest(key));
            request_head(&url, &clients, &display_address, entry.as_ref(), options, cancel)?
        }
    };
    let Head { moved, mut first, bytes: head, fallback } = found;
    first.validators.is_immutable = hub.is_some();
    let url = Arc::new(url);
    let by_name = || sibling_opener((&url, tls), &clients, &display_address, options);
    let fallback = Arc::new(ForkSafeMutex::new(fallback));
    let server = ServerFile { fallback, ..server_file(hub, by_name) };
    let facts = Facts { uri: display_address, server: Some(server), ..Facts::default() };
    let (facts, transport) = (with_response(facts, &first), options.transport.clone());
    if !first.has_ranges {
        let (validators, address) = (first.validators, facts.uri.clone());
        let body = sequential::SequentialBody::new(url, clients, transport, validators, address);
        return Ok(Arc::new(StreamSource::with_facts(body, 0, facts)));
    }
    let sends_ahead = first.sends_ahead.unwrap_or(tls);
    let connection_limit = if sends_ahead { clients.limit() } else { Arc::default() };
    let facts = Facts { connection_limit, ..facts };
    let stall = transport.stall;
    let source = HttpSource {
        facts,
        url,
        moved: ForkSafeMutex::new(moved),
        clients,
        transport,
        validators: first.validators,
        head,
        sends_ahead,
        without_conditions: AtomicBool::new(false),
    };
    match cache {
        Some((cache, key)) => cache.wrap(Arc::new(source), &key, entry, stall),
        None => Ok(Arc::new(source)),
    }
}

/// The requests that are possible beside those for the file itself.
fn server_file(hub: Option<HubFile>, by_name: impl FnOnce() -> OpenSibling) -> ServerFile {
    let (open_sibling, checksum) = match hub {
        Some(HubFile { open_sibling, checksum }) => (open_sibling, Some(checksum)),
        None => (by_name(), None),
    };
    ServerFile { open_sibling: Some(open_sibling), checksum, ..ServerFile::default() }
}

fn identity(tag: Option<&str>) -> Option<SourceIdentity> {
    tag.map(|tag| SourceIdentity::Tag(tag.to_owned()))
}

/// The facts of a file, of which one without ranges has no length.
fn with_response(facts: Facts, first: &FirstResponse) -> Facts {
    let Validators { len, tag, modified, .. } = first.validators.clone();
    if !first.has_ranges {
        let headers = first.headers.clone();
        let server = facts.server.map(|server| ServerFile { headers, ..server });
        return Facts { identity: identity(first.validators.strong_tag()), server, ..facts };
    }
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
                if failure.repeat() != Repeat::Never {
                    Err(failure)
                } else {
                    Ok((status, headers.clone()))
                }
            })
        })
    })
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

#[cfg(test)]
#[cfg(any(feature = "clouds", feature = "s3"))]
mod tests;
