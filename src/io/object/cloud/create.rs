//! Uploads to Google Cloud Storage and Azure.

use std::sync::Arc;
use std::sync::atomic::AtomicBool;

use super::address::{Cloud, CloudAddress};
use super::azure::{self, Blob};
use super::bucket::{object_url, resolve};
use super::google::{self, GoogleObject};
use super::request::CloudObject;
use crate::cancel::Cancel;
use crate::error::{Error, Result};
use crate::io::OpenOptions;
use crate::io::object::upload::{UploadProtocol, UploadRequests, UploadSink, new_mark};
use crate::io::transport::run_once;

/// Creates an object or a blob. Finds the server and the credentials; nothing is sent before a part
/// is complete.
pub fn create(uri: &str, options: &OpenOptions, cancel: &dyn Cancel) -> Result<UploadSink> {
    let address = CloudAddress::parse(uri)?;
    let (cloud, display_address) = (address.cloud, address.display_address.clone());
    let options = &options.transport;
    // Finding credentials may need the network, on machines of a cloud.
    let found = resolve(&address, options);
    let (url, identity) = run_once(&display_address, options, cancel, found)?;
    let url = object_url(&url, &address.key).map_err(Error::InvalidArgument)?;
    let names = (display_address.clone(), url.to_string());
    let tls = url.scheme() == "https";
    let requests = UploadRequests::new(display_address, options.clone(), tls)?;
    let checksums = AtomicBool::new(true);
    let object = |mark: &'static str| -> Result<_> {
        Ok(CloudObject { requests, cloud, url, identity, mark: (mark, new_mark()?), checksums })
    };
    let (object, max_part_len): (Arc<dyn UploadProtocol>, _) = match cloud {
        Cloud::Google => (Arc::new(GoogleObject(object(google::MARK)?)), google::MAX_PART_LEN),
        Cloud::Azure => (Arc::new(Blob(object(azure::MARK)?)), azure::MAX_PART_LEN),
    };
    UploadSink::new(object, names, max_part_len, options)
}
