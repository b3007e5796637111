//! Moves bytes: one engine that reads and one that writes, whatever the format and wherever the
//! bytes come from and go to.

pub mod cold;
pub mod crew;
pub mod download;
#[cfg(all(test, feature = "s3"))]
mod long_downloads;
mod order;
pub mod pace;
pub mod plan;
pub mod read;
pub mod target;
mod way;
pub mod workers;
pub mod write;
