//! `s3://bucket/key`: the choice of the server, signed reads, and uploads by AWS's SDK.

mod address;
mod aws_settings;
mod clock;
mod endpoint;
mod read;
mod refusal;
mod resolve;
mod s3cfg;
mod server_choice;
mod sign;
mod upload;

pub use endpoint::{DEFAULT_READ_ENDPOINT, DEFAULT_WRITE_ENDPOINT};
pub use read::{display_address, open};
pub use s3cfg::S3Cfg;
pub use upload::create;
