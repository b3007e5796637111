//! What is found out before an object of Google Cloud Storage or a blob of Azure is read or
//! written.

mod account;
mod azure;
mod connector;
mod google;
mod keys;
mod object;
mod settings;
mod signing;

pub use keys::{Credential, Keys};
pub use object::{Cloud, Object};
pub use signing::AZURE_VERSION;

use reqwest::Url;

use super::{NetOptions, can_be_sent};
use crate::error::{Error, Result};
use settings::Who;

/// Bytes of the longest name: the clouds take 1024 characters. A request's address has an end.
const LONGEST_KEY: usize = 4096;

/// Where an object is, and who asks for it.
pub struct Resolved {
    /// The address that names of the bucket or container are added to.
    pub bucket: Url,
    /// Azure's.
    pub account: String,
    /// None: anybody.
    pub keys: Option<Keys>,
}

/// Finds out everything. A server is asked only whether this machine is somebody, where nothing else
/// says who asks.
pub async fn resolve(object: &Object, net: &NetOptions) -> Result<Resolved> {
    let found = match object.cloud {
        Cloud::Google => google::settings(object, net)?,
        Cloud::Azure => azure::settings(object, net)?,
    };
    let keys = match found.who {
        Who::Anybody => None,
        Who::Named => Some(found.keys),
        Who::Machine => found.keys.are_there().await.then_some(found.keys),
    };
    let root = found.endpoint;
    let bad = || Error::InvalidArgument(format!("`{root}` is no address of a server"));
    let mut bucket = root.clone();
    bucket.path_segments_mut().map_err(|()| bad())?.pop_if_empty().push(&object.bucket);
    Ok(Resolved { bucket, account: found.account, keys })
}

/// The address of an object.
pub fn address(bucket: &Url, key: &str) -> std::result::Result<Url, String> {
    if !can_be_sent(key) || key.len() > LONGEST_KEY {
        return Err(format!("{key:?} is no name of an object"));
    }
    let mut url = bucket.clone();
    let path = url.path_segments_mut();
    path.map_err(|()| format!("`{bucket}` is no address of a server"))?.extend(key.split('/'));
    Ok(url)
}

/// The error of somebody who did not say who it is.
pub fn as_anybody(error: Error, cloud: Cloud) -> Error {
    let name = match cloud {
        Cloud::Google => "GOOGLE_APPLICATION_CREDENTIALS",
        Cloud::Azure => "AZURE_STORAGE_ACCOUNT_KEY",
    };
    match error {
        Error::Io { action, uri, error } => {
            let what = format!("{error} (no credentials were found, as by {name})");
            Error::io(action, &uri, std::io::Error::new(error.kind(), what))
        }
        other => other,
    }
}
