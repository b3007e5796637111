//! What is found out before an object of Google Cloud Storage or a blob of Azure is read.

mod account;
mod azure;
mod connector;
mod google;
mod keys;
mod object;
mod settings;

pub use keys::{Credential, Keys};
pub use object::{Cloud, Object};

use reqwest::Url;

use super::NetOptions;
use crate::error::{Error, Result};
use settings::Who;

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
