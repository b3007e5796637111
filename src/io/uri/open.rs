//! Opening and creating what an address names.

use std::ffi::OsStr;
use std::sync::Arc;

use super::scheme::{Address, Service, parse};
use super::target::create_file;
use crate::cancel::Cancel;
use crate::error::{Error, Result};
use crate::io::local::FileSource;
#[cfg(any(feature = "clouds", feature = "s3"))]
use crate::io::object::{self, UploadSink};
use crate::io::{self, OpenOptions, ReadAt, WriteAt};

/// Opens an address or a local path for reading, without a request if the head of its file is
/// cached.
pub fn open(uri: &str, options: &OpenOptions, cancel: &dyn Cancel) -> Result<Arc<dyn ReadAt>> {
    let scheme = match parse(OsStr::new(uri))? {
        Address::Path(path) => return Ok(Arc::new(FileSource::open(&path)?)),
        Address::Server(scheme) => scheme,
    };
    match scheme.service {
        #[cfg(feature = "http")]
        Service::Http => io::http::open(uri, options, cancel),
        #[cfg(feature = "s3")]
        Service::S3 => object::s3::open(uri, options, cancel),
        #[cfg(feature = "hf")]
        Service::Hub => io::hf::open(uri, options, cancel),
        #[cfg(feature = "clouds")]
        Service::Cloud => object::cloud::open(uri, options, cancel),
        #[cfg(feature = "redis")]
        Service::Redis => io::redis::open(uri, &options.transport, cancel),
        #[allow(unreachable_patterns)] // With all features there is no other.
        _ => Err(Error::Unsupported(format!(
            "cannot open `{}://` addresses: this build was made without that feature",
            scheme.name
        ))),
    }
}

/// Creates an object of a server.
#[cfg(any(feature = "clouds", feature = "s3"))]
pub fn create_object(uri: &str, options: &OpenOptions, cancel: &dyn Cancel) -> Result<UploadSink> {
    match parse(OsStr::new(uri))? {
        Address::Server(scheme) => match scheme.service {
            #[cfg(feature = "s3")]
            Service::S3 => object::s3::create(uri, options, cancel),
            #[cfg(feature = "clouds")]
            Service::Cloud => object::cloud::create(uri, options, cancel),
            _ => Err(scheme.unwritable_error()),
        },
        Address::Path(path) => Err(Error::InvalidArgument(format!(
            "expected the address of an object, found the path `{}`",
            path.display()
        ))),
    }
}

/// Creates a file at an address or a local path.
pub fn create(uri: &str, options: &OpenOptions, cancel: &dyn Cancel) -> Result<Box<dyn WriteAt>> {
    match parse(OsStr::new(uri))? {
        Address::Path(path) => Ok(Box::new(create_file(&path)?)),
        #[cfg(any(feature = "clouds", feature = "s3"))]
        Address::Server(_) => Ok(Box::new(create_object(uri, options, cancel)?)),
        #[cfg(not(any(feature = "clouds", feature = "s3")))]
        Address::Server(scheme) => Err(scheme.unwritable_error()),
    }
}

/// The address for messages and for cached heads, without secrets. None for schemes without cached
/// heads.
pub fn display_address(uri: &str) -> Option<String> {
    let Ok(Address::Server(scheme)) = parse(OsStr::new(uri)) else { return None };
    match scheme.service {
        #[cfg(feature = "http")]
        Service::Http => io::http::display_address(uri),
        #[cfg(feature = "s3")]
        Service::S3 => object::s3::display_address(uri),
        #[cfg(feature = "clouds")]
        Service::Cloud => object::cloud::display_address(uri),
        _ => None,
    }
}
