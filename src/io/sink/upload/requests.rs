//! Requests by which an object is written, each tried until it succeeds.

use std::sync::Arc;
use std::sync::atomic::AtomicU64;
use std::time::Instant;

use crate::cancel::Cancel;
use crate::error::{Error, Result};
use crate::io::net::{ConnectionPool, Failure, NetOptions, Tries};
use crate::io::source::http::client::{Certificates, connect};
use crate::sys::clock;

/// The connections of one object. A `C` makes requests, and the number counts the bytes that it sends.
pub struct Requests<C> {
    pub shown: String,
    pub options: NetOptions,
    certificates: Certificates,
    pool: ConnectionPool<(C, Arc<AtomicU64>)>,
}

impl<C: Clone> Requests<C> {
    /// For the object that messages call so. `tls` is whether its address begins with `https:`.
    pub fn new(shown: String, options: NetOptions, tls: bool) -> Result<Self> {
        let certificates = Certificates::read(&options, tls).map_err(Error::InvalidArgument)?;
        Ok(Requests { shown, options, certificates, pool: ConnectionPool::default() })
    }

    /// Makes a request until it succeeds, or why it does not. `wrap` makes a new client a `C`;
    /// `refused` is told of a request that is to be signed anew, and since when its credentials were
    /// used.
    pub fn ask<T, F: Future<Output = Result<T, Failure>>>(
        &self,
        cancel: &dyn Cancel,
        wrap: impl Fn(reqwest::Client) -> (C, Arc<AtomicU64>),
        refused: impl Fn(Instant),
        make: impl Fn(C, Arc<AtomicU64>) -> F,
    ) -> Result<T> {
        let mut tries = Tries::new("writing", &self.options, cancel);
        loop {
            let begun = clock::now();
            let connection = self
                .pool
                .take(&tries, || async { Ok(wrap(connect(&self.options, &self.certificates)?)) });
            let outcome = connection.and_then(|connection| {
                let (client, sent) = connection.client();
                tries.watch(sent);
                let outcome = connection.run(&tries, make(client.clone(), Arc::clone(sent)));
                self.pool.put(connection);
                outcome
            });
            match outcome {
                Ok(done) => return Ok(done),
                Err(failure) if tries.renews(&failure) => {
                    refused(begun);
                    // Clients may sign for the region that was wrong.
                    self.pool.clear();
                }
                Err(failure) => tries.wait(failure, 0, &self.shown)?,
            }
        }
    }
}
