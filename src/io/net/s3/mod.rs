//! What reading and writing objects have in common.

mod config;
mod connector;
mod credentials;

pub use config::{DEFAULT_READ_ENDPOINT, DEFAULT_WRITE_ENDPOINT, S3Options};
pub(crate) use config::{Resolved, resolve};
pub(crate) use connector::{Connector, OnDemand, failure};
pub(crate) use credentials::{Keys, good_until};

use crate::cancel::Cancel;
use crate::environment::reading;
use crate::error::{Error, Result};
use crate::io::net::{EventLoop, NetOptions, Tries};

/// Bucket and key of `s3://bucket/key`.
pub(crate) fn parse(uri: &str) -> Result<(&str, &str)> {
    let rest = uri.split_once("://").map_or(uri, |(_, rest)| rest);
    let rest = rest.split(['?', '#']).next().unwrap_or(rest);
    let (bucket, key) = rest.split_once('/').unwrap_or((rest, ""));
    let key = key.trim_start_matches('/');
    if bucket.is_empty() || key.is_empty() {
        let what = format!("expected s3://bucket/key, found `{}`", super::show_text(uri));
        return Err(Error::InvalidArgument(what));
    }
    Ok((bucket, key))
}

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
