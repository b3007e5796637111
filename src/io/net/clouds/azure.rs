//! Azure's chain: a key or signature of the account, a client's secret, the identity of a workload,
//! the machine's own identity.

use std::path::PathBuf;
use std::sync::Arc;

use object_store::azure::{AzureConfigKey, MicrosoftAzureBuilder};
use reqwest::header::HeaderValue;

use super::account::Account;
use super::connector::{Asks, OnDemand};
use super::keys::{Keys, Provider, once};
use super::object::{Object, is_word};
use super::settings::{Settings, Who, endpoint, printable, says_yes};
use crate::error::{Error, Result};
use crate::io::net::NetOptions;
use crate::io::net::place::Place;

/// The account of Azurite, and where it listens.
const EMULATOR: (&str, &str) = ("devstoreaccount1", "http://127.0.0.1:10000");
const EMULATOR_URL: &str = "AZURITE_BLOB_STORAGE_URL";
/// Sent to the server of a machine's identity.
const IDENTITY_HEADER: &str = "IDENTITY_HEADER";
/// What the chain is told, besides key and signature.
const TOLD: [AzureConfigKey; 10] = [
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
/// Those of them that do not name who asks.
const OF_AUTHORITIES: [AzureConfigKey; 3] =
    [AzureConfigKey::ClientSecret, AzureConfigKey::AuthorityId, AzureConfigKey::AuthorityHost];
/// Who asks before the command line of Azure would.
const BEFORE_CLI: [AzureConfigKey; 3] =
    [AzureConfigKey::Token, AzureConfigKey::ClientSecret, AzureConfigKey::FederatedTokenFile];
/// Bytes of the longest signature: a request's address has an end.
const LONGEST_SIGNATURE: usize = 8 << 10;

/// What the environment says.
pub fn settings(object: &Object, net: &NetOptions) -> Result<Settings> {
    let counts = |name: &[u8]| {
        name.starts_with(b"AZURE_")
            || name == b"IDENTITY_ENDPOINT"
            || [IDENTITY_HEADER, EMULATOR_URL].iter().any(|other| other.as_bytes() == name)
    };
    let of = object.account.as_ref();
    let of = of.map_or(String::new(), |(account, ending)| format!("{account}.{ending}"));
    let place = Place::now(format!("azure {of}"), counts, |place| {
        let file = value(&given(place), AzureConfigKey::FederatedTokenFile).map(PathBuf::from);
        file.into_iter().collect()
    });
    let given = given(&place);
    let yes = |key| value(&given, key).is_some_and(says_yes);
    let emulator = yes(AzureConfigKey::UseEmulator);
    let (name, account) = account(object, &given, &place)?;
    let server = server(object, &name, &account, &given, &place);
    let builder = told(&given, &account)?.with_use_emulator(emulator);
    let of_the_account = account.key.is_some() || account.signature.is_some();
    let mut naming = TOLD.into_iter().filter(|key| !OF_AUTHORITIES.contains(key));
    let who = if yes(AzureConfigKey::SkipSignature) {
        Who::Anybody
    } else if emulator || of_the_account || naming.any(|key| value(&given, key).is_some()) {
        Who::Named
    } else {
        Who::Machine
    };
    if who != Who::Anybody && !emulator {
        not_the_cli(&given, of_the_account)?;
    }
    let builder = builder.with_account(&name).with_container_name(&object.bucket);
    let asks = Asks { identity: identity(&place)?, ..Asks::default() };
    let build = move |connector: OnDemand| {
        let store = builder.clone().with_http_connector(connector).build()?;
        Ok(Provider::Azure(Arc::clone(store.credentials())))
    };
    let connector = OnDemand::new(net, who == Who::Machine, asks);
    let keys = Keys::new(place, connector, Arc::new(build));
    Ok(Settings { endpoint: endpoint(&server)?, account: name, who, keys })
}

/// The server of an account.
fn server(
    object: &Object,
    name: &str,
    account: &Account,
    given: &Given<'_>,
    place: &Place,
) -> String {
    let yes = |key| value(given, key).is_some_and(says_yes);
    if yes(AzureConfigKey::UseEmulator) {
        let found = place.texts().find(|(name, _)| *name == EMULATOR_URL);
        let found = found.map_or(EMULATOR.1, |(_, text)| text);
        return format!("{}/{name}", found.trim_end_matches('/'));
    }
    let fabric = yes(AzureConfigKey::UseFabricEndpoint);
    let usual = if fabric { "fabric.microsoft.com" } else { "core.windows.net" };
    let ending = object.account.as_ref().map_or(usual, |(_, ending)| ending);
    account.endpoint.clone().unwrap_or_else(|| format!("https://{name}.blob.{ending}"))
}

/// What the chain is told.
fn told(given: &Given<'_>, account: &Account) -> Result<MicrosoftAzureBuilder> {
    let mut builder = MicrosoftAzureBuilder::new().with_retry(once());
    for key in TOLD {
        if let Some(text) = value(given, key) {
            builder = builder.with_config(key, checked(key, text)?);
        }
    }
    if let Some(key) = &account.key {
        builder = builder.with_access_key(key);
    }
    let Some(signature) = &account.signature else { return Ok(builder) };
    if signature.len() > LONGEST_SIGNATURE {
        let what = format!("a shared access signature of more than {LONGEST_SIGNATURE} bytes");
        return Err(Error::InvalidArgument(what));
    }
    Ok(builder.with_config(AzureConfigKey::SasKey, signature))
}

/// Refuses what only the command line of Azure could answer.
fn not_the_cli(given: &Given<'_>, of_the_account: bool) -> Result<()> {
    let kind = value(given, AzureConfigKey::CredentialType);
    let others = of_the_account || BEFORE_CLI.iter().any(|key| value(given, *key).is_some());
    let asked = value(given, AzureConfigKey::UseAzureCli).is_some_and(says_yes);
    if kind != Some("azure_cli") && (!asked || kind.is_some() || others) {
        return Ok(());
    }
    let what = "Azure's command line is not asked for tokens: set AZURE_STORAGE_TOKEN to what `az \
                account get-access-token --resource https://storage.azure.com/ --query \
                accessToken --output tsv` prints";
    Err(Error::InvalidArgument(what.to_owned()))
}

/// The account of a container, that of its address or of the environment, and what is known of it.
fn account(object: &Object, given: &Given<'_>, place: &Place) -> Result<(String, Account)> {
    let text = |key| value(given, key).map(str::to_owned);
    let mine = Account {
        name: text(AzureConfigKey::AccountName),
        key: text(AzureConfigKey::AccessKey),
        signature: text(AzureConfigKey::SasKey),
        endpoint: text(AzureConfigKey::Endpoint),
    };
    let string = place.texts().find(|(name, _)| *name == "AZURE_STORAGE_CONNECTION_STRING");
    let string =
        string.map_or_else(|| Ok(Account::default()), |(_, text)| Account::of_string(text))?;
    // Variables that do not say whose they are go with those that do.
    let owner = mine.owner().or_else(|| string.owner()).map(|(name, _)| name);
    let mine = Account { name: owner.clone(), ..mine };
    let asked = object.account.as_ref();
    let emulator = value(given, AzureConfigKey::UseEmulator).is_some_and(says_yes);
    let named = asked.map(|(name, _)| name.clone()).or(owner.clone());
    let name = named.or_else(|| emulator.then(|| EMULATOR.0.to_owned()));
    let name = name.filter(|name| is_word(name)).ok_or_else(|| {
        Error::InvalidArgument(format!(
            "`{}`: no storage account given: set AZURE_STORAGE_ACCOUNT_NAME to its name, or use \
             abfss://container@account.dfs.core.windows.net/name",
            object.shown
        ))
    })?;
    if asked.is_some() && owner.is_none() && mine.has_something() {
        let what = format!(
            "`{}`: the environment has a key, a signature or an endpoint, and does not say of which \
             account: set AZURE_STORAGE_ACCOUNT_NAME to its name",
            object.shown
        );
        return Err(Error::InvalidArgument(what));
    }
    // What is for one account is not shown to another.
    let ending = asked.map(|(_, ending)| ending.as_str());
    let nobodys = owner.is_none();
    let ours = [mine, string].into_iter().filter(|found| nobodys || found.is_of(&name, ending));
    let found = ours.fold(Account::default(), Account::or);
    Ok((name, found))
}

/// A variable as the chain can use it.
fn checked(key: AzureConfigKey, text: &str) -> Result<String> {
    let variable = key.as_ref().to_ascii_uppercase();
    Ok(match key {
        AzureConfigKey::Token => printable(&variable, text)?.to_owned(),
        AzureConfigKey::MsiEndpoint => endpoint(text)?.to_string(),
        AzureConfigKey::AuthorityHost => {
            let bare = !text.contains("://");
            let found = if bare { format!("https://{text}") } else { text.to_owned() };
            endpoint(&found)?.as_str().trim_end_matches('/').to_owned()
        }
        AzureConfigKey::AuthorityId if !is_word(text) => {
            let what = format!("{variable}: expected the identity or the domain of a tenant");
            return Err(Error::InvalidArgument(what));
        }
        _ => text.to_owned(),
    })
}

/// What is sent to the server of a machine's identity.
fn identity(place: &Place) -> Result<Option<HeaderValue>> {
    let text = place.variable(IDENTITY_HEADER).and_then(|text| text.to_str());
    let found = text.map(|text| {
        HeaderValue::from_str(printable(IDENTITY_HEADER, text)?)
            .map_err(|_| Error::InvalidArgument(format!("{IDENTITY_HEADER}: not a header")))
    });
    found.transpose()
}

/// Variables that are set, and what they are called here.
type Given<'p> = Vec<(AzureConfigKey, &'p str)>;

/// What one is set to: of two that mean the same the last counts.
fn value<'p>(given: &Given<'p>, key: AzureConfigKey) -> Option<&'p str> {
    given.iter().rev().find(|(other, _)| *other == key).map(|(_, text)| *text)
}

/// What variables say.
fn given(place: &Place) -> Given<'_> {
    let text = |wanted| place.texts().find(|(name, _)| *name == wanted).map(|(_, text)| text);
    // The names of Azure's command line and of its libraries come first: others overrule them.
    let aliases = [
        ("AZURE_STORAGE_ACCOUNT", AzureConfigKey::AccountName),
        ("AZURE_STORAGE_KEY", AzureConfigKey::AccessKey),
        ("IDENTITY_ENDPOINT", AzureConfigKey::MsiEndpoint),
    ];
    let aliases = aliases.into_iter().filter_map(|(name, key)| Some((key, text(name)?)));
    let mut found: Vec<_> = aliases.collect();
    found.extend(place.texts().filter_map(|(name, value)| {
        let name = name.starts_with("AZURE_").then(|| name.to_ascii_lowercase())?;
        Some((name.parse().ok()?, value))
    }));
    found.retain(|found| *found != (AzureConfigKey::CredentialType, "auto"));
    found
}
