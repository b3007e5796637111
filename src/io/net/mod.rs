//! What all servers have in common: options, tries, and the threads' connections.

mod connections;
mod options;
mod retry;
#[cfg(feature = "s3")]
pub mod s3;
mod tls;

#[cfg(feature = "s3")]
pub(crate) use connections::EventLoop;
pub(crate) use connections::{ConnectionPool, PooledConnection};
pub use options::{NetOptions, Trust};
pub(crate) use retry::{Failure, Tries};
#[cfg(feature = "http")]
pub(crate) use tls::Protocols;
pub(crate) use tls::Tls;

/// An address as messages show it: queries, fragments and users may be secrets.
pub(crate) fn show_text(address: &str) -> &str {
    if address.contains('@') {
        return "...";
    }
    address.split(['?', '#']).next().unwrap_or(address)
}
