//! Settings that Google and Azure have in common.

use reqwest::Url;

use super::cache::CredentialProvider;
use crate::error::{Error, Result};
use crate::io::transport::show_text;

/// The settings of a cloud, from the environment.
pub struct CloudSettings {
    pub endpoint: Url,
    /// The storage account, of Azure only.
    pub account: String,
    pub identity: RequestIdentity,
    pub credentials: CredentialProvider,
}

/// The identity that requests are made with.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum RequestIdentity {
    /// No identity, as the settings demand.
    Anonymous,
    /// The identity of the settings; it is an error if its credentials cannot be obtained.
    Configured,
    /// The identity of the machine, if it has one.
    Machine,
}

/// True if a variable says yes, as the libraries of the clouds read it.
pub fn is_truthy(value: &str) -> bool {
    let lower = value.trim().to_ascii_lowercase();
    matches!(lower.as_str(), "1" | "true" | "on" | "yes" | "y")
}

/// The address of a server that a variable names, with its scheme: credentials are sent there.
pub fn parse_endpoint(text: &str) -> Result<Url> {
    let address = show_text(text);
    let found = Some(text).filter(|text| text.contains("://") && !text.contains(char::is_control));
    let found = found.and_then(|text| Url::parse(text).ok());
    let found = found.filter(|url| matches!(url.scheme(), "http" | "https"));
    // The address names servers in messages and in the cache: it may hold no secrets.
    let has_no_secrets =
        |url: &Url| url.username().is_empty() && url.password().is_none() && url.query().is_none();
    found.filter(Url::has_host).filter(has_no_secrets).ok_or_else(|| {
        let what = format!(
            "expected the https:// or http:// address of a server, without user and query, found \
             `{address}`"
        );
        Error::InvalidArgument(what)
    })
}

/// The name of a server, with or without a port.
pub fn check_host<'t>(variable: &str, text: &'t str) -> Result<&'t str> {
    let is_valid = text.bytes().all(|b| b.is_ascii_alphanumeric() || b"-_.:[]".contains(&b))
        && !text.ends_with(':')
        && Url::parse(&format!("http://{text}/")).is_ok();
    let what = format!("{variable}: expected the name of a server, found `{}`", show_text(text));
    Some(text).filter(|_| is_valid).ok_or(Error::InvalidArgument(what))
}

/// Checks a value that is sent in a header.
pub fn check_printable<'t>(variable: &str, text: &'t str) -> Result<&'t str> {
    let what = format!("{variable}: expected printable ASCII, found other characters");
    let is_valid = text.bytes().all(|b| (b' '..=b'~').contains(&b));
    Some(text).filter(|_| is_valid).ok_or(Error::InvalidArgument(what))
}

#[cfg(test)]
#[allow(clippy::unwrap_used)]
mod tests {
    use super::*;

    #[test]
    fn endpoints_and_hosts_are_checked() {
        for good in ["https://host", "http://127.0.0.1:9/account", "HTTPS://[::1]:80/"] {
            assert!(parse_endpoint(good).is_ok(), "{good}");
        }
        for bad in ["host", "host:1/x", "ftp://host", "https://", "https://a@b", "http://h\n/"] {
            assert!(parse_endpoint(bad).is_err(), "{bad}");
        }
        for good in ["host", "127.0.0.1:9", "[::1]:9", "metadata.google.internal"] {
            assert_eq!(check_host("V", good).unwrap(), good);
        }
        for bad in ["", "a b", "a/b", "a:b", "a:", "user@a", "a:99999", " a", "a?b", "a#b"] {
            assert!(check_host("V", bad).is_err(), "{bad}");
        }
        assert!(check_printable("V", "a token").is_ok());
        for bad in ["a\nb", "ü", "a\x7f"] {
            let error = check_printable("V", bad).unwrap_err().to_string();
            assert!(error.contains('V') && !error.contains(bad), "{error}");
        }
    }
}
