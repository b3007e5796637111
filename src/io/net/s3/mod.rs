//! What reading and writing objects have in common.

mod config;
mod connector;
mod credentials;
mod endpoint;
mod failure;
mod name;

pub use config::S3Options;
pub(crate) use config::{Resolved, resolve};
pub(crate) use connector::{Connector, OnDemand};
#[cfg(test)]
pub(crate) use credentials::found_on;
pub(crate) use credentials::{MARGIN, again, good_until};
pub(crate) use endpoint::Server;
pub use endpoint::{DEFAULT_READ_ENDPOINT, DEFAULT_WRITE_ENDPOINT};
pub(crate) use failure::{Document, region_of};
pub(crate) use name::ObjectName;
