//! Event loops and the connections that live on them.
//!
//! A thread that talks to a server drives an event loop, so that bytes need not change threads
//! between the socket and the caller's memory. Many connections share event loops: each takes four
//! descriptors. A pool hands connections from thread to thread. A forked child does not use those of
//! its parent.

use std::io;
use std::ops::AsyncFnOnce;
use std::sync::{Arc, Weak};
use std::time::Duration;

use tokio::runtime::{Builder, Runtime};

use super::{Failure, RetryBudget, TransportOptions, timer};
use crate::cancel::{Cancel, POLL};
use crate::environment::read_guarded;
use crate::error::Result as CallResult;
use crate::sys::cpu_count;
use crate::sys::fork_safe_mutex::ForkSafeMutex;
use crate::sys::process::{DropInOwner, PerProcess};

/// Maximum number of event loops of one pool; more if there are more cores.
const MAX_LOOPS: usize = 8;
/// The interval at which a thread looks for an event loop that another thread makes.
const LOOP_WAIT: Duration = Duration::from_millis(1);

/// An event loop, which several threads may drive; None while it is dropped.
pub struct EventLoop(Option<Arc<Runtime>>);

impl EventLoop {
    /// Starts an event loop.
    pub fn new() -> Result<Self, Failure> {
        let runtime = read_guarded(|| Builder::new_current_thread().enable_all().build());
        let failed = |e: io::Error| Failure::permanent(e.kind(), format!("an event loop: {e}"));
        Ok(EventLoop(Some(Arc::new(runtime.map_err(failed)?))))
    }

    /// Runs a request on this thread until it ends, its budget is spent, or the call is cancelled.
    pub fn run<T>(
        &self,
        budget: &RetryBudget<'_>,
        request: impl Future<Output = Result<T, Failure>>,
    ) -> Result<T, Failure> {
        // A request that is ready at once would never reach the check below.
        budget.check()?;
        let ended = || Failure::permanent(io::ErrorKind::Other, "its event loop has ended");
        self.0.as_ref().ok_or_else(ended)?.block_on(async {
            let mut request = std::pin::pin!(request);
            loop {
                if let Ok(result) = timer::timeout(POLL, &mut request).await {
                    return result;
                }
                budget.check()?;
            }
        })
    }
}

impl Drop for EventLoop {
    fn drop(&mut self) {
        let Some(runtime) = self.0.take() else { return };
        // Lets a shared loop close the connections of a client that was dropped.
        if Arc::strong_count(&runtime) > 1 {
            runtime.block_on(tokio::task::yield_now());
        }
        Arc::into_inner(runtime).into_iter().for_each(Runtime::shutdown_background);
    }
}

/// An event loop, and the client whose connections live on it.
pub struct Connection<C> {
    pub client: C,
    pub events: EventLoop,
}

/// A forked child neither uses nor closes it: its sockets are registered with a poller that is the
/// parent's too.
pub type PooledConnection<C> = DropInOwner<Connection<C>>;

/// The event loops of a pool.
#[derive(Default)]
struct EventLoops {
    running: Vec<Weak<Runtime>>,
    /// The number of those that threads are making now.
    starting: usize,
}

/// Idle connections, and the event loops of all.
pub struct ConnectionPool<C> {
    idle: ForkSafeMutex<Vec<PooledConnection<C>>>,
    loops: PerProcess<ForkSafeMutex<EventLoops>>,
}

impl<C> Default for ConnectionPool<C> {
    fn default() -> Self {
        ConnectionPool { idle: ForkSafeMutex::new(Vec::new()), loops: PerProcess::new() }
    }
}

impl<C> ConnectionPool<C> {
    /// Takes an idle connection, or makes one; `make` builds its client on its event loop.
    pub fn take(
        &self,
        budget: &RetryBudget<'_>,
        make: impl AsyncFnOnce() -> Result<C, Failure>,
    ) -> Result<PooledConnection<C>, Failure> {
        let mut idle = std::iter::from_fn(|| self.idle.lock().pop());
        let found = idle.find(|connection| connection.owner().is_current());
        found.map_or_else(|| self.connect(budget, make), Ok)
    }

