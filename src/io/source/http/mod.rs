//! `http://` and `https://`: parallel requests for ranges, straight into the caller's memory.

pub(crate) mod client;
mod failure;
mod named;
pub(crate) mod reply;
mod sequential;

use std::sync::Arc;

use reqwest::Url;
#[cfg(feature = "hf")]
use reqwest::{StatusCode, header::HeaderMap};

use super::{KnownHead, KnownHeads, Opener, PipeSource, ReadAt, Traits};
use crate::cancel::Cancel;
use crate::error::{Error, Result};
use crate::io::net::{Failure, NetOptions, Tries, Trust, show_text};
use crate::mem::Buffers;
use crate::memory_limit::{CONNECTION, MemoryLimit};
use crate::sys::brief::Brief;
use client::{Clients, Target};
use named::Named;
#[cfg(any(feature = "clouds", feature = "s3"))]
pub use named::{Sign, Work};
use reply::{First, Identity, Range};

/// What the first request asks for: prologue and index of files with some thousand tensors.
const HEAD_LEN: u64 = 1 << 20;
/// Bytes a request: at 100 MB/s and 50 ms of latency it waits for a fourteenth of its time.
const REQUEST_LEN: u64 = 64 << 20;
/// Connections that a load begins with: what a server in the same rack has use for.
const FIRST_CONNECTIONS: usize = 4;
/// Connections that it may come to by itself: 100 MB/s each fill a network of 25 Gbit/s.
const MOST_CONNECTIONS: usize = 32;
/// Reading this much costs less than another request.
const MERGE_GAP: u64 = 512 << 10;
/// Fields of answers that others are told: what they say of the file. Any other may hold a secret, such
/// as a session, or a signed address.
const TOLD: [&str; 6] =
    ["accept-ranges", "content-length", "content-range", "content-type", "etag", "last-modified"];

/// A server's file that can be read at positions.
pub struct HttpSource {
    shown: String,
    named: Named,
    /// Where redirects from there have led. Such places may cease to be.
    moved: Brief<Option<Arc<Target>>>,
    clients: Clients,
    options: NetOptions,
    /// Heads of files beside it.
    known: KnownHeads,
    identity: Identity,
    head: Arc<[u8]>,
    headers: Vec<(String, String)>,
    tls: bool,
    /// Whether its server sends ahead what was not waited for, by HTTP/2.
    ahead: bool,
}

/// Opens an address: without a request if the head of its file is known. A server without ranges gives a
/// source that is read front to back.
pub fn open(
    address: &str,
    options: NetOptions,
    known: &KnownHeads,
    cancel: &dyn Cancel,
) -> Result<Arc<dyn ReadAt>> {
    let url = Url::parse(address).map_err(|e| {
        Error::InvalidArgument(format!("`{}` is not an address: {e}", show_text(address)))
    })?;
    let shown = show(&url);
    open_fixed(url, shown, options, known, cancel)
}

/// The same for an address that messages call something else.
#[cfg(any(feature = "clouds", feature = "hf"))]
pub fn open_as(
    address: &str,
    shown: &str,
    options: NetOptions,
    known: &KnownHeads,
    cancel: &dyn Cancel,
) -> Result<Arc<dyn ReadAt>> {
    let url = Url::parse(address).map_err(|e| Error::InvalidArgument(format!("`{shown}`: {e}")))?;
    open_fixed(url, shown.to_owned(), options, known, cancel)
}

/// The same for an address that is signed. `tls` is whether it begins with `https:`.
#[cfg(any(feature = "clouds", feature = "s3"))]
pub fn open_signed(
    signer: Box<dyn Sign>,
    tls: bool,
    shown: &str,
    options: NetOptions,
    known: &KnownHeads,
    cancel: &dyn Cancel,
) -> Result<Arc<dyn ReadAt>> {
    open_named(Named::signed(signer), tls, shown.to_owned(), options, known, cancel)
}

fn open_fixed(
    url: Url,
    shown: String,
    options: NetOptions,
    known: &KnownHeads,
    cancel: &dyn Cancel,
) -> Result<Arc<dyn ReadAt>> {
    let tls = url.scheme() == "https";
    let target = Target::new(url, options.headers.clone());
    open_named(Named::Fixed(Arc::new(target)), tls, shown, options, known, cancel)
}

