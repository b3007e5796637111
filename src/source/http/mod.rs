//! `http://` and `https://`: parallel requests for ranges, straight into the caller's memory.

pub(crate) mod client;
pub(crate) mod reply;
mod sequential;

use std::io::IoSliceMut;
use std::sync::{Arc, Mutex, PoisonError};

use reqwest::Url;

use super::scatter::Scatter;
use super::{PipeSource, ReadAt, Traits};
use crate::error::{Error, Result};
use crate::net::{NetOptions, Retry, show_text};
use client::{Clients, Target};
use reply::{Identity, Range};

/// What the first request asks for: prologue and index of files with some thousand tensors.
const HEAD_LEN: u64 = 1 << 20;
/// Bytes a request: at 100 MB/s and 50 ms of latency it waits for a fourteenth of its time.
const REQUEST_LEN: u64 = 64 << 20;
/// Reading this much costs less than another request.
const MERGE_GAP: u64 = 512 << 10;

/// A server's file that can be read at positions.
pub struct HttpSource {
    shown: String,
    target: Mutex<Arc<Target>>,
    clients: Clients,
    options: NetOptions,
    identity: Identity,
    head: Vec<u8>,
    headers: Vec<(String, String)>,
}

/// Opens an address. A server without ranges gives a source that is read front to back.
pub fn open(address: &str, options: NetOptions) -> Result<Arc<dyn ReadAt>> {
    let url = Url::parse(address).map_err(|e| {
        Error::InvalidArgument(format!("`{}` is not an address: {e}", show_text(address)))
    })?;
    let shown = show(&url);
    open_url(url, shown, options)
}

/// The same for an address that messages call something else.
#[cfg(feature = "s3")]
pub fn open_as(address: &str, shown: &str, options: NetOptions) -> Result<Arc<dyn ReadAt>> {
    let url = Url::parse(address).map_err(|e| Error::InvalidArgument(format!("`{shown}`: {e}")))?;
    open_url(url, shown.to_owned(), options)
}

fn open_url(url: Url, shown: String, options: NetOptions) -> Result<Arc<dyn ReadAt>> {
    let target = Target::new(url, options.headers.clone());
    let clients = Clients::new(&options).map_err(Error::InvalidArgument)?;
    let go_on = || true;
    let mut retry = Retry::new("reading", &options, true);
    let head = Range { start: 0, end: HEAD_LEN };
    let (target, reply, head) = loop {
        let found = clients.with(|client| {
            client.run(&go_on, async {
                let (target, response) = client.follow(&target, Some(head)).await?;
                let reply = reply::first(&response, head)?;
                if !reply.ranges {
                    return Ok((target, reply, Vec::new()));
                }
                let mut bytes = Vec::new();
                // The body of a refused range is a page.
                if reply.identity.len != Some(0) {
                    client.collect(response, reply.len, &mut bytes).await?;
                }
                Ok((target, reply, bytes))
            })
        });
        match found {
            Ok(found) => break found,
            Err(failure) => retry.wait(failure, 0, &shown, &go_on)?,
        }
    };
    if !reply.ranges {
        let stream =
            sequential::Stream::new(target, clients, options, reply.identity, shown.clone());
        return Ok(Arc::new(PipeSource::new(stream, shown)));
    }
    Ok(Arc::new(HttpSource {
        shown,
        target: Mutex::new(Arc::new(target)),
        clients,
        options,
        identity: reply.identity,
        head,
        headers: reply.headers,
    }))
}

/// An address as messages show it.
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
        Traits {
            len: self.identity.len,
            max_readers: self.options.max_connections,
            default_readers: self.options.connections,
            request_len: REQUEST_LEN,
            merge_gap: MERGE_GAP,
        }
    }

    fn read_at(&self, offset: u64, buffers: &mut [IoSliceMut<'_>]) -> Result<usize> {
        self.read_at_while(offset, buffers, &|| true)
    }

    fn read_at_while(
        &self,
        offset: u64,
        buffers: &mut [IoSliceMut<'_>],
        go_on: &dyn Fn() -> bool,
    ) -> Result<usize> {
        let wanted: u64 = buffers.iter().map(|buffer| buffer.len() as u64).sum();
        let end = offset.saturating_add(wanted).min(self.identity.len.unwrap_or(u64::MAX));
        if end <= offset {
            return Ok(0);
        }
        let mut sink = Scatter::new(buffers);
        let mut done = offset;
        if let Some(here) = usize::try_from(offset).ok().and_then(|at| self.head.get(at..)) {
            done += sink.put(here) as u64;
        }
        let mut retry = Retry::new("reading", &self.options, false);
        while done < end {
            let target = Arc::clone(&self.target.lock().unwrap_or_else(PoisonError::into_inner));
            let range = Range { start: done, end };
            let outcome = self.clients.with(|client| {
                client.run(go_on, async {
                    let (new, response) = client.follow(&target, Some(range)).await?;
                    self.identity.check(&response, range)?;
                    client.scatter(response, range, &mut sink, &mut done).await?;
                    Ok(new)
                })
            });
            match outcome {
                Ok(new) => {
                    *self.target.lock().unwrap_or_else(PoisonError::into_inner) = Arc::new(new);
                }
                Err(failure) => retry.wait(failure, done, &self.shown, go_on)?,
            }
        }
        usize::try_from(end - offset).map_err(|_| Error::Bug("a read beyond memory".to_owned()))
    }

    fn headers(&self) -> &[(String, String)] {
        &self.headers
    }
}
