//! Azure's credentials: a key or signature of the account, a client's secret, the identity of a
//! workload, the machine's identity.

use std::path::PathBuf;
use std::sync::Arc;

use object_store::azure::{AzureConfigKey, MicrosoftAzureBuilder};
use reqwest::header::HeaderValue;

use super::library::CloudCredential;
use super::provider::CredentialProvider;
use super::settings::{
    IdentitySource, check_printable, is_truthy, is_valid_name, library, missing_of_store,
    parse_endpoint, store_provider, without_retries,
};
use super::store::CredentialEnvironment;
use crate::error::{Error, Result};
use crate::io::transport::{FixedSettings, TransportOptions};

/// The beginnings of the names of variables that count.
const VARIABLES: &[&str] = &["AZURE_", "AZURITE_", "IDENTITY_"];
/// The variable with the address of Azurite.
pub const EMULATOR_URL: &str = "AZURITE_BLOB_STORAGE_URL";
/// The variable with the header of the identity service.
const IDENTITY_HEADER: &str = "IDENTITY_HEADER";
/// Settings that the chain gets, beside key and signature.
const CHAIN_KEYS: [AzureConfigKey; 10] = [
    AzureConfigKey::Token,
    AzureConfigKey::ClientId,
    AzureConfigKey::ClientSecret,
    AzureConfigKey::AuthorityId,
    AzureConfigKey::AuthorityHost,
    AzureConfigKey::FederatedTokenFile,
    AzureConfigKey::MsiEndpoint,
    AzureConfigKey::ObjectId,
    AzureConfigKey::MsiResourceId,
    AzureConfigKey::CredentialType,
];
/// Settings among them that do not name an identity.
const AUTHORITY_KEYS: [AzureConfigKey; 3] =
    [AzureConfigKey::ClientSecret, AzureConfigKey::AuthorityId, AzureConfigKey::AuthorityHost];
/// Settings that the chain uses before Azure's command line.
const PREFERRED_TO_CLI: [AzureConfigKey; 3] =
    [AzureConfigKey::Token, AzureConfigKey::ClientSecret, AzureConfigKey::FederatedTokenFile];
/// Maximum bytes of a signature, because servers limit the length of a URL.
const LONGEST_SIGNATURE: usize = 8 << 10;

/// The variables and files of Azure. `scope`: the account that an address names.
pub fn environment(scope: &str) -> Arc<CredentialEnvironment> {
    CredentialEnvironment::read(format!("azure {scope}"), VARIABLES, |read| {
        let file = AzureSettings::of(read).value(AzureConfigKey::FederatedTokenFile);
        file.map(PathBuf::from).into_iter().collect()
    })
}

/// The credentials for a container of an account: its key, or its shared access signature, if there
/// are any, or those of the settings.
pub fn credentials(
    (account, container): (&str, &str),
    (key, signature): (Option<&str>, Option<&str>),
    environment: &Arc<CredentialEnvironment>,
    options: &TransportOptions,
) -> Result<(IdentitySource, Arc<CredentialProvider>)> {
    let settings = AzureSettings::of(environment);
    let emulator = settings.is_enabled(AzureConfigKey::UseEmulator);
    let has_account_credentials = key.is_some() || signature.is_some();
    let mut identity_keys = CHAIN_KEYS.into_iter().filter(|key| !AUTHORITY_KEYS.contains(key));
    let source = if settings.is_enabled(AzureConfigKey::SkipSignature) {
        IdentitySource::Anonymous
    } else if emulator
        || has_account_credentials
        || identity_keys.any(|key| settings.value(key).is_some())
    {
        IdentitySource::Configured
    } else {
        IdentitySource::Machine
    };
    if source != IdentitySource::Anonymous && !emulator {
        refuse_cli(&settings, has_account_credentials)?;
    }
    let builder = configured(&settings, key, signature)?.with_use_emulator(emulator);
    let builder = builder.with_account(account).with_container_name(container);
    let header = environment.variable(IDENTITY_HEADER).and_then(|text| text.to_str());
    let header = header.map(|text| check_printable(IDENTITY_HEADER, text)).transpose()?;
    let identity_header = header.and_then(|text| HeaderValue::from_str(text).ok());
    let fixed = FixedSettings { identity_header, ..FixedSettings::default() };
    let make = move |client| {
        let store =
            builder.clone().with_http_connector(client).build().map_err(missing_of_store)?;
        Ok(library(store.credentials(), CloudCredential::Azure))
    };
    Ok((source, store_provider(environment, options, source, fixed, make)))
}

