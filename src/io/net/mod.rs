//! What all servers have in common: options, tries, and the threads' connections.

#[cfg(feature = "clouds")]
pub(crate) mod clouds;
mod connections;
mod options;
#[cfg(any(feature = "clouds", feature = "s3"))]
mod place;
mod retry;
#[cfg(feature = "s3")]
pub mod s3;
#[cfg(any(feature = "clouds", feature = "s3"))]
mod sending;
#[cfg(test)]
#[cfg(any(feature = "clouds", feature = "s3"))]
pub(crate) mod simulated;
pub(crate) mod timer;
mod tls;

pub(crate) use connections::{ConnectionPool, PooledConnection};
pub use options::{NetOptions, Trust};
pub(crate) use retry::{Failure, Tries};
#[cfg(any(feature = "clouds", feature = "s3"))]
pub(crate) use sending::{Counted, unless_silent};
#[cfg(feature = "http")]
pub(crate) use tls::Protocols;
pub(crate) use tls::Tls;

#[cfg(any(feature = "clouds", feature = "s3"))]
use crate::{cancel::Cancel, environment::reading, error::Result};

/// An address as messages show it: queries, fragments and users may be secrets.
pub(crate) fn show_text(address: &str) -> &str {
    if address.contains('@') {
        return "...";
    }
    address.split(['?', '#']).next().unwrap_or(address)
}

/// Whether an address can hold the name of an object as it is. Parsers of addresses drop tabs and ends
/// of lines, and what is left may lead elsewhere.
#[cfg(any(feature = "clouds", feature = "s3"))]
pub(crate) fn can_be_sent(key: &str) -> bool {
    !key.contains(char::is_control) && !key.split('/').any(|part| matches!(part, "." | ".."))
}

/// Libraries that find credentials look into the environment whenever they are polled.
#[cfg(any(feature = "clouds", feature = "s3"))]
pub(crate) async fn guarded<T>(work: impl Future<Output = T>) -> T {
    let mut work = std::pin::pin!(work);
    std::future::poll_fn(|context| reading(|| work.as_mut().poll(context))).await
}

/// Waits for what is found out before an object is opened: credentials may come from a server.
#[cfg(any(feature = "clouds", feature = "s3"))]
pub(crate) fn wait_for<T>(
    shown: &str,
    options: &NetOptions,
    cancel: &dyn Cancel,
    work: impl Future<Output = Result<T>>,
) -> Result<T> {
    let tries = Tries::new("opening", options, cancel);
    let found = connections::EventLoop::new()
        .and_then(|events| events.run(&tries, async { Ok(guarded(work).await) }));
    match found {
        Ok(found) => found,
        Err(failure) => Err(tries.last(failure, shown)),
    }
}
