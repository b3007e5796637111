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

use reqwest::header::{HeaderMap, LOCATION};
use reqwest::{Method, StatusCode, Url};

use super::{
    CachedHead, Facts, OpenOptions, OpenSibling, ReadAt, ServerFile, SourceIdentity, StreamSource,
};
use crate::cancel::Cancel;
use crate::error::{Error, Result};
use crate::io::transport::{
    Repeat, RequestTarget, RetryBudget, TransportOptions, Trust, follow, retry, show_text,
    status_failure,
};
use crate::sys::fork_safe_mutex::ForkSafeMutex;
use cache_key::{cache_key, without_secrets};
use client_pool::ClientPool;
pub use file_url::{FileUrl, Refusal, Sign, SignFuture};
use first_request::{Head, find_head};
pub use first_request::{LIMIT_WITH_COPY, is_unreachable};
use response::FirstResponse;
#[cfg(test)]
pub(crate) use source::capabilities;
use source::{HttpSource, RemoteFile};
use validators::Validators;

/// Opens an address, without a request if the head of its file is cached. A file of a server
/// without ranges is read front to back.
pub fn open(address: &str, options: &OpenOptions, cancel: &dyn Cancel) -> Result<Arc<dyn ReadAt>> {
    let url = Url::parse(address).map_err(|e| {
        Error::InvalidArgument(format!("`{}` is not an address: {e}", show_text(address)))
    })?;
    let display_address = display_url(&url);
    if let Some(fragment) = url.fragment() {
        let hint = if fragment.starts_with("sha256=") { "; pass the hash as sha256=" } else { "" };
        return Err(Error::InvalidArgument(format!(
            "`{display_address}#...`: expected an address without a fragment (`#`), which servers \
             are not sent{hint}"
        )));
    }
    open_as(url, display_address, None, options, cancel)
}

/// Opens an address; messages name it `display_address`. `hub`: the requests to the hub of a file of a
/// commit.
pub fn open_as(
    url: Url,
    display_address: String,
    hub: Option<ServerFile>,
    options: &OpenOptions,
    cancel: &dyn Cancel,
) -> Result<Arc<dyn ReadAt>> {
    let tls = url.scheme() == "https";
    let location = RequestTarget::new(url, options.transport.headers.clone());
    open_url(FileUrl::Fixed(Arc::new(location)), tls, display_address, hub, options, cancel)
}

/// Opens a URL; `tls` is true for `https://`.
pub fn open_url(
    url: FileUrl,
    tls: bool,
    display_address: String,
    hub: Option<ServerFile>,
    options: &OpenOptions,
    cancel: &dyn Cancel,
) -> Result<Arc<dyn ReadAt>> {
    let clients = ClientPool::new(&options.transport, tls).map_err(Error::InvalidArgument)?;
    open_with_clients(url, Arc::new(clients), display_address, hub, options, cancel)
}