/// A builder with the settings of the chain.
fn configured(
    settings: &AzureSettings<'_>,
    key: Option<&str>,
    signature: Option<&str>,
) -> Result<MicrosoftAzureBuilder> {
    let mut builder = MicrosoftAzureBuilder::new().with_retry(without_retries());
    for key in CHAIN_KEYS {
        if let Some(text) = settings.value(key) {
            builder = builder.with_config(key, checked(key, text)?);
        }
    }
    if let Some(key) = key {
        builder = builder.with_access_key(key);
    }
    let Some(signature) = signature else { return Ok(builder) };
    if signature.len() > LONGEST_SIGNATURE {
        let what = format!("the shared access signature has more than {LONGEST_SIGNATURE} bytes");
        return Err(Error::InvalidArgument(what));
    }
    Ok(builder.with_config(AzureConfigKey::SasKey, signature))
}

/// Refuses settings that would get tokens from Azure's command line.
fn refuse_cli(settings: &AzureSettings<'_>, has_account_credentials: bool) -> Result<()> {
    let kind = settings.value(AzureConfigKey::CredentialType);
    let others = has_account_credentials
        || PREFERRED_TO_CLI.iter().any(|key| settings.value(*key).is_some());
    let cli_enabled = settings.is_enabled(AzureConfigKey::UseAzureCli);
    if kind != Some("azure_cli") && (!cli_enabled || kind.is_some() || others) {
        return Ok(());
    }
    let what = "tokens are not taken from the Azure CLI: set AZURE_STORAGE_TOKEN to what `az \
                account get-access-token --resource https://storage.azure.com/ --query accessToken \
                --output tsv` prints";
    Err(Error::InvalidArgument(what.to_owned()))
}

/// A variable as the chain can use it.
fn checked(key: AzureConfigKey, text: &str) -> Result<String> {
    let variable = key.as_ref().to_ascii_uppercase();
    Ok(match key {
        AzureConfigKey::Token => check_printable(&variable, text)?.to_owned(),
        AzureConfigKey::MsiEndpoint => parse_endpoint(text)?.to_string(),
        AzureConfigKey::AuthorityHost => {
            let bare = !text.contains("://");
            let found = if bare { format!("https://{text}") } else { text.to_owned() };
            parse_endpoint(&found)?.as_str().trim_end_matches('/').to_owned()
        }
        AzureConfigKey::AuthorityId if !is_valid_name(text) => {
            let what = format!("{variable}: expected the id or the domain of a tenant");
            return Err(Error::InvalidArgument(what));
        }
        _ => text.to_owned(),
    })
}

/// Settings, and their values.
pub struct AzureSettings<'e>(Vec<(AzureConfigKey, &'e str)>);

impl<'e> AzureSettings<'e> {
    /// The settings that variables hold.
    pub fn of(environment: &'e CredentialEnvironment) -> Self {
        // The names of Azure's command line and of its libraries come first: others overrule them.
        let aliases = [
            ("AZURE_STORAGE_ACCOUNT", AzureConfigKey::AccountName),
            ("AZURE_STORAGE_KEY", AzureConfigKey::AccessKey),
            ("IDENTITY_ENDPOINT", AzureConfigKey::MsiEndpoint),
        ];
        let aliases =
            aliases.into_iter().filter_map(|(name, key)| Some((key, environment.text(name)?)));
        let mut found: Vec<_> = aliases.collect();
        found.extend(environment.texts().filter_map(|(name, value)| {
            let name = name.starts_with("AZURE_").then(|| name.to_ascii_lowercase())?;
            Some((name.parse().ok()?, value))
        }));
        found.retain(|found| *found != (AzureConfigKey::CredentialType, "auto"));
        AzureSettings(found)
    }

    /// The value of a setting. If several set the same, the last one counts.
    pub fn value(&self, key: AzureConfigKey) -> Option<&'e str> {
        self.0.iter().rev().find(|(other, _)| *other == key).map(|(_, text)| *text)
    }

    /// True if a setting is on.
    pub fn is_enabled(&self, key: AzureConfigKey) -> bool {
        self.value(key).is_some_and(is_truthy)
    }
}
