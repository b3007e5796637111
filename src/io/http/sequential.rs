//! Files of a server without ranges: one response, read front to back.

use crate::mem::Buffers;
use std::io;
use std::sync::Arc;
use std::time::{Duration, Instant};

use bytes::{Buf as _, Bytes};
use reqwest::Response;

use super::client_pool::{ClientPool, PooledClient};
use super::file_url::{FileUrl, RangeRequest};
use super::validators::Validators;
use crate::cancel::Cancel;
use crate::io::Stream;
use crate::io::transport::{Failure, RetryBudget, TransportOptions, retry};
use crate::sys::process::DropInOwner;
use crate::sys::to_usize;

/// The body of a file. After a broken connection it is requested again, and the bytes that were
/// read before are skipped.
pub struct SequentialBody {
    url: Arc<FileUrl>,
    clients: Arc<ClientPool>,
    options: TransportOptions,
    validators: Validators,
    display_address: String,
    /// The connection and the response. In a forked child they are the parent's, and are not used.
    connection: Option<DropInOwner<(PooledClient, Response)>>,
    /// Bytes that have arrived and were not read yet.
    unread: Bytes,
    position: u64,
    /// True if the body has ended at `position`.
    ended: bool,
    /// Time spent waiting for bytes.
    time_waited: Duration,
}

impl SequentialBody {
    pub fn new(
        url: Arc<FileUrl>,
        clients: Arc<ClientPool>,
        options: TransportOptions,
        validators: Validators,
        display_address: String,
    ) -> Self {
        SequentialBody {
            url,
            clients,
            options,
            validators,
            display_address,
            connection: None,
            unread: Bytes::new(),
            position: 0,
            ended: false,
            time_waited: Duration::ZERO,
        }
    }

    /// Reads the next bytes; none at the end.
    fn next_bytes(&mut self, budget: &RetryBudget<'_>) -> Result<Bytes, Failure> {
        let at_end = self.connection.is_none() && self.validators.len == Some(self.position);
        if self.ended || at_end {
            return Ok(Bytes::new());
        }
        let (mut connection, mut skip) = match self.connection.take() {
            Some(connection) if connection.owner().is_current() => (connection, 0),
            _ => {
                let client = self.clients.take_client(budget)?;
                let (_, response) = client.run(budget, async {
                    let if_match = Some(&self.validators);
                    self.url
                        .request(
                            &client,
                            None,
                            RangeRequest { if_match, ..RangeRequest::default() },
                        )
                        .await
                })?;
                self.validators.check_whole(&response)?;
                (DropInOwner::new((client, response)), self.position)
            }
        };
        loop {
            let (client, response) = &mut *connection;
            let next = client.run(budget, async { client.next_chunk(response, budget).await });
            let mut bytes = next?;
            if bytes.is_empty() {
                let end = self.validators.len.unwrap_or(self.position);
                if skip > 0 || self.position < end {
                    let what = format!(
                        "the response body ended at byte {} of {end}",
                        self.position - skip
                    );
                    return Err(Failure::transient(io::ErrorKind::UnexpectedEof, what));
                }
                self.ended = true;
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
        let (options, display_address) = (self.options.clone(), self.display_address.clone());
        let budget = RetryBudget::new("reading", &display_address, &options, cancel);
        // The whole body is one request.
        let budget = budget.resumed(self.time_waited, self.position);
        budget.set_position(self.position);
        let bytes = retry::run(&budget, || self.next_bytes(&budget));
        self.unread = bytes.map_err(|error| self.url.with_host(error))?;
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
