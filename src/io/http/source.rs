//! A file of a server with ranges: each request goes straight into the caller's memory.

use std::io::ErrorKind;
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, Ordering};

use reqwest::StatusCode;

use super::client_pool::{ClientPool, scatter};
use super::fields::{ByteRange, is_of_range};
use super::file_url::{FileUrl, RangeRequest};
use super::response::parse_first;
use super::server_speed::DEFAULT_GAP;
use super::validators::Validators;
use crate::cancel::Cancel;
use crate::error::Result;
use crate::io::transport::{Failure, Repeat, RequestTarget, RetryBudget, TransportOptions, retry};
use crate::io::{Capabilities, Facts, ReadAt};
use crate::mem::Buffers;
use crate::memory_limit::CONNECTION;
use crate::sys::clock;
use crate::sys::fork_safe_mutex::ForkSafeMutex;
use crate::sys::to_usize;

/// Bytes of a request: at 100 MB/s and 50 ms of latency a fourteenth of its time is latency.
const REQUEST_LEN: u64 = 64 << 20;
/// Initial connections of a load: as many as a server in the same rack can use.
const FIRST_CONNECTIONS: usize = 4;
/// Maximum connections of a load unless the caller sets a number. At 100 MB/s each, they fill a
/// network of 25 Gbit/s.
const MAX_CONNECTIONS: usize = 32;

/// A file of a server.
pub struct RemoteFile {
    /// The address, for messages.
    pub uri: String,
    pub url: Arc<FileUrl>,
    pub clients: Arc<ClientPool>,
    pub transport: TransportOptions,
    pub validators: Validators,
}

/// A file of a server with ranges.
pub struct HttpSource {
    pub facts: Facts,
    pub file: RemoteFile,
    /// The location to which redirects have led; it may expire.
    pub moved: ForkSafeMutex<Option<Arc<RequestTarget>>>,
    /// The first bytes of the file.
    pub head: Arc<[u8]>,
    /// True if the server sends bytes before they are read, by HTTP/2.
    pub sends_ahead: bool,
    /// True once the server has refused a request with the `ETag` of the file that it has.
    pub without_conditions: AtomicBool,
}

/// The capabilities of servers with ranges.
pub fn capabilities(options: &TransportOptions) -> Capabilities {
    Capabilities {
        max_readers: options.max_connections,
        initial_readers: options.connections.unwrap_or(FIRST_CONNECTIONS),
        max_auto_readers: options.connections.unwrap_or(MAX_CONNECTIONS),
        request_len: REQUEST_LEN,
        merge_gap: DEFAULT_GAP,
        reader_memory: CONNECTION,
    }
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
        let RemoteFile { url, clients, validators, .. } = &self.file;
        let turn = clients.turns.take(budget)?;
        let mut refused = false;
        let if_match = (!self.without_conditions.load(Ordering::Relaxed)).then_some(validators);
        let outcome = clients.with_client(budget, async |client| {
            let range_request = RangeRequest { if_match, ..RangeRequest::range(range) };
            let begun = clock::now();
            let (moved, response) = url.request(client, at.as_ref(), range_request).await?;
            clients.speed.record_latency(clock::since(begun));
            if validators.is_whole(&response) {
                self.without_conditions.store(true, Ordering::Relaxed);
            }
            refused = is_of_range(response.status());
            validators.check(&response, range)?;
            turn.served();
            let begun = clock::now();
            scatter(response, range, buffers, done, budget).await?;
            clients.speed.record_body(range.end - range.start, clock::since(begun));
            Ok(moved)
        });
        // Fewer requests run from now on, if it was refused while others were served.
        if outcome.as_ref().is_err_and(|failure| failure.repeat != Repeat::Never)
            && let (Some(left), Some(server)) = (turn.refused(), &self.facts.server)
        {
            server.fallback.lock().get_or_insert_with(|| {
                format!("the server refused some of the connections, and {left} were left")
            });
        }
        let outcome = match outcome {
            Err(failure) if refused => Err(self.explain(failure, at.as_ref(), if_match, budget)),
            outcome => outcome,
        };
        // The location may be a signed URL that has expired: after a failure the first one gives
        // another.
        let moved = outcome.as_ref().map_or(None, Clone::clone);
        *self.moved.lock() = moved;
        outcome.map(drop).map_err(|failure| failure.if_redirected(at.is_some()))
    }

    /// The reason why a range was refused: another file, or a server that does not know the
    /// condition of the request. Uses a new connection, because a server may close that of its
    /// refusal.
    fn explain(
        &self,
        failure: Failure,
        at: Option<&Arc<RequestTarget>>,
        if_match: Option<&Validators>,
        budget: &RetryBudget<'_>,
    ) -> Failure {
        let RemoteFile { url, clients, validators, .. } = &self.file;
        let range = ByteRange { start: 0, end: 1 };
        let found = clients.connect(budget).and_then(|connection| {
            let request = url.request(&connection.client, at, RangeRequest::range(range));
            let (_, response) = connection.events.run(budget, request)?;
            let Ok(first) = parse_first(&response, Some(range))? else { return Ok(false) };
            validators.check_same(&first.validators)?;
            Ok(response.status() == StatusCode::PARTIAL_CONTENT)
        });
        match found {
            Ok(true) if if_match.is_some_and(|file| file.strong_tag().is_some()) => {
                self.without_conditions.store(true, Ordering::Relaxed);
                Failure::transient(ErrorKind::InvalidData, failure.to_string())
            }
            Ok(_) => failure,
            Err(other) => other,
        }
    }
}

impl ReadAt for HttpSource {
    fn facts(&self) -> &Facts {
        &self.facts
    }

    fn capabilities(&self) -> Capabilities {
        let RemoteFile { clients, transport, .. } = &self.file;
        let found = capabilities(transport);
        let sends_ahead = if self.sends_ahead { u64::from(clients.window()) } else { 0 };
        let merge_gap = clients.speed.merge_gap(found.initial_readers);
        Capabilities { reader_memory: found.reader_memory + sends_ahead, merge_gap, ..found }
    }

    fn read_at(&self, offset: u64, into: &mut Buffers<'_>, cancel: &dyn Cancel) -> Result<usize> {
        let RemoteFile { uri, url, transport, validators, .. } = &self.file;
        let len = validators.len.unwrap_or(u64::MAX);
        let end = offset.saturating_add(into.remaining() as u64).min(len);
        if end <= offset {
            return Ok(0);
        }
        let mut done = offset;
        if let Some(from_head) = self.head.get(to_usize(offset)..) {
            done += into.fill_from(from_head) as u64;
        }
        if done < end {
            let budget = RetryBudget::new("reading", uri, transport, cancel);
            budget.position.set(done);
            let read = retry::run(&budget, || {
                let range = ByteRange { start: done, end };
                let outcome = self.attempt(range, into, &mut done, &budget);
                budget.position.set(done);
                outcome
            });
            read.map_err(|error| url.with_host(error))?;
        }
        Ok(to_usize(end - offset))
    }
}
