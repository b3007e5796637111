//! Files of a server without ranges: one response, read front to back.

use std::io;
use std::time::{Duration, Instant};

use bytes::{Buf as _, Bytes};
use reqwest::Response;

use super::client_pool::next_chunk;
use super::file_url::RangeRequest;
use super::source::RemoteFile;
use crate::cancel::Cancel;
use crate::io::Stream;
use crate::io::transport::{Client, Failure, PooledConnection, RetryBudget, retry};
use crate::mem::Buffers;
use crate::sys::process::DropInOwner;
use crate::sys::to_usize;

/// The body of a file. After a broken connection it is requested again, and the bytes that were
/// read before are skipped.
pub struct SequentialBody {
    /// Its length is known at the latest at its end.
    file: RemoteFile,
    /// The connection and the response. In a forked child they are the parent's, and are not used.
    connection: Option<DropInOwner<(PooledConnection<Client>, Response)>>,
    /// Bytes that have arrived and were not read yet.
    unread: Bytes,
    position: u64,
    /// Time spent waiting for bytes.
    time_waited: Duration,
}

impl SequentialBody {
    pub fn new(file: RemoteFile) -> Self {
        let (unread, time_waited) = (Bytes::new(), Duration::ZERO);
        SequentialBody { file, connection: None, unread, position: 0, time_waited }
    }

    /// Reads the next bytes; none at the end.
    fn next_bytes(&mut self, budget: &RetryBudget<'_>) -> Result<Bytes, Failure> {
        if self.connection.is_none() && self.file.validators.len == Some(self.position) {
            return Ok(Bytes::new());
        }
        let (mut connection, mut skip) = match self.connection.take() {
            Some(connection) if connection.owner().is_current() => (connection, 0),
            _ => {
                let RemoteFile { url, clients, validators, .. } = &self.file;
                let connection = clients.take(budget)?;
                let range_request =
                    RangeRequest { if_match: Some(validators), ..RangeRequest::default() };
                let request = url.request(&connection.client, None, range_request);
                let (_, response) = connection.events.run(budget, request)?;
                validators.check_whole(&response)?;
                (DropInOwner::new((connection, response)), self.position)
            }
        };
        loop {
            let (of, response) = &mut *connection;
            let mut bytes = of.events.run(budget, next_chunk(response, budget))?;
            if bytes.is_empty() {
                let end = self.file.validators.len.unwrap_or(self.position);
                if skip > 0 || self.position < end {
                    let what = format!(
                        "the response body ended at byte {} of {end}",
                        self.position - skip
                    );
                    return Err(Failure::transient(io::ErrorKind::UnexpectedEof, what));
                }
                self.file.validators.len = Some(self.position);
                return Ok(bytes);
            }
            let skipped = skip.min(bytes.len() as u64);
            skip -= skipped;
            bytes.advance(to_usize(skipped));
            if !bytes.is_empty() {
                self.connection = Some(connection);
                return Ok(bytes);
            }
        }
    }

    /// Waits until there are bytes, or for the end.
    fn fill_unread(&mut self, cancel: &dyn Cancel) -> crate::error::Result<()> {
        let (options, uri) = (self.file.transport.clone(), self.file.uri.clone());
        // The whole body is one request.
        let budget = RetryBudget::new("reading", &uri, &options, cancel)
            .resumed(self.time_waited, self.position);
        let bytes = retry::run(&budget, || self.next_bytes(&budget));
        self.unread = bytes.map_err(|error| self.file.url.with_host(error))?;
        Ok(())
    }
}

impl Stream for SequentialBody {
    fn read_next(&mut self, buffers: &mut Buffers<'_>, cancel: &dyn Cancel) -> io::Result<usize> {
        if self.unread.is_empty() {
            let begun = Instant::now();
            let waited = self.fill_unread(cancel);
            self.time_waited = self.time_waited.saturating_add(begun.elapsed());
            waited.map_err(io::Error::other)?;
        }
        let len = buffers.fill_from(&self.unread);
        self.unread.advance(len);
        self.position += len as u64;
        Ok(len)
    }
}
