//! Where bytes come from and where they go.

#[cfg(any(feature = "http", feature = "redis"))]
pub mod net;
pub mod sink;
pub mod source;
