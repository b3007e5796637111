//! What is found out before an object of Google Cloud Storage or a blob of Azure is read.

mod azure;
mod connector;
mod google;
mod keys;
mod object;

pub use keys::{Credential, Keys};
pub use object::{Cloud, Object};

use reqwest::Url;

use super::{NetOptions, show_text};
use crate::error::{Error, Result};

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

/// What the environment says.
struct Settings {
    endpoint: Url,
    account: String,
    who: Who,
    keys: Keys,
}

/// Who asks.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
enum Who {
    /// That was asked for.
    Anybody,
    /// Whoever the environment names: if that cannot be had, it is an error.
    Named,
    /// Whoever the machine is, if it is somebody.
    Machine,
}

/// Whether a variable says yes, as the libraries of the clouds read it.
fn says_yes(value: &str) -> bool {
    let lower = value.trim().to_ascii_lowercase();
    matches!(lower.as_str(), "1" | "true" | "on" | "yes" | "y")
}

/// The address of a server that a variable names.
fn endpoint(text: &str) -> Result<Url> {
    let shown = show_text(text);
    let with = if text.contains("://") { text.to_owned() } else { format!("http://{text}") };
    let found = Url::parse(&with).ok().filter(|url| matches!(url.scheme(), "http" | "https"));
    found.filter(Url::has_host).ok_or_else(|| {
        let what = format!("expected the https:// or http:// address of a server, found `{shown}`");
        Error::InvalidArgument(what)
    })
}
