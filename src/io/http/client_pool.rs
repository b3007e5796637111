//! A pool of the clients of one source and its siblings, and reading of response bodies.

use std::io::ErrorKind;
use std::ops::AsyncFnOnce;
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
    TransportOptions, read_chunk, timer,
};
use crate::mem::Buffers;

/// The clients of one source and its siblings.
pub struct ClientPool {
    pool: ConnectionPool<Client>,
    config: ClientConfig,
    /// True if the server is one of `https://`.
    pub tls: bool,
    /// The limit of the bytes that a server may send ahead on a connection.
    pub limit: Arc<ConnectionLimit>,
    /// Bytes that servers may send ahead on the present connections.
    window: AtomicU32,
    /// Measurements of the server's speed.
    pub speed: ServerSpeed,
    /// The turns of requests.
    pub turns: Turns,
}

impl ClientPool {
    /// Reads the certificates. Invalid certificates are an error only if `tls` is true, which needs
    /// them at once.
    pub fn new(options: &TransportOptions, tls: bool) -> Result<Self, String> {
        let config = ClientConfig::new(options, tls)?;
        let (pool, window) = (ConnectionPool::default(), AtomicU32::new(HTTP2_WINDOW));
        let (speed, turns) = (ServerSpeed::default(), Turns::default());
        Ok(ClientPool { pool, config, tls, limit: Arc::default(), window, speed, turns })
    }

    /// Bytes that a server may send ahead on each connection.
    pub fn window(&self) -> u32 {
        u32::try_from(self.limit.bytes()).unwrap_or(u32::MAX).min(HTTP2_WINDOW)
    }

    /// Lends a client for a request, which runs on this thread until it ends, its budget is spent,
    /// or the call is cancelled.
    pub fn with_client<T>(
        &self,
        budget: &RetryBudget<'_>,
        request: impl AsyncFnOnce(&Client) -> Result<T, Failure>,
    ) -> Result<T, Failure> {
        let connection = self.take(budget)?;
        let result = connection.events.run(budget, request(&connection.client));
        // Another client may have a connection, where a server accepts no further one.
        if !result.as_ref().is_err_and(|failure| failure.status.is_none()) {
            self.pool.give_back(connection);
        }
        result
    }

    /// Takes a client out of the pool.
    pub fn take(&self, budget: &RetryBudget<'_>) -> Result<PooledConnection<Client>, Failure> {
        let window = self.window();
        if self.window.fetch_min(window, Ordering::Relaxed) > window {
            // Connections that allow more are closed.
            self.pool.clear();
        }
        self.pool.take(budget, async || self.config.build(self.window(), true))
    }

    /// Makes a client without connections.
    pub fn connect(&self, budget: &RetryBudget<'_>) -> Result<PooledConnection<Client>, Failure> {
        self.pool.connect(budget, async || self.config.build(self.window(), true))
    }
}

/// The next bytes of a body; none at its end.
pub async fn next_chunk(
    response: &mut Response,
    budget: &RetryBudget<'_>,
) -> Result<Bytes, Failure> {
    let bytes = read_chunk(response, budget.options.stall).await?;
    budget.received(bytes.len() as u64);
    if let Some(pause) = budget.pace(bytes.len() as u64) {
        timer::sleep(pause).await;
    }
    // Without a yield, a fast body would keep the event loop from its checks.
    budget.check()?;
    Ok(bytes)
}

/// Reads the body of a range into buffers. `done` is the position after the last byte that arrived,
/// also when this fails.
pub async fn scatter(
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
        let bytes = next_chunk(&mut response, budget).await?;
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
    // The end of the body is read too, so that the connection can be used again. If it breaks there,
    // all bytes have come.
    match next_chunk(&mut response, budget).await {
        Ok(more) if !more.is_empty() => Err(too_long()),
        _ => Ok(()),
    }
}
