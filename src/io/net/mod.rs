//! What all servers have in common: options, tries, and the threads' connections.

mod connections;
mod options;
mod retry;
#[cfg(feature = "s3")]
pub mod s3;

#[cfg(feature = "s3")]
pub(crate) use connections::EventLoop;
pub(crate) use connections::{ConnectionPool, PooledConnection};
pub use options::{NetOptions, Trust};
pub(crate) use retry::{Failure, Tries};

/// An address as messages show it: queries, fragments and users may be secrets.
pub(crate) fn show_text(address: &str) -> &str {
    if address.contains('@') {
        return "...";
    }
    address.split(['?', '#']).next().unwrap_or(address)
}

/// Has rustls use the provider of cryptography that is compiled in, unless the program has chosen
/// another.
pub(crate) fn choose_tls_provider() {
    // An error is that it was done before.
    let _ = rustls::crypto::ring::default_provider().install_default();
}
