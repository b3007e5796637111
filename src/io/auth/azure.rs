//! Azure's credentials: a key or signature of the account, a client's secret, the identity of a
//! workload, the machine's identity.

use std::path::PathBuf;
use std::sync::Arc;

use object_store::azure::{AzureConfigKey, MicrosoftAzureBuilder};
use reqwest::header::HeaderValue;

use super::azure_account::{AzureAccount, is_valid_name};
use super::library::{LibraryProvider, missing_credentials};
use super::settings::{
    CloudSettings, RequestIdentity, check_printable, is_truthy, parse_endpoint, store_provider,
    without_retries,
};
use super::store::CredentialEnvironment;
use crate::error::{Error, Result};
use crate::io::transport::{FixedSettings, TransportOptions};

/// The account of Azurite, and where it listens.
const EMULATOR: (&str, &str) = ("devstoreaccount1", "http://127.0.0.1:10000");
const EMULATOR_URL: &str = "AZURITE_BLOB_STORAGE_URL";
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

/// The requested container.
pub struct AzureContainer<'c> {
    pub name: &'c str,
    /// Account and host ending, where the address names them.
    pub account: Option<&'c (String, String)>,
    /// The address as messages show it.
    pub display_address: &'c str,
}

/// The settings of the environment for a container.
pub fn settings(
    container: &AzureContainer<'_>,
    options: &TransportOptions,
) -> Result<CloudSettings> {
    let is_relevant = |name: &[u8]| {
        name.starts_with(b"AZURE_")
            || name == b"IDENTITY_ENDPOINT"
            || [IDENTITY_HEADER, EMULATOR_URL].iter().any(|other| other.as_bytes() == name)
    };
    let host =
        container.account.map_or(String::new(), |(account, ending)| format!("{account}.{ending}"));
    let environment =
        CredentialEnvironment::read(format!("azure {host}"), is_relevant, |environment| {
            let file = value(&settings_in(environment), AzureConfigKey::FederatedTokenFile)
                .map(PathBuf::from);
            file.into_iter().collect()
        });
    let values = settings_in(&environment);
    let is_enabled = |key| value(&values, key).is_some_and(is_truthy);
    let emulator = is_enabled(AzureConfigKey::UseEmulator);
    let (name, account) = account(container, &values, &environment)?;
    let server = server(container, &name, &account, &values, &environment);
    let builder = configured(&values, &account)?.with_use_emulator(emulator);
    let has_account_credentials = account.key.is_some() || account.signature.is_some();
    let mut identity_keys = CHAIN_KEYS.into_iter().filter(|key| !AUTHORITY_KEYS.contains(key));
    let identity = if is_enabled(AzureConfigKey::SkipSignature) {
        RequestIdentity::Anonymous
    } else if emulator
        || has_account_credentials
        || identity_keys.any(|key| value(&values, key).is_some())
    {
        RequestIdentity::Configured
    } else {
        RequestIdentity::Machine
    };
    if identity != RequestIdentity::Anonymous && !emulator {
        refuse_cli(&values, has_account_credentials)?;
    }
    let builder = builder.with_account(&name).with_container_name(container.name);
    let fixed = FixedSettings {
        identity_header: identity_header(&environment)?,
        ..FixedSettings::default()
    };
    let make = move |client| {
        let store = builder.clone().with_http_connector(client).build();
        let store = store.map_err(missing_credentials)?;
        Ok(LibraryProvider::Azure(Arc::clone(store.credentials())))
    };
    let credentials = store_provider(&environment, options, identity, fixed, make);
    let endpoint = parse_endpoint(&server)?;
    Ok(CloudSettings { endpoint, account: name, quota_project: None, identity, credentials })
}

/// The server of an account.
fn server(
    container: &AzureContainer<'_>,
    name: &str,
    account: &AzureAccount,
    values: &AzureSettings<'_>,
    environment: &CredentialEnvironment,
) -> String {
    let is_enabled = |key| value(values, key).is_some_and(is_truthy);
    if is_enabled(AzureConfigKey::UseEmulator) {
        let found = environment.texts().find(|(name, _)| *name == EMULATOR_URL);
        let found = found.map_or(EMULATOR.1, |(_, text)| text);
        return format!("{}/{name}", found.trim_end_matches('/'));
    }
    let fabric = is_enabled(AzureConfigKey::UseFabricEndpoint);
    let default_ending = if fabric { "fabric.microsoft.com" } else { "core.windows.net" };
    let ending = container.account.map_or(default_ending, |(_, ending)| ending);
    account.endpoint.clone().unwrap_or_else(|| format!("https://{name}.blob.{ending}"))
}

/// A builder with the settings of the chain.
fn configured(values: &AzureSettings<'_>, account: &AzureAccount) -> Result<MicrosoftAzureBuilder> {
    let mut builder = MicrosoftAzureBuilder::new().with_retry(without_retries());
    for key in CHAIN_KEYS {
        if let Some(text) = value(values, key) {
            builder = builder.with_config(key, checked(key, text)?);
        }
    }
    if let Some(key) = &account.key {
        builder = builder.with_access_key(key);
    }
    let Some(signature) = &account.signature else { return Ok(builder) };
    if signature.len() > LONGEST_SIGNATURE {
        let what = format!(
            "the shared access signature (SAS) is too long: expected at most {LONGEST_SIGNATURE} \
             bytes"
        );
        return Err(Error::InvalidArgument(what));
    }
    Ok(builder.with_config(AzureConfigKey::SasKey, signature))
}