fn open_named(
    named: Named,
    tls: bool,
    shown: String,
    options: NetOptions,
    known: &KnownHeads,
    cancel: &dyn Cancel,
) -> Result<Arc<dyn ReadAt>> {
    let clients = Clients::new(&options, tls).map_err(Error::InvalidArgument)?;
    // The address as it is shown may be that of several files: later answers must prove which it is.
    let of_this = known.of(&shown).filter(|head| head.tag.is_some() || head.modified.is_some());
    let (moved, reply, head) = match of_this {
        Some(head) => (None, First::known(head)?, Arc::clone(&head.first)),
        None => ask_first(&named, &clients, &shown, &options, cancel)?,
    };
    if !reply.ranges {
        let (folder, like) = (named.beside(""), shown.clone());
        let (net, heads) = (options.clone(), known.clone());
        let opener: Opener = Arc::new(move |name, cancel| match &folder {
            Some(folder) => beside(folder, tls, &like, &net, &heads, name, cancel),
            None => Ok(None),
        });
        let stream =
            sequential::Body::new(named, opener, clients, options, reply.identity, shown.clone());
        return Ok(Arc::new(PipeSource::new(stream, shown)));
    }
    let (name, patience) = (named.name(), options.stall);
    // What nobody vouches for is not kept for those who ask for that.
    let cache = options.cache.clone().filter(|_| options.trust != Trust::Anything);
    let source = Arc::new(HttpSource {
        shown,
        named,
        moved: Brief::new(moved),
        clients,
        options,
        known: known.clone(),
        identity: reply.identity,
        head,
        headers: reply.headers,
        tls,
        ahead: reply.ahead.unwrap_or(tls),
    });
    match cache.zip(name) {
        Some((cache, name)) => cache.before(source, &name, patience, cancel),
        None => Ok(source),
    }
}

/// What a server says of an address without its bytes. Refusals are answers; redirects to other hosts,
/// too.
#[cfg(feature = "hf")]
pub fn fields(
    url: Url,
    shown: &str,
    options: &NetOptions,
    cancel: &dyn Cancel,
) -> Result<(StatusCode, HeaderMap)> {
    let clients = Clients::new(options, url.scheme() == "https").map_err(Error::InvalidArgument)?;
    let target = Target::new(url, options.headers.clone());
    let mut tries = Tries::new("asking for", options, cancel).opening();
    loop {
        let answer = clients.with(&tries, |client| {
            client.run(&tries, async {
                let response = client.fields(&target).await?;
                let (status, headers) = (response.status(), response.headers());
                let failure =
                    reply::refusal(status, headers, format!("the server answered {status}"));
                if failure.is_passing() { Err(failure) } else { Ok((status, headers.clone())) }
            })
        });
        match answer {
            Ok(answer) => return Ok(answer),
            Err(failure) => tries.wait(failure, 0, shown)?,
        }
    }
}

/// What the first request has found: where redirects have led, what the server said, and the first
/// bytes of a file that can be read at positions.
type Asked = (Option<Arc<Target>>, First, Arc<[u8]>);

fn ask_first(
    named: &Named,
    clients: &Clients,
    shown: &str,
    options: &NetOptions,
    cancel: &dyn Cancel,
) -> Result<Asked> {
    let mut tries = Tries::new("reading", options, cancel).opening();
    let head = Range { start: 0, end: HEAD_LEN };
    loop {
        let found = clients.with(&tries, |client| {
            client.run(&tries, async {
                let (moved, response) = named.ask(client, None, Some(head), None, &tries).await?;
                let reply = reply::first(&response, head)?;
                let mut bytes = Vec::new();
                // The body of a refused range is a page.
                if reply.ranges && reply.identity.len != Some(0) {
                    client.collect(response, reply.len, &mut bytes, &tries).await?;
                }
                Ok((moved, reply, bytes.into()))
            })
        });
        match found {
            Ok(found) => return Ok(found),
            Err(failure) if tries.renews(&failure) => {}
            Err(failure) => {
                tries.wait(failure, 0, shown).map_err(|error| named.with_host(error))?;
            }
        }
    }
}

/// Opens another file in the same folder, in the same way.
fn beside(
    named: &Named,
    tls: bool,
    shown: &str,
    options: &NetOptions,
    known: &KnownHeads,
    name: &str,
    cancel: &dyn Cancel,
) -> Result<Option<Arc<dyn ReadAt>>> {
    if named.is_version() {
        return Err(Error::Unsupported(format!(
            "`{shown}` is one version of a file that names others beside it, and not which version of \
             them: open it without, or what it names one by one"
        )));
    }
    let Some(named) = named.beside(name) else { return Ok(None) };
    let (path, query) = shown.split_once('?').map_or((shown, ""), |(path, _)| (path, "?..."));
    let folder = path.rsplit_once('/').map_or("", |(folder, _)| folder);
    let shown = format!("{folder}/{name}{query}");
    open_named(named, tls, shown, options.clone(), known, cancel).map(Some)
}

