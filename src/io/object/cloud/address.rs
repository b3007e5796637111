//! Addresses of objects: `gs://bucket/key`, `az://container/blob`, and with an account's name
//! `abfss://container@account.dfs.core.windows.net/blob`.

use crate::error::{Error, Result};
use crate::io::auth::is_valid_name;
use crate::io::transport::fits_in_url;

/// Host endings of accounts. Credentials are sent to no other hosts.
const HOSTS: [&str; 4] =
    ["core.windows.net", "core.usgovcloudapi.net", "core.chinacloudapi.cn", "fabric.microsoft.com"];

/// The cloud of an object.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Cloud {
    Google,
    Azure,
}

/// A parsed address.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct CloudAddress {
    pub cloud: Cloud,
    /// The address for messages, without secrets.
    pub display_address: String,
    /// Account and host ending, where the address names them.
    pub account: Option<(String, String)>,
    /// The bucket or container.
    pub bucket: String,
    /// The key of the object, or the name of the blob.
    pub key: String,
}

impl CloudAddress {
    /// Parses an address.
    pub fn parse(uri: &str) -> Result<CloudAddress> {
        let (scheme, rest) = uri.split_once("://").unwrap_or(("", uri));
        let scheme = scheme.to_ascii_lowercase();
        let cloud = if scheme == "gs" { Cloud::Google } else { Cloud::Azure };
        let expected = match cloud {
            Cloud::Google => "gs://bucket/name",
            Cloud::Azure => {
                "az://container/name or abfss://container@account.dfs.core.windows.net/name"
            }
        };
        let found = rest.split(['?', '#']).next().unwrap_or("");
        let bad = |why: &str| {
            let what = format!("expected {expected}, found `{scheme}://{found}`{why}");
            Err(Error::InvalidArgument(what))
        };
        if rest.contains(['?', '#']) {
            return bad(" and a `?` or `#`, which these addresses cannot have");
        }
        let (bucket_and_account, key) = rest.split_once('/').unwrap_or((rest, ""));
        if bucket_and_account.is_empty() || key.is_empty() {
            return bad("");
        }
        if !fits_in_url(key) {
            return bad(": the name has a control character, or a component `.` or `..`");
        }
        let (bucket, account) = match bucket_and_account.split_once('@') {
            None => (bucket_and_account, None),
            Some(_) if cloud == Cloud::Google => return bad(": a bucket's name has no `@`"),
            Some((container, host)) => (container, parse_host(host)),
        };
        if bucket != bucket_and_account && account.is_none() {
            return bad(": what follows the `@` is not the host of an Azure storage account");
        }
        if !is_valid_name(bucket) {
            return bad("");
        }
        let display_address = format!("{scheme}://{bucket_and_account}/{key}");
        let (bucket, key) = (bucket.to_owned(), key.to_owned());
        Ok(CloudAddress { cloud, display_address, account, bucket, key })
    }

    /// Another object in the same folder.
    pub fn sibling(&self, name: &str) -> CloudAddress {
        let beside = |of: &str| {
            let folder = of.rfind('/').and_then(|slash| of.get(..=slash)).unwrap_or("");
            format!("{folder}{name}")
        };
        let (key, display_address) = (beside(&self.key), beside(&self.display_address));
        CloudAddress { display_address, key, ..self.clone() }
    }
}

/// The account of `account.dfs.core.windows.net`, and what the host ends with.
pub fn parse_host(host: &str) -> Option<(String, String)> {
    let host = host.to_ascii_lowercase();
    let (account, rest) = host.split_once('.').filter(|(account, _)| is_valid_name(account))?;
    let ending = rest.strip_prefix("dfs.").or_else(|| rest.strip_prefix("blob."))?;
    HOSTS.contains(&ending).then(|| (account.to_owned(), ending.to_owned()))
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn addresses_name_cloud_bucket_and_key() {
        let parts = |uri| {
            let found = CloudAddress::parse(uri).unwrap();
            (found.display_address, found.bucket, found.key, found.account)
        };
        let plain = |display_address: &str, bucket: &str, key: &str| {
            (display_address.to_owned(), bucket.to_owned(), key.to_owned(), None)
        };
        assert_eq!(parts("gs://b/a/k"), plain("gs://b/a/k", "b", "a/k"));
        assert_eq!(parts("GS://b/k%20 ü"), plain("gs://b/k%20 ü", "b", "k%20 ü"));
        assert_eq!(parts("gs://b//x//k"), plain("gs://b//x//k", "b", "/x//k"));
        assert_eq!(parts("az://$root/k"), plain("az://$root/k", "$root", "k"));
        let account = ("acc".to_owned(), "core.windows.net".to_owned());
        let display_address = "abfss://c@acc.dfs.core.windows.net/a/b".to_owned();
        let expected = (display_address.clone(), "c".to_owned(), "a/b".to_owned(), Some(account));
        assert_eq!(parts(&display_address), expected);
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
            let error = CloudAddress::parse(uri).unwrap_err();
            assert!(matches!(error, Error::InvalidArgument(_)), "{uri}");
            assert!(!error.to_string().contains("secret"), "{error}");
        }
    }

    #[test]
    fn sibling_is_in_the_same_folder() {
        let sibling = |uri, name| {
            let found = CloudAddress::parse(uri).unwrap().sibling(name);
            (found.display_address, found.key)
        };
        let pair = |display_address: &str, key: &str| (display_address.to_owned(), key.to_owned());
        assert_eq!(sibling("gs://b/a/k", "n"), pair("gs://b/a/n", "a/n"));
        assert_eq!(sibling("gs://b/k", "n"), pair("gs://b/n", "n"));
        assert_eq!(sibling("gs://b//k", "n"), pair("gs://b//n", "/n"));
    }
}
