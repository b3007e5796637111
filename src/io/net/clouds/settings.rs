//! What the environment says of a cloud.

use reqwest::Url;

use super::keys::Keys;
use crate::error::{Error, Result};
use crate::io::net::show_text;

/// What the environment says.
pub struct Settings {
    pub endpoint: Url,
    /// Azure's.
    pub account: String,
    pub who: Who,
    pub keys: Keys,
}

/// Who asks.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Who {
    /// That was asked for.
    Anybody,
    /// Whoever the environment names: if that cannot be had, it is an error.
    Named,
    /// Whoever the machine is, if it is somebody.
    Machine,
}

/// Whether a variable says yes, as the libraries of the clouds read it.
pub fn says_yes(value: &str) -> bool {
    let lower = value.trim().to_ascii_lowercase();
    matches!(lower.as_str(), "1" | "true" | "on" | "yes" | "y")
}

/// The address of a server that a variable names.
pub fn endpoint(text: &str) -> Result<Url> {
    let shown = show_text(text);
    let with = if text.contains("://") { text.to_owned() } else { format!("http://{text}") };
    let found = Url::parse(&with).ok().filter(|url| matches!(url.scheme(), "http" | "https"));
    // Nothing secret is in what tells one server from another.
    let bare =
        |url: &Url| url.username().is_empty() && url.password().is_none() && url.query().is_none();
    found.filter(Url::has_host).filter(bare).ok_or_else(|| {
        let what = format!(
            "expected the https:// or http:// address of a server, without user and query, found \
             `{shown}`"
        );
        Error::InvalidArgument(what)
    })
}
