//! Where bytes come from and where they go.

pub mod cache;
#[cfg(any(feature = "http", feature = "redis"))]
pub mod net;
pub mod sink;
pub mod source;
