//! Azure's chain: a key or signature of the account, a client's secret, the identity of a workload,
//! its command line, the machine's own identity.

use std::sync::Arc;

use object_store::azure::{AzureConfigKey, MicrosoftAzureBuilder};

use super::connector::OnDemand;
use super::keys::{Keys, Provider};
use super::object::is_word;
use super::{Object, Settings, Who, endpoint, says_yes};
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
    let of = object.account.as_ref().map(|(account, _)| account.clone());
    let name = format!("azure {}", of.as_deref().unwrap_or(""));
    let place = Place::now(name, counts, |_| Vec::new());
    let given = given(&place);
    let value = |key| given.iter().rev().find(|(other, _)| *other == key).map(|(_, text)| *text);
    let yes = |key| value(key).is_some_and(says_yes);

    let emulator = yes(AzureConfigKey::UseEmulator);
    let ours = value(AzureConfigKey::AccountName);
    let account = of.or_else(|| ours.map(str::to_owned));
    let account = account.or_else(|| emulator.then(|| EMULATOR.0.to_owned()));
    let account = account.filter(|name| is_word(name)).ok_or_else(|| {
        Error::InvalidArgument(format!(
            "`{}`: whose container? Set AZURE_STORAGE_ACCOUNT_NAME to the name of the account, or \
             name it in the address: abfss://container@account.dfs.core.windows.net/name",
            object.shown
        ))
    })?;
    // What is for one account is not shown to another.
    let foreign = ours.is_some_and(|ours| ours != account);
    let used = |key: &AzureConfigKey| !(foreign && OF_AN_ACCOUNT.contains(key));

    let server = match value(AzureConfigKey::Endpoint).filter(|_| !foreign) {
        _ if emulator => {
            let found = place.texts().find(|(name, _)| *name == EMULATOR_URL);
            let found = found.map_or(EMULATOR.1, |(_, text)| text);
            format!("{}/{account}", found.trim_end_matches('/'))
        }
        Some(given) => given.to_owned(),
        None => {
            let ending = object.account.as_ref().map_or("core.windows.net", |(_, ending)| ending);
            format!("https://{account}.blob.{ending}")
        }
    };
    let named = NAMING.into_iter().any(|key| used(&key) && value(key).is_some())
        || yes(AzureConfigKey::UseAzureCli)
        || emulator;
    let who = if yes(AzureConfigKey::SkipSignature) {
        Who::Anybody
    } else if named {
        Who::Named
    } else {
        Who::Machine
    };
    let mut builder = MicrosoftAzureBuilder::new().with_retry(super::keys::once());
    for (key, text) in given.iter().filter(|(key, _)| used(key)) {
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

/// What variables say; of two that mean the same the last counts.
fn given(place: &Place) -> Vec<(AzureConfigKey, &str)> {
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
    found
}
