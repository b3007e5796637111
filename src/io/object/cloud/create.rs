//! Creating objects of Google and blobs of Azure.

use std::sync::Arc;

use super::address::Cloud;
use super::azure::Blob;
use super::google::GoogleObject;
use super::request::CloudObject;
use crate::cancel::Cancel;
use crate::error::Result;
use crate::io::OpenOptions;
use crate::io::object::upload::{UploadProtocol, UploadSink};

/// Creates an object or a blob. Finds the server and the credentials; nothing is sent before a part
/// is complete.
pub fn create(uri: &str, options: &OpenOptions, cancel: &dyn Cancel) -> Result<UploadSink> {
    let at = CloudObject::new(uri, options.transport.clone(), cancel)?;
    let object: Arc<dyn UploadProtocol> = match at.cloud {
        Cloud::Google => Arc::new(GoogleObject::new(at)?),
        Cloud::Azure => Arc::new(Blob::new(at)?),
    };
    UploadSink::new(object, &options.transport)
}
