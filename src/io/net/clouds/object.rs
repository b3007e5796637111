//! Addresses of objects: `gs://bucket/key`, `az://container/blob`, and with an account's name
//! `abfss://container@account.dfs.core.windows.net/blob`.

use crate::error::{Error, Result};
use crate::io::net::can_be_sent;

/// Hosts of accounts of Azure end with these: nobody else gets to see who asks.
const HOSTS: [&str; 4] =
    ["core.windows.net", "core.usgovcloudapi.net", "core.chinacloudapi.cn", "fabric.microsoft.com"];

/// Who has an object.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Cloud {
    Google,
    Azure,
}

/// What an address says.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Object {
    pub cloud: Cloud,
    /// The address as messages show it.
    pub shown: String,
    /// Account and host ending, where the address names them.
    pub account: Option<(String, String)>,
    /// Or container.
    pub bucket: String,
    /// Or blob.
    pub key: String,
}

impl Object {
    /// Takes an address apart.
    pub fn parse(uri: &str) -> Result<Object> {
        let (scheme, rest) = uri.split_once("://").unwrap_or(("", uri));
        let scheme = scheme.to_ascii_lowercase();
        let cloud = if scheme == "gs" { Cloud::Google } else { Cloud::Azure };
        let expected = match cloud {
            Cloud::Google => "gs://bucket/name",
            Cloud::Azure => {
                "az://container/name or abfss://container@account.dfs.core.windows.net/name"
            }
        };
        let bad = |why: &str| {
            let found = rest.split(['?', '#']).next().unwrap_or("");
            let what = format!("expected {expected}, found `{scheme}://{found}`{why}");
            Err(Error::InvalidArgument(what))
        };
        if rest.contains(['?', '#']) {
            return bad(" and a query, which such addresses do not have");
        }
        let (place, key) = rest.split_once('/').unwrap_or((rest, ""));
        let key = key.trim_start_matches('/');
        if place.is_empty() || key.is_empty() {
            return bad("");
        }
        if !can_be_sent(key) {
            return bad(": `.`, `..` and control characters are no parts of names");
        }
        let (bucket, account) = match (place.split_once('@'), cloud) {
            (None, _) => (place, None),
            (Some(_), Cloud::Google) => return bad(": no `@` there"),
            (Some((container, host)), Cloud::Azure) => match account_of(host) {
                Some(account) => (container, Some(account)),
                None => return bad(", and that is no host of Azure"),
            },
        };
        if !is_word(bucket) {
            return bad("");
        }
        let shown = format!("{scheme}://{place}/{key}");
        let (bucket, key) = (bucket.to_owned(), key.to_owned());
        Ok(Object { cloud, shown, account, bucket, key })
    }

    /// Another object in the same folder.
    pub fn beside(&self, name: &str) -> Object {
        let folder = |of: &str| of.rsplit_once('/').map_or("", |(folder, _)| folder).to_owned();
        let key = match folder(&self.key) {
            within if within.is_empty() => name.to_owned(),
            within => format!("{within}/{name}"),
        };
        let shown = format!("{}/{name}", folder(&self.shown));
        Object { shown, key, ..self.clone() }
    }
}

/// The account of `account.dfs.core.windows.net`, and what the host ends with.
pub fn account_of(host: &str) -> Option<(String, String)> {
    let host = host.to_ascii_lowercase();
    let (account, rest) = host.split_once('.').filter(|(account, _)| is_word(account))?;
    let ending = rest.strip_prefix("dfs.").or_else(|| rest.strip_prefix("blob."))?;
    HOSTS.contains(&ending).then(|| (account.to_owned(), ending.to_owned()))
}

/// Whether something can be the name of a bucket, a container or an account.
pub fn is_word(text: &str) -> bool {
    !text.is_empty()
        && text.bytes().all(|b| b.is_ascii_alphanumeric() || b"-_.$".contains(&b))
        && !matches!(text, "." | "..")
}

#[cfg(test)]
#[allow(clippy::unwrap_used)]
mod tests {
    use super::*;

    #[test]
    fn addresses() {
        let parts = |uri| {
            let found = Object::parse(uri).unwrap();
            (found.shown, found.bucket, found.key, found.account)
        };
        let plain = |shown: &str, bucket: &str, key: &str| {
            (shown.to_owned(), bucket.to_owned(), key.to_owned(), None)
        };
        assert_eq!(parts("gs://b/a/k"), plain("gs://b/a/k", "b", "a/k"));
        assert_eq!(parts("GS://b//k%20 ü"), plain("gs://b/k%20 ü", "b", "k%20 ü"));
        assert_eq!(parts("az://$root/k"), plain("az://$root/k", "$root", "k"));
        let account = ("acc".to_owned(), "core.windows.net".to_owned());
        let shown = "abfss://c@acc.dfs.core.windows.net/a/b".to_owned();
        let expected = (shown.clone(), "c".to_owned(), "a/b".to_owned(), Some(account));
        assert_eq!(parts(&shown), expected);
        for uri in [
            "gs://",
            "gs://b",
            "gs://b/",
            "gs:///k",
            "gs://b/a/../k",
            "gs://b/.\t./k",
            "gs://b/a\r\nb",
            "az://b/.\n./k",
            "gs://a@b/k",
            "gs://b c/k",
            "gs://b/k?generation=1",
            "az://c/k?sig=secret",
            "az://c/k#1",
            "abfss://c@acc/k",
            "abfss://c@acc.dfs.example.org/k",
            "abfss://c@.dfs.core.windows.net/k",
            "abfss://@acc.dfs.core.windows.net/k",
        ] {
            let error = Object::parse(uri).unwrap_err();
            assert!(matches!(error, Error::InvalidArgument(_)), "{uri}");
            assert!(!error.to_string().contains("secret"), "{error}");
        }
    }

    #[test]
    fn neighbours() {
        let beside = |uri, name| {
            let found = Object::parse(uri).unwrap().beside(name);
            (found.shown, found.key)
        };
        let pair = |shown: &str, key: &str| (shown.to_owned(), key.to_owned());
        assert_eq!(beside("gs://b/a/k", "n"), pair("gs://b/a/n", "a/n"));
        assert_eq!(beside("gs://b/k", "n"), pair("gs://b/n", "n"));
    }
}
