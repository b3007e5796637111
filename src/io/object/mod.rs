//! Objects of S3, Google Cloud Storage and Azure: reads by ranges, uploads in parts or blocks.

mod checksum;
#[cfg(feature = "clouds")]
pub mod cloud;
#[cfg(feature = "s3")]
pub mod s3;
mod upload;

pub use upload::UploadSink;
