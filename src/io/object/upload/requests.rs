//! The requests of one upload, each repeated until it succeeds.

use std::sync::Arc;
use std::sync::atomic::AtomicU64;
use std::time::Instant;

use crate::cancel::Cancel;
use crate::error::{Error, Result};
use crate::io::transport::{
    Client, ClientConfig, ConnectionPool, Failure, RetryBudget, TransportOptions, retry,
};
use crate::sys::clock;

/// The connections of one object. `C` is the client that makes requests; the number counts the
/// bytes that it sends.
pub struct UploadRequests<C> {
    pub display_address: String,
    pub options: TransportOptions,
    config: ClientConfig,
    pool: ConnectionPool<(C, Arc<AtomicU64>)>,
}

impl<C: Clone> UploadRequests<C> {
    /// The connections of an object. `display_address`: its address for messages. `tls`: true for
    /// `https://`.
    pub fn new(display_address: String, options: TransportOptions, tls: bool) -> Result<Self> {
        let config = ClientConfig::new(&options, tls).map_err(Error::InvalidArgument)?;
        Ok(UploadRequests { display_address, options, config, pool: ConnectionPool::default() })
    }

    /// Repeats a request until it succeeds. `wrap` makes a `C` of a new client; `invalidate` is
    /// called before a request is signed anew, with the time at which its credentials were used.
    pub fn send<T, F: Future<Output = Result<T, Failure>>>(
        &self,
        cancel: &dyn Cancel,
        wrap: impl Fn(Client) -> (C, Arc<AtomicU64>),
        invalidate: impl Fn(Instant),
        make: impl Fn(C, Arc<AtomicU64>) -> F,
    ) -> Result<T> {
        let budget = RetryBudget::new("writing", &self.display_address, &self.options, cancel);
        retry::run(&budget, || {
            let begun = clock::now();
            let connection = self.pool.take(&budget, async || Ok(wrap(self.config.client()?)))?;
            let (client, sent) = &connection.client;
            budget.track_upload(sent);
            let outcome = connection.events.run(&budget, make(client.clone(), Arc::clone(sent)));
            let paced = budget.sent_all(sent);
            self.pool.give_back(connection);
            paced?;
            if outcome.as_ref().is_err_and(|failure| failure.renewable) {
                invalidate(begun);
                // Clients may still sign for the wrong region.
                self.pool.clear();
            }
            outcome
        })
    }
}
