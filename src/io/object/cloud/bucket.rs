//! The bucket of an address: its URL, and the credentials of requests.

use reqwest::Url;

use super::address::{Cloud, CloudAddress};
use super::azure_account;
use crate::error::{Error, Result};
use crate::io::auth::{CloudIdentity, IdentitySource, MissingCredentials, google};
use crate::io::transport::{TransportOptions, fits_in_url};

/// Bytes of the longest name: the clouds take 1024 characters, and a URL has its limits.
const LONGEST_KEY: usize = 4096;

/// Finds the URL of the bucket of an address, and the identity of requests; without one, they are
/// anonymous. Contacts a server only to find out whether this machine has an identity, if the
/// settings state none.
pub async fn resolve(
    address: &CloudAddress,
    options: &TransportOptions,
) -> Result<(Url, Option<CloudIdentity>)> {
    let found = match address.cloud {
        Cloud::Google => google::settings(&address.bucket, options)?,
        Cloud::Azure => azure_account::settings(address, options)?,
    };
    let is_anonymous = match found.source {
        IdentitySource::Anonymous => true,
        IdentitySource::Configured => false,
        // A machine whose metadata service fails has an identity: its requests are retried.
        IdentitySource::Machine => {
            matches!(found.identity.credentials.get().await, Err(MissingCredentials::Absent))
        }
    };
    let mut url = found.endpoint;
    if let Ok(mut path) = url.path_segments_mut() {
        path.pop_if_empty().push(&address.bucket);
    }
    Ok((url, (!is_anonymous).then_some(found.identity)))
}

/// The URL of an object.
pub fn object_url(bucket: &Url, key: &str) -> std::result::Result<Url, String> {
    if !fits_in_url(key) || key.len() > LONGEST_KEY {
        return Err(format!("{key:?} cannot be the name of an object"));
    }
    let mut url = bucket.clone();
    if let Ok(mut path) = url.path_segments_mut() {
        path.extend(key.split('/'));
    }
    Ok(url)
}

/// The error of an anonymous request.
pub fn with_anonymous_hint(error: Error, cloud: Cloud) -> Error {
    let name = match cloud {
        Cloud::Google => "GOOGLE_APPLICATION_CREDENTIALS",
        Cloud::Azure => "AZURE_STORAGE_ACCOUNT_KEY",
    };
    error.with_hint(&format!("no credentials were found: set {name}, for example"))
}
