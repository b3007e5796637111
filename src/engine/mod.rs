//! The read engine and the write engine, which move bytes between sources, memory and sinks. Both
//! are independent of the file format.

pub mod completion;
pub mod concurrency;
pub mod destination;
pub mod download;
mod file_handles;
pub mod load_options;
#[cfg(all(test, feature = "s3"))]
mod long_downloads;
pub mod page_cache;
pub mod plan;
pub mod read;
mod read_jobs;
mod read_request;
mod read_task;
mod sources;
pub mod worker_range;
pub mod workers;
pub mod write;
