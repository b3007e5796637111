//! `s3://bucket/key`: the choice of the server, signed reads, and uploads by AWS's SDK.

mod address;
mod endpoint;
mod read;
mod refusal;
mod resolve;
mod server_choice;
mod upload;

pub use endpoint::{DEFAULT_READ_ENDPOINT, DEFAULT_WRITE_ENDPOINT};
#[cfg(test)]
pub(crate) use read::signed_until;
pub use read::{display_address, open};
pub use upload::create;
