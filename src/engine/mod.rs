//! The read engine and the write engine, which move bytes between sources, memory and sinks. Both
//! are independent of the file format.

pub mod cold;
pub mod concurrency;
pub mod download;
mod file_handles;
pub mod landing;
#[cfg(all(test, feature = "s3"))]
mod long_downloads;
mod order;
pub mod plan;
pub mod read;
mod read_task;
mod reading;
mod sources;
pub mod target;
pub mod worker_range;
pub mod workers;
pub mod write;