    /// Makes a client on a new event loop or, if there are many, on the one with the fewest.
    pub fn connect(
        &self,
        budget: &RetryBudget<'_>,
        make: impl AsyncFnOnce() -> Result<C, Failure>,
    ) -> Result<PooledConnection<C>, Failure> {
        let events = loop {
            if let Some(events) = self.event_loop()? {
                break events;
            }
            budget.check()?;
            std::thread::sleep(LOOP_WAIT);
        };
        let client = events.run(budget, make())?;
        Ok(DropInOwner::new(Connection { client, events }))
    }

    /// Returns a new event loop or, if there are many, the one with the fewest connections; None if
    /// other threads are still making all of them.
    fn event_loop(&self) -> Result<Option<EventLoop>, Failure> {
        {
            let mut loops = self.loops.get().lock();
            loops.running.retain(|events| events.strong_count() > 0);
            let count = loops.running.len().saturating_add(loops.starting);
            if count >= MAX_LOOPS.max(cpu_count()) {
                let fewest = loops.running.iter().min_by_key(|events| events.strong_count());
                return Ok(fewest.and_then(Weak::upgrade).map(|events| EventLoop(Some(events))));
            }
            loops.starting = loops.starting.saturating_add(1);
        }
        // Made without the lock: that may wait for the GIL, and a fork for the lock.
        let made = EventLoop::new();
        let mut loops = self.loops.get().lock();
        loops.starting = loops.starting.saturating_sub(1);
        loops
            .running
            .extend(made.iter().filter_map(|events| events.0.as_ref()).map(Arc::downgrade));
        made.map(Some)
    }

    /// Closes all idle connections.
    pub fn clear(&self) {
        let all = std::mem::take(&mut *self.idle.lock());
        drop(all);
    }

    /// Puts a connection back.
    pub fn give_back(&self, connection: PooledConnection<C>) {
        self.idle.lock().push(connection);
    }
}

/// Guards the environment while a future is polled: credential providers read it at any time.
pub async fn with_guarded_polls<T>(work: impl Future<Output = T>) -> T {
    let mut work = std::pin::pin!(work);
    std::future::poll_fn(|context| read_guarded(|| work.as_mut().poll(context))).await
}

/// Runs work that may ask servers, such as finding credentials, before the object `display_address`
/// is opened.
pub fn run_once<T>(
    display_address: &str,
    options: &TransportOptions,
    cancel: &dyn Cancel,
    work: impl Future<Output = CallResult<T>>,
) -> CallResult<T> {
    let budget = RetryBudget::new("opening", display_address, options, cancel);
    let done = EventLoop::new()
        .and_then(|events| events.run(&budget, async { Ok(with_guarded_polls(work).await) }));
    done.unwrap_or_else(|failure| Err(budget.error(failure)))
}

#[cfg(test)]
#[cfg(any(feature = "clouds", feature = "s3"))]
#[allow(clippy::unwrap_used)]
mod tests {
    use super::*;
    use crate::sys::clock;

    #[test]
    fn request_without_a_response_ends_with_its_budget() {
        clock::simulate();
        let options = TransportOptions::from_environment().unwrap();
        let options = TransportOptions { total: Duration::from_secs(3600), ..options };
        // The event loop asks each time that this much has passed.
        let passes = || {
            clock::advance(POLL);
            Ok(())
        };
        let begun = clock::now();
        let budget = RetryBudget::new("reading", "file", &options, &passes);
        let ended = EventLoop::new().unwrap().run(&budget, async {
            timer::pause();
            std::future::pending::<Result<(), Failure>>().await
        });
        assert_eq!(ended.unwrap_err().error.kind(), io::ErrorKind::TimedOut);
        assert_eq!(clock::since(begun).as_secs() / 60, 60);
    }
}
