//! A storage account of Azure. Keys, signatures and endpoints are used for their own account only.

use object_store::azure::AzureConfigKey;
use reqwest::Url;

use super::address::{CloudAddress, parse_host};
use crate::error::{Error, Result};
use crate::io::auth::azure::{self, AzureSettings, EMULATOR_URL};
use crate::io::auth::{
    CloudIdentity, CloudSettings, CredentialEnvironment, is_valid_name, parse_endpoint,
};
use crate::io::transport::TransportOptions;

/// The account of Azurite, and where it listens.
const EMULATOR: (&str, &str) = ("devstoreaccount1", "http://127.0.0.1:10000");

const DEFAULT_ENDING: &str = "core.windows.net";

/// The settings of the environment for a container.
pub fn settings(address: &CloudAddress, options: &TransportOptions) -> Result<CloudSettings> {
    let host = address.account.as_ref().map(|(account, ending)| format!("{account}.{ending}"));
    let environment = azure::environment(host.as_deref().unwrap_or(""));
    let settings = AzureSettings::of(&environment);
    let (name, account) = account(address, &settings, &environment)?;
    let endpoint = server(address, &name, &account, &settings, &environment)?;
    let keys = (account.key.as_deref(), account.signature.as_deref());
    let container = (&*name, &*address.bucket);
    let (source, credentials) = azure::credentials(container, keys, &environment, options)?;
    let identity = CloudIdentity { account: name.into(), quota_project: None, credentials };
    Ok(CloudSettings { endpoint, source, identity })
}

/// The server of an account.
fn server(
    address: &CloudAddress,
    name: &str,
    account: &AzureAccount,
    settings: &AzureSettings<'_>,
    environment: &CredentialEnvironment,
) -> Result<Url> {
    if settings.is_enabled(AzureConfigKey::UseEmulator) {
        let found = environment.text(EMULATOR_URL).unwrap_or(EMULATOR.1);
        return parse_endpoint(&format!("{}/{name}", found.trim_end_matches('/')));
    }
    let fabric = settings.is_enabled(AzureConfigKey::UseFabricEndpoint);
    let default_ending = if fabric { "fabric.microsoft.com" } else { DEFAULT_ENDING };
    let ending = address.account.as_ref().map_or(default_ending, |(_, ending)| ending);
    let usual = || format!("https://{name}.blob.{ending}");
    parse_endpoint(&account.endpoint.clone().unwrap_or_else(usual))
}

/// The account of a container: from its address, or from the environment.
fn account(
    address: &CloudAddress,
    settings: &AzureSettings<'_>,
    environment: &CredentialEnvironment,
) -> Result<(String, AzureAccount)> {
    let text = |key| settings.value(key).map(str::to_owned);
    let of_variables = AzureAccount {
        name: text(AzureConfigKey::AccountName),
        key: text(AzureConfigKey::AccessKey),
        signature: text(AzureConfigKey::SasKey),
        endpoint: text(AzureConfigKey::Endpoint),
    };
    let of_string = environment.text("AZURE_STORAGE_CONNECTION_STRING");
    let of_string = of_string.map(AzureAccount::parse_connection_string).transpose()?;
    let of_string = of_string.unwrap_or_else(AzureAccount::default);
    // Variables that name no account belong to the account of the other variables.
    let owner = of_variables.name_and_ending().or_else(|| of_string.name_and_ending());
    let owner = owner.map(|(name, _)| name);
    let of_variables = AzureAccount { name: owner.clone(), ..of_variables };
    let emulator = settings.is_enabled(AzureConfigKey::UseEmulator);
    let named = address.account.as_ref().map(|(name, _)| name.clone()).or(owner.clone());
    let name = named.or_else(|| emulator.then(|| EMULATOR.0.to_owned()));
    let invalid = |what| Error::InvalidArgument(format!("`{}`: {what}", address.display_address));
    let name = name.filter(|name| is_valid_name(name)).ok_or_else(|| {
        invalid(
            "no storage account given: set AZURE_STORAGE_ACCOUNT_NAME to its name, or use \
             abfss://container@account.dfs.core.windows.net/name",
        )
    })?;
    if address.account.is_some() && owner.is_none() && of_variables.has_credentials_or_endpoint() {
        return Err(invalid(
            "the environment has an account key, a shared access signature or an endpoint, but \
             not the name of its account: set AZURE_STORAGE_ACCOUNT_NAME",
        ));
    }
    // Credentials of one account are not sent to another.
    let ending = address.account.as_ref().map(|(_, ending)| ending.as_str());
    let usable = [of_variables, of_string]
        .into_iter()
        .filter(|found| owner.is_none() || found.belongs_to(&name, ending));
    let found = usable.fold(AzureAccount::default(), AzureAccount::or);
    Ok((name, found))
}

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
        let bad =
            |what| Err(Error::InvalidArgument(format!("AZURE_STORAGE_CONNECTION_STRING: {what}")));
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
        let Some(name) = found.name.as_ref().filter(|name| is_valid_name(name)) else {
            return bad("it has no account name: expected AccountName=name");
        };
        let usual = || format!("{scheme}://{name}.blob.{ending}");
        found.endpoint = found.endpoint.or_else(|| Some(usual()));
        Ok(found)
    }

    /// The account's name, and the ending of its host if that is known.
    pub fn name_and_ending(&self) -> Option<(String, Option<String>)> {
        let server = self.endpoint.as_ref().and_then(|text| parse_endpoint(text).ok());
        let of_server = server.and_then(|url| parse_host(url.host_str()?));
        let (of_server, ending) = of_server.unzip();
        Some((self.name.clone().or(of_server)?, ending))
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

#[cfg(test)]
mod tests;
