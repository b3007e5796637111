//! Azure's chain: a key or signature of the account, a client's secret, the identity of a workload,
//! its command line, the machine's own identity.

use std::sync::Arc;

use object_store::azure::{AzureConfigKey, MicrosoftAzureBuilder};

use super::connector::OnDemand;
use super::keys::{Keys, Provider, once};
use super::object::{Object, is_word};
use super::settings::{Settings, Who, endpoint, says_yes};
use crate::error::{Error, Result};
use crate::io::net::NetOptions;
use crate::io::net::place::Place;

/// The account of Azurite, and where it listens.
const EMULATOR: (&str, &str) = ("devstoreaccount1", "http://127.0.0.1:10000");
const EMULATOR_URL: &str = "AZURITE_BLOB_STORAGE_URL";
/// What names who asks.
const NAMING: [AzureConfigKey; 8] = [
    AzureConfigKey::AccessKey,
    AzureConfigKey::SasKey,
    AzureConfigKey::Token,
    AzureConfigKey::ClientId,
    AzureConfigKey::FederatedTokenFile,
    AzureConfigKey::MsiEndpoint,
    AzureConfigKey::FabricTokenServiceUrl,
    AzureConfigKey::CredentialType,
];
/// What belongs to one account.
const OF_AN_ACCOUNT: [AzureConfigKey; 3] =
    [AzureConfigKey::AccessKey, AzureConfigKey::SasKey, AzureConfigKey::Endpoint];

/// What the environment says.
pub fn settings(object: &Object, net: &NetOptions) -> Result<Settings> {
    let counts = |name: &[u8]| {
        name.starts_with(b"AZURE_")
            || name == b"IDENTITY_ENDPOINT"
            || name == EMULATOR_URL.as_bytes()
    };
    let of = object.account.as_ref().map_or("", |(account, _)| account);
    let place = Place::now(format!("azure {of}"), counts, |_| Vec::new());
    let mut given = given(&place);
    let account = account(object, &given)?;
    // What is for one account is not shown to another.
    if value(&given, AzureConfigKey::AccountName).is_some_and(|ours| ours != account) {
        given.retain(|(key, _)| !OF_AN_ACCOUNT.contains(key));
    }
    let server = server(object, &account, &given, &place);
    let yes = |key| value(&given, key).is_some_and(says_yes);
    let named = NAMING.into_iter().any(|key| value(&given, key).is_some())
        || yes(AzureConfigKey::UseAzureCli)
        || yes(AzureConfigKey::UseEmulator);
    let who = if yes(AzureConfigKey::SkipSignature) {
        Who::Anybody
    } else if named {
        Who::Named
    } else {
        Who::Machine
    };
    let mut builder = MicrosoftAzureBuilder::new().with_retry(once());
    for (key, text) in &given {
        // Where it is asked is decided here.
        if !matches!(key, AzureConfigKey::Endpoint | AzureConfigKey::UseFabricEndpoint) {
            builder = builder.with_config(*key, *text);
        }
    }
    let builder = builder.with_account(&account).with_container_name(&object.bucket);
    let connector = OnDemand::new(net, who == Who::Machine);
    let build = move || {
        let store = builder.clone().with_http_connector(connector.clone()).build()?;
        Ok(Provider::Azure(Arc::clone(store.credentials())))
    };
    let keys = Keys::new(place, Arc::new(build));
    Ok(Settings { endpoint: endpoint(&server)?, account, who, keys })
}

/// The account of a container: that of its address, or of the environment.
fn account(object: &Object, given: &Given<'_>) -> Result<String> {
    let named = object.account.as_ref().map(|(account, _)| account.as_str());
    let usual = value(given, AzureConfigKey::UseEmulator).filter(|text| says_yes(text));
    let account = named.or_else(|| value(given, AzureConfigKey::AccountName));
    let account = account.or_else(|| usual.map(|_| EMULATOR.0)).filter(|name| is_word(name));
    account.map(str::to_owned).ok_or_else(|| {
        Error::InvalidArgument(format!(
            "`{}`: whose container? Set AZURE_STORAGE_ACCOUNT_NAME to the name of the account, or \
             name it in the address: abfss://container@account.dfs.core.windows.net/name",
            object.shown
        ))
    })
}

/// The server of an account.
fn server(object: &Object, account: &str, given: &Given<'_>, place: &Place) -> String {
    if value(given, AzureConfigKey::UseEmulator).is_some_and(says_yes) {
        let found = place.texts().find(|(name, _)| *name == EMULATOR_URL);
        let found = found.map_or(EMULATOR.1, |(_, text)| text);
        return format!("{}/{account}", found.trim_end_matches('/'));
    }
    if let Some(named) = value(given, AzureConfigKey::Endpoint) {
        return named.to_owned();
    }
    let ending = object.account.as_ref().map_or("core.windows.net", |(_, ending)| ending);
    format!("https://{account}.blob.{ending}")
}

/// Variables that are set, and what they are called here.
type Given<'p> = Vec<(AzureConfigKey, &'p str)>;

/// What one is set to: of two that mean the same the last counts.
fn value<'p>(given: &Given<'p>, key: AzureConfigKey) -> Option<&'p str> {
    given.iter().rev().find(|(other, _)| *other == key).map(|(_, text)| *text)
}

/// What variables say.
fn given(place: &Place) -> Given<'_> {
    let mut found = Vec::new();
    let text = |wanted| place.texts().find(|(name, _)| *name == wanted).map(|(_, text)| text);
    // The names of Azure's command line and of its libraries come first: others overrule them.
    for part in text("AZURE_STORAGE_CONNECTION_STRING").unwrap_or("").split(';') {
        let Some((name, value)) = part.split_once('=') else { continue };
        let key = match name.trim() {
            "AccountName" => AzureConfigKey::AccountName,
            "AccountKey" => AzureConfigKey::AccessKey,
            "SharedAccessSignature" => AzureConfigKey::SasKey,
            "BlobEndpoint" => AzureConfigKey::Endpoint,
            _ => continue,
        };
        found.push((key, value.trim()));
    }
    let aliases = [
        ("AZURE_STORAGE_ACCOUNT", AzureConfigKey::AccountName),
        ("AZURE_STORAGE_KEY", AzureConfigKey::AccessKey),
        ("IDENTITY_ENDPOINT", AzureConfigKey::MsiEndpoint),
    ];
    found.extend(aliases.into_iter().filter_map(|(name, key)| Some((key, text(name)?))));
    found.extend(place.texts().filter_map(|(name, value)| {
        let name = name.starts_with("AZURE_").then(|| name.to_ascii_lowercase())?;
        Some((name.parse().ok()?, value))
    }));
    found.retain(|found| *found != (AzureConfigKey::CredentialType, "auto"));
    found
}