/// Refuses settings that would get tokens from Azure's command line.
fn refuse_cli(values: &AzureSettings<'_>, has_account_credentials: bool) -> Result<()> {
    let kind = value(values, AzureConfigKey::CredentialType);
    let others =
        has_account_credentials || PREFERRED_TO_CLI.iter().any(|key| value(values, *key).is_some());
    let cli_enabled = value(values, AzureConfigKey::UseAzureCli).is_some_and(is_truthy);
    if kind != Some("azure_cli") && (!cli_enabled || kind.is_some() || others) {
        return Ok(());
    }
    let what = "tokens are not taken from the Azure CLI: set AZURE_STORAGE_TOKEN to what `az \
                account get-access-token --resource https://storage.azure.com/ --query accessToken \
                --output tsv` prints";
    Err(Error::InvalidArgument(what.to_owned()))
}

/// The account of a container: from its address, or from the environment.
fn account(
    container: &AzureContainer<'_>,
    values: &AzureSettings<'_>,
    environment: &CredentialEnvironment,
) -> Result<(String, AzureAccount)> {
    let text = |key| value(values, key).map(str::to_owned);
    let of_variables = AzureAccount {
        name: text(AzureConfigKey::AccountName),
        key: text(AzureConfigKey::AccessKey),
        signature: text(AzureConfigKey::SasKey),
        endpoint: text(AzureConfigKey::Endpoint),
    };
    let of_string =
        environment.texts().find(|(name, _)| *name == "AZURE_STORAGE_CONNECTION_STRING");
    let of_string = of_string.map_or_else(
        || Ok(AzureAccount::default()),
        |(_, text)| AzureAccount::parse_connection_string(text),
    )?;
    // Variables that name no account belong to the account of the other variables.
    let owner = of_variables
        .name_and_ending()
        .or_else(|| of_string.name_and_ending())
        .map(|(name, _)| name);
    let of_variables = AzureAccount { name: owner.clone(), ..of_variables };
    let of_address = container.account;
    let emulator = value(values, AzureConfigKey::UseEmulator).is_some_and(is_truthy);
    let named = of_address.map(|(name, _)| name.clone()).or(owner.clone());
    let name = named.or_else(|| emulator.then(|| EMULATOR.0.to_owned()));
    let name = name.filter(|name| is_valid_name(name)).ok_or_else(|| {
        Error::InvalidArgument(format!(
            "`{}`: no storage account given: set AZURE_STORAGE_ACCOUNT_NAME to its name, or use \
             abfss://container@account.dfs.core.windows.net/name",
            container.display_address
        ))
    })?;
    if of_address.is_some() && owner.is_none() && of_variables.has_credentials_or_endpoint() {
        let what = format!(
            "`{}`: the environment has an account key, a shared access signature or an endpoint, \
             but not the name of its account: set AZURE_STORAGE_ACCOUNT_NAME",
            container.display_address
        );
        return Err(Error::InvalidArgument(what));
    }
    // Credentials of one account are not sent to another.
    let ending = of_address.map(|(_, ending)| ending.as_str());
    let is_of_any = owner.is_none();
    let usable = [of_variables, of_string]
        .into_iter()
        .filter(|found| is_of_any || found.belongs_to(&name, ending));
    let found = usable.fold(AzureAccount::default(), AzureAccount::or);
    Ok((name, found))
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

/// The header of the identity service.
fn identity_header(environment: &CredentialEnvironment) -> Result<Option<HeaderValue>> {
    let text = environment.variable(IDENTITY_HEADER).and_then(|text| text.to_str());
    let found = text.map(|text| {
        HeaderValue::from_str(check_printable(IDENTITY_HEADER, text)?)
            .map_err(|_| Error::InvalidArgument(format!("{IDENTITY_HEADER}: not a header")))
    });
    found.transpose()
}

/// Settings, and their values.
type AzureSettings<'p> = Vec<(AzureConfigKey, &'p str)>;

/// The value of a setting. If several set the same, the last one counts.
fn value<'p>(values: &AzureSettings<'p>, key: AzureConfigKey) -> Option<&'p str> {
    values.iter().rev().find(|(other, _)| *other == key).map(|(_, text)| *text)
}

/// The settings that variables hold.
fn settings_in(environment: &CredentialEnvironment) -> AzureSettings<'_> {
    let text = |wanted| environment.texts().find(|(name, _)| *name == wanted).map(|(_, text)| text);
    // The names of Azure's command line and of its libraries come first: others overrule them.
    let aliases = [
        ("AZURE_STORAGE_ACCOUNT", AzureConfigKey::AccountName),
        ("AZURE_STORAGE_KEY", AzureConfigKey::AccessKey),
        ("IDENTITY_ENDPOINT", AzureConfigKey::MsiEndpoint),
    ];
    let aliases = aliases.into_iter().filter_map(|(name, key)| Some((key, text(name)?)));
    let mut found: Vec<_> = aliases.collect();
    found.extend(environment.texts().filter_map(|(name, value)| {
        let name = name.starts_with("AZURE_").then(|| name.to_ascii_lowercase())?;
        Some((name.parse().ok()?, value))
    }));
    found.retain(|found| *found != (AzureConfigKey::CredentialType, "auto"));
    found
}
