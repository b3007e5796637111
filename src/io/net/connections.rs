//! Event loops: one for each thread that talks to a server at the moment.
//!
//! A thread polls its own connection, so that bytes do not change threads between the socket and
//! the caller's memory. Event loops are handed from thread to thread with their open connections, and
//! are not used in a process that was forked off.

use std::future::Future;
use std::io;

use tokio::runtime::{Builder, Runtime};

use super::{Failure, Tries, timer};
use crate::cancel::POLL;
use crate::environment::reading;
use crate::sys::brief::Brief;
use crate::sys::process::Inherited;

/// An event loop of the thread that runs it.
pub struct EventLoop(Option<Runtime>);

impl EventLoop {
    /// A new one.
    pub fn new() -> Result<Self, Failure> {
        let runtime = reading(|| Builder::new_current_thread().enable_all().build());
        let failed = |e: io::Error| Failure::lasting(e.kind(), format!("an event loop: {e}"));
        Ok(EventLoop(Some(runtime.map_err(failed)?)))
    }

    /// Runs a request on this thread, until it ends or may not go on.
    pub fn run<T>(
        &self,
        tries: &Tries<'_>,
        request: impl Future<Output = Result<T, Failure>>,
    ) -> Result<T, Failure> {
        // Answers that come at once would never let the loop below look.
        tries.check()?;
        let ended = || Failure::lasting(io::ErrorKind::Other, "an event loop that has ended");
        self.0.as_ref().ok_or_else(ended)?.block_on(async {
            let mut request = std::pin::pin!(request);
            loop {
                if let Ok(result) = timer::timeout(POLL, &mut request).await {
                    return result;
                }
                tries.check()?;
            }
        })
    }
}

impl Drop for EventLoop {
    fn drop(&mut self) {
        if let Some(runtime) = self.0.take() {
            // The resolution of a name cannot be stopped: its thread is left behind.
            runtime.shutdown_background();
        }
    }
}

/// An event loop, and the client whose connections live on it. A child that was forked off leaves
/// it alone: its sockets are registered with a poller that is the parent's too.
pub struct PooledConnection<C>(Inherited<(EventLoop, C)>);

impl<C> PooledConnection<C> {
    /// A new one. `make` builds its client on its event loop.
    pub fn new<F: Future<Output = Result<C, Failure>>>(
        tries: &Tries<'_>,
        make: impl FnOnce() -> F,
    ) -> Result<Self, Failure> {
        let events = EventLoop::new()?;
        let client = events.run(tries, make())?;
        Ok(PooledConnection(Inherited::new((events, client))))
    }

    /// What talks to the server.
    pub fn client(&self) -> &C {
        &self.0.1
    }

    /// Runs a request on this thread, until it ends or may not go on.
    pub fn run<T>(
        &self,
        tries: &Tries<'_>,
        request: impl Future<Output = Result<T, Failure>>,
    ) -> Result<T, Failure> {
        self.0.0.run(tries, request)
    }
}

/// Connections that no thread uses at the moment.
pub struct ConnectionPool<C>(Brief<Vec<PooledConnection<C>>>);

impl<C> Default for ConnectionPool<C> {
    fn default() -> Self {
        ConnectionPool(Brief::new(Vec::new()))
    }
}

impl<C> ConnectionPool<C> {
    /// Gives a connection away, a new one if there is none. `make` builds its client on its event loop.
    pub fn take<F: Future<Output = Result<C, Failure>>>(
        &self,
        tries: &Tries<'_>,
        make: impl FnOnce() -> F,
    ) -> Result<PooledConnection<C>, Failure> {
        loop {
            let idle = self.0.lock().pop();
            match idle {
                Some(connection) if connection.0.maker().is_here() => return Ok(connection),
                Some(_) => {}
                None => return PooledConnection::new(tries, make),
            }
        }
    }

    /// Closes those that are here.
    pub fn clear(&self) {
        let all = std::mem::take(&mut *self.0.lock());
        drop(all);
    }

    /// Takes a connection back.
    pub fn put(&self, connection: PooledConnection<C>) {
        self.0.lock().push(connection);
    }
}

#[cfg(test)]
#[cfg(any(feature = "clouds", feature = "s3"))]
#[allow(clippy::unwrap_used)]
mod tests {
    use std::time::Duration;

    use super::*;
    use crate::io::net::NetOptions;
    use crate::sys::clock;

    #[test]
    fn a_request_that_does_not_end_is_given_up_after_what_all_tries_may_take() {
        clock::simulate();
        let options = NetOptions::from_environment().unwrap();
        let options = NetOptions { total: Duration::from_secs(3600), ..options };
        // The loop asks whenever so much has passed.
        let passes = || {
            clock::pass(POLL);
            Ok(())
        };
        let (begun, tries) = (clock::now(), Tries::new("reading", &options, &passes));
        let given_up = EventLoop::new().unwrap().run(&tries, async {
            timer::pause();
            std::future::pending::<Result<(), Failure>>().await
        });
        assert_eq!(given_up.unwrap_err().error.kind(), io::ErrorKind::TimedOut);
        assert_eq!(clock::since(begun).as_secs() / 60, 60);
    }
}
