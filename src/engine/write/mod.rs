//! The write engine: the bytes of tensors come from their origins, and one code path hashes,
//! encrypts and writes them.

mod chunk;
mod copies;
mod feed;
mod item;
mod jobs;
mod origin;
mod pass;
mod run;
#[cfg(test)]
mod tests;

pub use item::Item;
pub use origin::{HostCopy, Origin};
pub use run::{WriteOptions, write_tensors};
