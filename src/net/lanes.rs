//! Event loops: one for each thread that talks to a server at the moment.
//!
//! A thread polls its own connection, so that bytes do not change threads between the socket and
//! the caller's memory. Lanes are handed from thread to thread with their open connections, and
//! are not used in a process that was forked off.

use std::future::Future;
use std::io::{self, ErrorKind};
use std::sync::{Mutex, PoisonError};
use std::time::Duration;

use tokio::runtime::{Builder, Runtime};

use super::Failure;
use crate::sys::process::Inherited;

/// How often a wait looks whether the call was given up.
const POLL: Duration = Duration::from_millis(100);

/// An event loop, and the client whose connections live on it. A child that was forked off leaves
/// it alone: its sockets are registered with a poller that is the parent's too.
pub struct Lane<C>(Inherited<(Runtime, C)>);

impl<C> Lane<C> {
    /// What talks to the server.
    pub fn client(&self) -> &C {
        &self.0.1
    }

    /// Runs a request on this thread, until it ends or `go_on` says no.
    pub fn run<T>(
        &self,
        go_on: &dyn Fn() -> bool,
        request: impl Future<Output = Result<T, Failure>>,
    ) -> Result<T, Failure> {
        run_on(&self.0.0, go_on, request)
    }
}

fn run_on<T>(
    runtime: &Runtime,
    go_on: &dyn Fn() -> bool,
    request: impl Future<Output = Result<T, Failure>>,
) -> Result<T, Failure> {
    runtime.block_on(async {
        let mut request = std::pin::pin!(request);
        loop {
            if let Ok(result) = tokio::time::timeout(POLL, &mut request).await {
                return result;
            }
            if !go_on() {
                return Err(Failure::lasting(ErrorKind::Interrupted, "given up"));
            }
        }
    })
}

/// The lanes that no thread uses at the moment.
pub struct Lanes<C>(Mutex<Vec<Lane<C>>>);

impl<C> Default for Lanes<C> {
    fn default() -> Self {
        Lanes(Mutex::default())
    }
}

impl<C> Lanes<C> {
    /// Gives a lane away, a new one if there is none. `make` builds its client on its event loop.
    pub fn take<F: Future<Output = Result<C, Failure>>>(
        &self,
        go_on: &dyn Fn() -> bool,
        make: impl FnOnce() -> F,
    ) -> Result<Lane<C>, Failure> {
        loop {
            let idle = self.0.lock().unwrap_or_else(PoisonError::into_inner).pop();
            match idle {
                Some(lane) if lane.0.maker().is_here() => return Ok(lane),
                Some(_) => {}
                None => {
                    let runtime = new_runtime()
                        .map_err(|e| Failure::lasting(e.kind(), format!("an event loop: {e}")))?;
                    let client = run_on(&runtime, go_on, make())?;
                    return Ok(Lane(Inherited::new((runtime, client))));
                }
            }
        }
    }

    /// Takes a lane back.
    pub fn put(&self, lane: Lane<C>) {
        self.0.lock().unwrap_or_else(PoisonError::into_inner).push(lane);
    }
}

/// An event loop for the thread that runs it.
pub fn new_runtime() -> io::Result<Runtime> {
    Builder::new_current_thread().enable_all().build()
}
