//! Where bytes are written to. Every sink can be written at a position.

mod alike;
mod file;
mod hidden;
mod temporary;
#[cfg(any(feature = "clouds", feature = "s3"))]
mod upload;
mod write_at;

use std::ffi::OsStr;

pub use file::FileSink;
#[cfg(any(feature = "clouds", feature = "s3"))]
pub use upload::UploadSink;
pub use write_at::{Unclosed, WriteAt, write_all_at};

use crate::cancel::Cancel;
use crate::error::{Error, Result};
#[cfg(any(feature = "clouds", feature = "s3"))]
use crate::io::net::NetOptions;
#[cfg(feature = "s3")]
use crate::io::net::s3::S3Options;
use crate::io::source::address::{self, Address};

/// Begins a file at an address or a local path, with the options of the environment.
pub fn create(uri: &str, cancel: &dyn Cancel) -> Result<Box<dyn WriteAt>> {
    let scheme = match address::parse(OsStr::new(uri))? {
        Address::Path(path) => return Ok(Box::new(FileSink::create(&path)?)),
        Address::Scheme(scheme) => scheme,
    };
    match scheme.as_str() {
        #[cfg(feature = "s3")]
        "s3" => {
            let options = NetOptions::from_environment()?;
            Ok(Box::new(UploadSink::s3(uri, &S3Options::default(), options, cancel)?))
        }
        #[cfg(feature = "clouds")]
        "gs" | "az" | "abfs" | "abfss" => {
            Ok(Box::new(UploadSink::clouds(uri, NetOptions::from_environment()?, cancel)?))
        }
        scheme => {
            let _ = cancel;
            Err(unwritable(scheme))
        }
    }
}

/// Why nothing can be written to addresses with a scheme.
pub fn unwritable(scheme: &str) -> Error {
    let instead = match scheme {
        "redis" | "rediss" => "TensorDeserializer.to_redis copies files there",
        "s3" => "this build has no S3",
        "gs" | "az" | "abfs" | "abfss" => "this build has neither Google nor Azure",
        "hf" => "write a local file, and upload it with huggingface_hub",
        _ => "upload a local file by other means, or write to s3://, gs:// or az://",
    };
    Error::InvalidArgument(format!("`{scheme}://` addresses cannot be written: {instead}"))
}
