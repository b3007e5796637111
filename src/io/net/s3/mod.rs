//! What reading and writing objects have in common.

mod config;
mod connector;
mod credentials;
mod name;

pub use config::{DEFAULT_READ_ENDPOINT, DEFAULT_WRITE_ENDPOINT, S3Options};
pub(crate) use config::{Resolved, resolve};
pub(crate) use connector::{Connector, OnDemand, failure};
#[cfg(test)]
pub(crate) use credentials::found_on;
pub(crate) use credentials::{Keys, MARGIN, again, good_until};
pub(crate) use name::ObjectName;
