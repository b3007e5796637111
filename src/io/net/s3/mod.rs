//! What reading and writing objects have in common.

mod config;
mod connector;
mod credentials;
mod name;

pub use config::{DEFAULT_READ_ENDPOINT, DEFAULT_WRITE_ENDPOINT, S3Options};
pub(crate) use config::{Resolved, resolve};
pub(crate) use connector::{Connector, OnDemand, failure};
pub(crate) use credentials::{Keys, good_until};
pub(crate) use name::ObjectName;

use crate::cancel::Cancel;
use crate::environment::reading;
use crate::error::Result;
use crate::io::net::{EventLoop, NetOptions, Tries};

/// The SDK looks into the environment whenever it is polled.
pub(crate) async fn guarded<T>(work: impl Future<Output = T>) -> T {
    let mut work = std::pin::pin!(work);
    std::future::poll_fn(|context| reading(|| work.as_mut().poll(context))).await
}

/// Waits for what is found out before an object is opened: credentials may come from a server.
pub(crate) fn wait_for<T>(
    shown: &str,
    options: &NetOptions,
    cancel: &dyn Cancel,
    work: impl Future<Output = Result<T>>,
) -> Result<T> {
    let tries = Tries::new("opening", options, cancel);
    let found =
        EventLoop::new().and_then(|events| events.run(&tries, async { Ok(guarded(work).await) }));
    match found {
        Ok(found) => found,
        Err(failure) => Err(tries.last(failure, shown)),
    }
}
