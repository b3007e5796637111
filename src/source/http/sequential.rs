//! A server without ranges: one response, read front to back.

use std::io::{self, Read};

use bytes::{Buf as _, Bytes};
use reqwest::Response;

use super::client::{Clients, OneClient, Target};
use super::reply::Identity;
use crate::error::Error;
use crate::net::{Failure, NetOptions, Retry};

/// The bytes of a file in order. A connection that breaks is made again, and what was read
/// before is passed over.
pub struct Stream {
    target: Target,
    clients: Clients,
    options: NetOptions,
    identity: Identity,
    shown: String,
    open: Option<(OneClient, Response)>,
    /// Bytes that have arrived and were not asked for yet.
    rest: Bytes,
    position: u64,
}

impl Stream {
    pub fn new(
        target: Target,
        clients: Clients,
        options: NetOptions,
        identity: Identity,
        shown: String,
    ) -> Self {
        let (open, rest) = (None, Bytes::new());
        Stream { target, clients, options, identity, shown, open, rest, position: 0 }
    }

    /// Brings the next bytes; none at the end.
    fn advance(&mut self) -> Result<Bytes, Failure> {
        let go_on = || true;
        let (client, mut response, mut skip) = match self.open.take() {
            Some((client, response)) => (client, response, 0),
            None => {
                let client = self.clients.take()?;
                let (_, response) =
                    client.run(&go_on, async { client.follow(&self.target, None).await })?;
                self.identity.check_whole(&response)?;
                (client, response, self.position)
            }
        };
        loop {
            let mut bytes = client.run(&go_on, async { client.chunk(&mut response).await })?;
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
                self.open = Some((client, response));
                return Ok(bytes);
            }
        }
    }
}

impl Read for Stream {
    fn read(&mut self, buffer: &mut [u8]) -> io::Result<usize> {
        let options = self.options.clone();
        let mut retry = Retry::new("reading", &options, false);
        while self.rest.is_empty() {
            match self.advance() {
                Ok(bytes) if bytes.is_empty() => return Ok(0),
                Ok(bytes) => self.rest = bytes,
                Err(failure) => {
                    retry.wait(failure, self.position, &self.shown, &|| true).map_err(
                        |e| match e {
                            Error::Io { error, .. } => error,
                            other => io::Error::other(other.to_string()),
                        },
                    )?;
                }
            }
        }
        let len = buffer.len().min(self.rest.len());
        if let Some(room) = buffer.get_mut(..len) {
            self.rest.copy_to_slice(room);
        }
        self.position += len as u64;
        Ok(len)
    }
}
