//! A storage account of Azure. Keys, signatures and endpoints are used for their own account only.

use super::settings::parse_endpoint;
use crate::error::{Error, Result};

/// Host endings of accounts. Credentials are sent to no other hosts.
const HOSTS: [&str; 4] =
    ["core.windows.net", "core.usgovcloudapi.net", "core.chinacloudapi.cn", "fabric.microsoft.com"];
const DEFAULT_ENDING: &str = "core.windows.net";

/// An account, as far as the settings name it.
#[derive(Debug, Clone, Default, PartialEq, Eq)]
pub struct AzureAccount {
    pub name: Option<String>,
    pub key: Option<String>,
    pub signature: Option<String>,
    pub endpoint: Option<String>,
}

impl AzureAccount {
    /// Parses a connection string.
    pub fn parse_connection_string(text: &str) -> Result<AzureAccount> {
        let bad = |what: &str| {
            let what = format!("AZURE_STORAGE_CONNECTION_STRING: {what}");
            Err(Error::InvalidArgument(what))
        };
        let mut found = AzureAccount::default();
        let (mut scheme, mut ending) = (None, None);
        for part in text.split(';').map(str::trim).filter(|part| !part.is_empty()) {
            let Some((name, value)) = part.split_once('=') else {
                return bad("expected parts like AccountName=name, found one without `=`");
            };
            let value = Some(value.trim().to_owned()).filter(|value| !value.is_empty());
            match name.trim().to_ascii_lowercase().as_str() {
                "accountname" => found.name = value,
                "accountkey" => found.key = value,
                "sharedaccesssignature" => found.signature = value,
                "blobendpoint" => found.endpoint = value,
                "endpointsuffix" => ending = value,
                "defaultendpointsprotocol" => scheme = value,
                "usedevelopmentstorage" | "developmentstorageproxyuri" => {
                    return bad("for Azurite set AZURE_STORAGE_USE_EMULATOR=true instead");
                }
                // Endpoints of other services and of replicas.
                other if other.ends_with("endpoint") => {}
                _ => return bad("it has an unknown key"),
            }
        }
        let scheme = scheme.map_or("https".to_owned(), |scheme| scheme.to_ascii_lowercase());
        if !matches!(scheme.as_str(), "https" | "http") {
            return bad("expected DefaultEndpointsProtocol=https or http");
        }
        let ending = ending.map_or(DEFAULT_ENDING.to_owned(), |ending| ending.to_ascii_lowercase());
        if !is_valid_name(&ending) {
            return bad("expected EndpointSuffix=core.windows.net or the end of another host");
        }
        found.name = found.name_and_ending().map(|(name, _)| name);
        match found.name.as_ref().filter(|name| is_valid_name(name)) {
            Some(name) if found.endpoint.is_none() => {
                found.endpoint = Some(format!("{scheme}://{name}.blob.{ending}"));
                Ok(found)
            }
            Some(_) => Ok(found),
            None => bad("it has no account name: expected AccountName=name"),
        }
    }

    /// The account's name, and the ending of its host if that is known.
    pub fn name_and_ending(&self) -> Option<(String, Option<String>)> {
        let server = self.endpoint.as_ref().and_then(|text| parse_endpoint(text).ok());
        let of_server = server.and_then(|url| parse_host(url.host_str()?));
        match (&self.name, of_server) {
            (Some(name), of_server) => Some((name.clone(), of_server.map(|(_, ending)| ending))),
            (None, Some((name, ending))) => Some((name, Some(ending))),
            (None, None) => None,
        }
    }

    /// True if this belongs to that account.
    pub fn belongs_to(&self, account: &str, ending: Option<&str>) -> bool {
        self.name_and_ending().is_some_and(|(name, ours)| {
            let other = ours.as_deref().zip(ending).is_some_and(|(ours, asked)| ours != asked);
            name.eq_ignore_ascii_case(account) && !other
        })
    }

    /// True if it holds credentials or endpoints, which other accounts must not see.
    pub fn has_credentials_or_endpoint(&self) -> bool {
        self.key.is_some() || self.signature.is_some() || self.endpoint.is_some()
    }

    /// The same account, completed from another one.
    pub fn or(self, other: AzureAccount) -> AzureAccount {
        AzureAccount {
            name: self.name.or(other.name),
            key: self.key.or(other.key),
            signature: self.signature.or(other.signature),
            endpoint: self.endpoint.or(other.endpoint),
        }
    }
}

/// The account of `account.dfs.core.windows.net`, and what the host ends with.
pub fn parse_host(host: &str) -> Option<(String, String)> {
    let host = host.to_ascii_lowercase();
    let (account, rest) = host.split_once('.').filter(|(account, _)| is_valid_name(account))?;
    let ending = rest.strip_prefix("dfs.").or_else(|| rest.strip_prefix("blob."))?;
    HOSTS.contains(&ending).then(|| (account.to_owned(), ending.to_owned()))
}

/// True if a text can be the name of a bucket, a container or an account.
pub fn is_valid_name(text: &str) -> bool {
    !text.is_empty()
        && text.bytes().all(|b| b.is_ascii_alphanumeric() || b"-_.$".contains(&b))
        && !matches!(text, "." | "..")
}
