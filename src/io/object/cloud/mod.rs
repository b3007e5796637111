//! `gs://bucket/key`, `az://container/blob` and `abfss://`: reads and uploads.

mod address;
mod authorize;
mod azure;
mod azure_account;
mod bucket;
mod create;
mod google;
mod read;
mod request;

pub use create::create;
pub use read::{display_address, open};