/// Opens a URL with clients that may be shared with other files.
fn open_with_clients(
    url: FileUrl,
    clients: Arc<ClientPool>,
    uri: String,
    hub: Option<ServerFile>,
    options: &OpenOptions,
    cancel: &dyn Cancel,
) -> Result<Arc<dyn ReadAt>> {
    // Bytes that came without verified certificates must not be used for loads that verify them.
    let cache = options.cache.clone().filter(|_| options.transport.trust != Trust::Anything);
    let cache = cache.zip(url.cache_key());
    // Files may share a display address, so later responses must prove which file it is.
    let cached = options.cached_heads.get(&uri);
    let cached = cached.filter(|head| head.tag.is_some() || head.modified.is_some());
    let mut entry = None;
    let found = match cached {
        Some(head) => Head::cached(head)?,
        None => {
            entry = cache.as_ref().and_then(|(cache, key)| cache.latest(key));
            let (server, is_version) = ((&url, &*clients), hub.is_some() || url.is_version());
            find_head(server, &uri, entry.as_ref(), is_version, options, cancel)?
        }
    };
    let Head { moved, mut first, bytes: head, fallback } = found;
    first.validators.is_immutable = hub.is_some();
    let url = Arc::new(url);
    let server = hub.unwrap_or_else(|| {
        let open_sibling = Some(sibling_opener(&url, &clients, &uri, options));
        ServerFile { open_sibling, ..ServerFile::default() }
    });
    let fallback = fallback.or_else(|| server.fallback.lock().clone());
    let server = ServerFile { fallback: Arc::new(ForkSafeMutex::new(fallback)), ..server };
    let facts = facts_of(uri.clone(), server, &first);
    let (transport, validators) = (options.transport.clone(), first.validators);
    let file = RemoteFile { uri, url, clients, transport, validators };
    if !first.has_ranges {
        let body = sequential::SequentialBody::new(file);
        return Ok(Arc::new(StreamSource::with_facts(body, 0, facts)));
    }
    let sends_ahead = first.sends_ahead.unwrap_or(file.clients.tls);
    let limit = &file.clients.limit;
    let connection_limit = if sends_ahead { Arc::clone(limit) } else { Arc::default() };
    let source = HttpSource {
        facts: Facts { connection_limit, ..facts },
        file,
        moved: ForkSafeMutex::new(moved),
        head,
        sends_ahead,
        without_conditions: AtomicBool::new(false),
    };
    match cache {
        Some((cache, key)) => cache.wrap(Arc::new(source), &key, entry, options.transport.stall),
        None => Ok(Arc::new(source)),
    }
}

/// The facts of a file, of which one without ranges has no length.
fn facts_of(uri: String, server: ServerFile, first: &FirstResponse) -> Facts {
    let Validators { len, tag, modified, .. } = first.validators.clone();
    let (len, headers) = (len.filter(|_| first.has_ranges), first.headers.clone());
    let server = match len {
        Some(len) => {
            let (uri, first) = (uri.clone(), Arc::default());
            let head = Some(CachedHead { uri, len, tag, modified, headers, first });
            ServerFile { head, ..server }
        }
        None => ServerFile { headers, ..server },
    };
    let head = server.head.as_ref();
    let tag = head.map_or_else(|| first.validators.strong_tag(), CachedHead::strong_tag);
    let identity = tag.map(|tag| SourceIdentity::Tag(tag.to_owned()));
    Facts { uri, len, identity, server: Some(server), ..Facts::default() }
}

/// Requests the headers of an address. Refusals, and redirects to other hosts, are responses.
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
        clients.with_client(&budget, async |client| {
            let none = HeaderMap::new();
            let (_, response) = follow(client, Method::HEAD, &from, &none, leaves_origin).await?;
            let (status, headers) = (response.status(), response.headers());
            let what = format!("the server answered {status}");
            let failure = status_failure(status, headers, what);
            if failure.repeat != Repeat::Never {
                Err(failure)
            } else {
                Ok((status, headers.clone()))
            }
        })
    })
}

/// Opens other files in the same folder, in the same way, by the same clients.
fn sibling_opener(
    url: &Arc<FileUrl>,
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
        open_with_clients(url, clients, address, None, &options, cancel).map(Some)
    })
}

/// True if the cache has a complete copy of the file of a URL.
pub fn has_copy(options: &OpenOptions, url: &Url) -> bool {
    let cache = options.cache.as_ref().filter(|_| options.transport.trust != Trust::Anything);
    let found = cache.and_then(|cache| cache.latest(&cache_key(url)?));
    found.is_some_and(|entry| entry.is_complete())
}

/// The address for messages; None if it cannot be parsed.
pub fn display_address(address: &str) -> Option<String> {
    Url::parse(address).ok().map(|url| display_url(&url))
}

fn display_url(url: &Url) -> String {
    let query = if url.query().is_some() { "?..." } else { "" };
    format!("{}{query}", without_secrets(url))
}

#[cfg(all(test, any(feature = "clouds", feature = "s3")))]
mod tests;