impl HttpSource {
    /// Finds out what the server has in the place of the file that was opened: the difference is the
    /// error. On a connection of its own, as a server may close that by which it has refused, and not
    /// say so.
    fn look(
        &self,
        at: Option<&Arc<Target>>,
        tries: &Tries<'_>,
    ) -> std::result::Result<(), Failure> {
        let first = Range { start: 0, end: 1 };
        let client = self.clients.new_one(tries)?;
        client.run(tries, async {
            let (_, response) = self.named.ask(&client, at, Some(first), None, tries).await?;
            self.identity.check_first(&response, first)
        })
    }
}

/// How files of servers are read that have ranges.
pub(crate) fn traits(len: Option<u64>, options: &NetOptions) -> Traits {
    Traits {
        len,
        max_readers: options.max_connections,
        first_readers: options.connections.unwrap_or(FIRST_CONNECTIONS),
        most_readers: options.connections.unwrap_or(MOST_CONNECTIONS),
        request_len: REQUEST_LEN,
        merge_gap: MERGE_GAP,
        reader_memory: CONNECTION,
    }
}

/// An address as messages show it; None for what is none.
pub fn shown(address: &str) -> Option<String> {
    Url::parse(address).ok().map(|url| show(&url))
}

fn show(url: &Url) -> String {
    let mut url = url.clone();
    let query = url.query().is_some();
    url.set_query(None);
    url.set_fragment(None);
    // Neither can fail for addresses that have a host.
    let _ = url.set_username("");
    let _ = url.set_password(None);
    if query { format!("{url}?...") } else { url.to_string() }
}

impl ReadAt for HttpSource {
    fn uri(&self) -> &str {
        &self.shown
    }

    fn traits(&self) -> Traits {
        let traits = traits(self.identity.len, &self.options);
        let ahead = if self.ahead { u64::from(self.clients.window()) } else { 0 };
        Traits { reader_memory: traits.reader_memory + ahead, ..traits }
    }

    fn limit_memory(&self, limit: MemoryLimit) {
        if self.ahead {
            let window = limit.window(u64::from(client::WINDOW));
            self.clients.set_window(u32::try_from(window).unwrap_or(client::WINDOW));
        }
    }

    fn read_at(
        &self,
        offset: u64,
        buffers: &mut Buffers<'_>,
        cancel: &dyn Cancel,
    ) -> Result<usize> {
        let end =
            offset.saturating_add(buffers.left() as u64).min(self.identity.len.unwrap_or(u64::MAX));
        if end <= offset {
            return Ok(0);
        }
        let mut done = offset;
        if let Some(here) = usize::try_from(offset).ok().and_then(|at| self.head.get(at..)) {
            done += buffers.put(here) as u64;
        }
        let mut tries = Tries::new("reading", &self.options, cancel);
        while done < end {
            let at = self.moved.lock().clone();
            let range = Range { start: done, end };
            let mut is_another = false;
            let outcome = self.clients.with(&tries, |client| {
                client.run(&tries, async {
                    let opened = Some(&self.identity);
                    let asked = self.named.ask(client, at.as_ref(), Some(range), opened, &tries);
                    let (new, response) = asked.await?;
                    is_another = reply::is_of_another(&response);
                    self.identity.check(&response, range)?;
                    client.scatter(response, range, buffers, &mut done, &tries).await?;
                    Ok(new)
                })
            });
            let looked = if is_another { self.look(at.as_ref(), &tries) } else { Ok(()) };
            match looked.and(outcome) {
                Ok(new) => *self.moved.lock() = new,
                Err(failure) if tries.renews(&failure) => *self.moved.lock() = None,
                Err(failure) => {
                    // A signed address may have expired: the first one gives another.
                    *self.moved.lock() = None;
                    let waited = tries.wait(failure.or_again(at.is_some()), done, &self.shown);
                    waited.map_err(|error| self.named.with_host(error))?;
                }
            }
        }
        usize::try_from(end - offset).map_err(|_| Error::Bug("a read beyond memory".to_owned()))
    }

    fn beside(&self, name: &str, cancel: &dyn Cancel) -> Result<Option<Arc<dyn ReadAt>>> {
        beside(&self.named, self.tls, &self.shown, &self.options, &self.known, name, cancel)
    }

    fn headers(&self) -> &[(String, String)] {
        &self.headers
    }

    fn known_head(&self) -> Option<KnownHead> {
        let Identity { len, tag, modified } = self.identity.clone();
        let told = |(name, _): &&(String, String)| TOLD.contains(&name.as_str());
        let headers = self.headers.iter().filter(told).cloned().collect();
        let (uri, len, first) = (self.shown.clone(), len?, Arc::default());
        Some(KnownHead { uri, len, tag, modified, headers, first })
    }
}
