//! A server without ranges: one response, read front to back.

use crate::mem::Buffers;
use std::io;
use std::sync::Arc;
use std::time::{Duration, Instant};

use bytes::{Buf as _, Bytes};
use reqwest::Response;

use super::client::{Clients, OneClient};
use super::named::Named;
use super::reply::Identity;
use crate::cancel::Cancel;
use crate::io::net::{Failure, NetOptions, Tries};
use crate::io::source::{Opener, Stream};
use crate::sys::process::Inherited;

/// The bytes of a file in order. A connection that breaks is made again, and what was read
/// before is passed over.
pub struct Body {
    named: Named,
    opener: Opener,
    clients: Clients,
    options: NetOptions,
    identity: Identity,
    shown: String,
    /// In a process that was forked off it is the parent's, and left alone.
    open: Option<Inherited<(OneClient, Response)>>,
    /// Bytes that have arrived and were not asked for yet.
    rest: Bytes,
    position: u64,
    /// For how long it was waited for.
    waited: Duration,
}

impl Body {
    pub fn new(
        named: Named,
        opener: Opener,
        clients: Clients,
        options: NetOptions,
        identity: Identity,
        shown: String,
    ) -> Self {
        Body {
            named,
            opener,
            clients,
            options,
            identity,
            shown,
            open: None,
            rest: Bytes::new(),
            position: 0,
            waited: Duration::ZERO,
        }
    }

    /// Brings the next bytes; none at the end.
    fn advance(&mut self, tries: &Tries<'_>) -> Result<Bytes, Failure> {
        let (mut open, mut skip) = match self.open.take() {
            Some(open) if open.maker().is_here() => (open, 0),
            _ => {
                let client = self.clients.take(tries)?;
                let (_, response) = client.run(tries, async {
                    self.named.ask(&client, None, None, Some(&self.identity), tries).await
                })?;
                self.identity.check_whole(&response)?;
                (Inherited::new((client, response)), self.position)
            }
        };
        loop {
            let (client, response) = &mut *open;
            let next = client.run(tries, async { client.chunk(response, tries).await });
            let mut bytes = next?;
            if bytes.is_empty() {
                let end = self.identity.len.unwrap_or(self.position);
                if skip > 0 || self.position < end {
                    let what = format!("the body ended at byte {} of {end}", self.position - skip);
                    return Err(Failure::passing(io::ErrorKind::UnexpectedEof, what));
                }
                return Ok(bytes);
            }
            let passed = skip.min(bytes.len() as u64);
            skip -= passed;
            bytes.advance(usize::try_from(passed).unwrap_or(bytes.len()));
            if !bytes.is_empty() {
                self.open = Some(open);
                return Ok(bytes);
            }
        }
    }

    /// Waits until there are bytes, or for the end.
    fn wait(&mut self, cancel: &dyn Cancel) -> crate::error::Result<()> {
        let options = self.options.clone();
        let tries = Tries::new("reading", &options, cancel);
        // The whole body is one request.
        let mut tries = tries.resumed(self.waited, self.position);
        loop {
            match self.advance(&tries) {
                Ok(bytes) => {
                    self.rest = bytes;
                    return Ok(());
                }
                Err(failure) if tries.renews(&failure) => {}
                Err(failure) => {
                    let waited = tries.wait(failure, self.position, &self.shown);
                    waited.map_err(|error| self.named.with_host(error))?;
                }
            }
        }
    }
}

impl Stream for Body {
    fn read_next(&mut self, buffers: &mut Buffers<'_>, cancel: &dyn Cancel) -> io::Result<usize> {
        if self.rest.is_empty() {
            let begun = Instant::now();
            let waited = self.wait(cancel);
            self.waited = self.waited.saturating_add(begun.elapsed());
            waited.map_err(io::Error::other)?;
        }
        let len = buffers.put(&self.rest);
        self.rest.advance(len);
        self.position += len as u64;
        Ok(len)
    }

    fn opener(&self) -> Option<Opener> {
        Some(Arc::clone(&self.opener))
    }
}
