//! A pool of the clients of one source and its siblings, and reading of response bodies.

use std::future::Future;
use std::io::ErrorKind;
use std::sync::Arc;
use std::sync::atomic::{AtomicU32, Ordering};

use bytes::Bytes;
use reqwest::Response;

use super::fields::ByteRange;
use super::server_speed::ServerSpeed;
use super::turns::Turns;
use crate::io::ConnectionLimit;
use crate::io::transport::{
    Client, ClientConfig, ConnectionPool, Failure, HTTP2_WINDOW, PooledConnection, RetryBudget,
    TransportOptions, read_chunk,
};
use crate::mem::Buffers;

/// The clients of one source and its siblings.
pub struct ClientPool {
    pool: ConnectionPool<Client>,
    config: ClientConfig,
    /// The limit of the bytes that a server may send ahead on a connection.
    limit: Arc<ConnectionLimit>,
    /// Bytes that servers may send ahead on the present connections.
    window: AtomicU32,
    speed: ServerSpeed,
    turns: Turns,
}

/// A client on loan to one thread.
pub struct PooledClient(PooledConnection<Client>);

impl ClientPool {
    /// Reads the certificates. Invalid certificates are an error only if `tls` is true, which needs
    /// them at once.
    pub fn new(options: &TransportOptions, tls: bool) -> Result<Self, String> {
        let config = ClientConfig::new(options, tls)?;
        let (pool, window) = (ConnectionPool::default(), AtomicU32::new(HTTP2_WINDOW));
        let limit = Arc::default();
        let (speed, turns) = (ServerSpeed::default(), Turns::default());
        Ok(ClientPool { pool, config, limit, window, speed, turns })
    }

    /// Measurements of the server's speed.
    pub fn speed(&self) -> &ServerSpeed {
        &self.speed
    }

    /// The turns of requests.
    pub fn turns(&self) -> &Turns {
        &self.turns
    }

    /// The limit of the bytes that a server may send ahead on a connection.
    pub fn limit(&self) -> Arc<ConnectionLimit> {
        Arc::clone(&self.limit)
    }

    /// Bytes that a server may send ahead on each connection.
    pub fn window(&self) -> u32 {
        u32::try_from(self.limit.bytes()).unwrap_or(u32::MAX).min(HTTP2_WINDOW)
    }

    /// Lends a client for the length of a call.
    pub fn with_client<T>(
        &self,
        budget: &RetryBudget<'_>,
        body: impl FnOnce(&PooledClient) -> Result<T, Failure>,
    ) -> Result<T, Failure> {
        let client = self.take_client(budget)?;
        let result = body(&client);
        // Another client may have a connection, where a server accepts no further one.
        if result.as_ref().map_or_else(|failure| failure.status().is_some(), |_| true) {
            self.pool.give_back(client.0);
        }
        result
    }

    /// Takes a client out of the pool.
    pub fn take_client(&self, budget: &RetryBudget<'_>) -> Result<PooledClient, Failure> {
        let window = self.window();
        if self.window.fetch_min(window, Ordering::Relaxed) > window {
            // Connections that allow more are closed.
            self.pool.clear();
        }
        self.pool.take(budget, || self.connect()).map(PooledClient)
    }

    /// Makes a client without connections.
    pub fn new_client(&self, budget: &RetryBudget<'_>) -> Result<PooledClient, Failure> {
        PooledConnection::new(budget, || self.connect()).map(PooledClient)
    }

    async fn connect(&self) -> Result<Client, Failure> {
        self.config.client_with_window(self.window())
    }
}

impl PooledClient {
    /// The client itself.
    pub fn client(&self) -> &Client {
        self.0.client()
    }

    /// Runs a request on this thread until it ends, its budget is spent, or the call is cancelled.
    pub fn run<T>(
        &self,
        budget: &RetryBudget<'_>,
        request: impl Future<Output = Result<T, Failure>>,
    ) -> Result<T, Failure> {
        self.0.run(budget, request)
    }

    /// The next bytes of a body; none at its end.
    pub async fn next_chunk(
        &self,
        response: &mut Response,
        budget: &RetryBudget<'_>,
    ) -> Result<Bytes, Failure> {
        let bytes = read_chunk(response, self.client().stall()).await?;
        budget.received(bytes.len() as u64);
        // Without a yield, a fast body would keep the event loop from its checks.
        budget.check()?;
        Ok(bytes)
    }

    /// Reads a body, which must have `len` bytes if that is known. `body` has the bytes that
    /// arrived, also when this fails.
    pub async fn read_body(
        &self,
        mut response: Response,
        body: &mut Vec<u8>,
        len: Option<u64>,
        budget: &RetryBudget<'_>,
    ) -> Result<(), Failure> {
        loop {
            let bytes = self.next_chunk(&mut response, budget).await?;
            body.extend_from_slice(&bytes);
            let found = body.len() as u64;
            match len {
                Some(len) if found > len || (bytes.is_empty() && found < len) => {
                    let what = format!("expected a response body of {len} bytes, found {found}");
                    return Err(Failure::transient(ErrorKind::UnexpectedEof, what));
                }
                _ if bytes.is_empty() => return Ok(()),
                _ => {}
            }
        }
    }

    /// Reads the body of a range into buffers. `done` is the position after the last byte that
    /// arrived, also when this fails.
    pub async fn scatter(
        &self,
        mut response: Response,
        range: ByteRange,
        buffers: &mut Buffers<'_>,
        done: &mut u64,
        budget: &RetryBudget<'_>,
    ) -> Result<(), Failure> {
        let too_long = || {
            let what =
                format!("the response body is too long: expected it to end at byte {}", range.end);
            Failure::permanent(ErrorKind::InvalidData, what)
        };
        while *done < range.end {
            let bytes = self.next_chunk(&mut response, budget).await?;
            if bytes.is_empty() {
                let what = format!("the response body ended at byte {done} of {}", range.end);
                return Err(Failure::transient(ErrorKind::UnexpectedEof, what));
            }
            if bytes.len() as u64 > range.end - *done {
                return Err(too_long());
            }
            *done += buffers.fill_from(&bytes) as u64;
            buffers.arrived(bytes.len() as u64);
        }
        // The end of the body is read too, so that the connection can be used again. If it breaks
        // there, all bytes have come.
        match self.next_chunk(&mut response, budget).await {
            Ok(more) if !more.is_empty() => Err(too_long()),
            _ => Ok(()),
        }
    }
}
