//! Google's chain: a service account, application default credentials, the machine's own account.

use std::path::PathBuf;
use std::sync::Arc;

use object_store::gcp::{GoogleCloudStorageBuilder, GoogleConfigKey};

use super::connector::{Asks, OnDemand};
use super::keys::{Keys, Provider, once};
use super::object::Object;
use super::settings::{Settings, Who, endpoint, host, printable, says_yes};
use crate::error::{Error, Result};
use crate::io::net::NetOptions;
use crate::io::net::place::Place;

const USUAL_ENDPOINT: &str = "https://storage.googleapis.com";
/// Variables that count besides those of `GOOGLE_`.
const VARIABLES: [&str; 7] = [
    "HOME",
    "CLOUDSDK_CONFIG",
    "STORAGE_EMULATOR_HOST",
    "NO_GCE_CHECK",
    "GCE_METADATA_HOST",
    "GCE_METADATA_ROOT",
    "GCE_METADATA_IP",
];
/// What names the metadata server: of the first two the first counts.
const METADATA: [&str; 3] = ["GCE_METADATA_HOST", "GCE_METADATA_ROOT", "GCE_METADATA_IP"];
const USUAL_METADATA: [&str; 2] = ["metadata.google.internal", "169.254.169.254"];
/// The file of application default credentials, in gcloud's folder.
const DEFAULT_FILE: &str = "application_default_credentials.json";
/// What names credentials, and where that is a file.
const NAMING: [(GoogleConfigKey, bool); 4] = [
    (GoogleConfigKey::ServiceAccount, true),
    (GoogleConfigKey::ServiceAccountKey, false),
    (GoogleConfigKey::ApplicationCredentials, true),
    (GoogleConfigKey::BearerToken, false),
];

/// What the environment says.
pub fn settings(object: &Object, net: &NetOptions) -> Result<Settings> {
    let counts = |name: &[u8]| {
        name.starts_with(b"GOOGLE_") || VARIABLES.iter().any(|other| other.as_bytes() == name)
    };
    let place = Place::now("google".to_owned(), counts, |place| {
        let builder = builder(place);
        let files = NAMING.iter().filter(|(_, file)| *file);
        let named = files.filter_map(|(key, _)| builder.get_config_value(key)).map(PathBuf::from);
        named.chain(default_file(place)).collect()
    });
    let builder = builder(&place).with_bucket_name(&object.bucket);
    let set = |name| place.variable(name).and_then(|value| value.to_str()).unwrap_or("");
    let emulator = set("STORAGE_EMULATOR_HOST");
    let key_or_token = NAMING.iter().any(|(key, _)| builder.get_config_value(key).is_some());
    let named = key_or_token || METADATA.iter().any(|name| !set(name).is_empty());
    let anybody = builder.get_config_value(&GoogleConfigKey::SkipSignature);
    let who = if anybody.is_some_and(|text| says_yes(&text)) || !emulator.is_empty() {
        Who::Anybody
    } else if named {
        Who::Named
    } else if says_yes(set("NO_GCE_CHECK")) {
        Who::Anybody
    } else {
        Who::Machine
    };
    let given = builder.get_config_value(&GoogleConfigKey::BaseUrl);
    // Nobody is told who asks there, and its name may come without `http://`.
    let with = if emulator.contains("://") { "" } else { "http://" };
    let given = given.or_else(|| (!emulator.is_empty()).then(|| format!("{with}{emulator}")));
    let mut asks = Asks::default();
    if who != Who::Anybody && !key_or_token {
        not_another(&place)?;
        asks.metadata = metadata(&place)?;
    }
    if let Some(token) = builder.get_config_value(&GoogleConfigKey::BearerToken) {
        printable("GOOGLE_BEARER_TOKEN", &token)?;
    }
    let connector = OnDemand::new(net, who == Who::Machine, asks);
    let build = move |connector: OnDemand| {
        let store = builder.clone().with_http_connector(connector).build()?;
        Ok(Provider::Google(Arc::clone(store.credentials())))
    };
    let endpoint = endpoint(given.as_deref().unwrap_or(USUAL_ENDPOINT))?;
    let keys = Keys::new(place, connector, Arc::new(build));
    Ok(Settings { endpoint, account: String::new(), who, keys })
}

fn builder(place: &Place) -> GoogleCloudStorageBuilder {
    let mut builder = GoogleCloudStorageBuilder::new().with_retry(once());
    for (name, value) in place.texts().filter(|(name, _)| name.starts_with("GOOGLE_")) {
        if let Ok(key) = name.to_ascii_lowercase().parse() {
            builder = builder.with_config(key, value);
        }
    }
    let named = NAMING.iter().any(|(key, _)| builder.get_config_value(key).is_some());
    match default_file(place).filter(|file| !named && file.exists()) {
        Some(file) => builder.with_application_credentials(file.to_string_lossy()),
        None => builder,
    }
}

/// Where gcloud keeps who has logged in.
fn default_file(place: &Place) -> Option<PathBuf> {
    let folder = place.variable("CLOUDSDK_CONFIG").filter(|text| !text.is_empty());
    folder.map(|folder| PathBuf::from(folder).join(DEFAULT_FILE)).or_else(|| usual_file(place))
}

fn usual_file(place: &Place) -> Option<PathBuf> {
    let home = PathBuf::from(place.variable("HOME")?);
    Some(home.join(".config/gcloud").join(DEFAULT_FILE))
}

/// Without a file in the folder that is named, another would be found in the usual one.
fn not_another(place: &Place) -> Result<()> {
    let elsewhere = place.variable("CLOUDSDK_CONFIG").is_some_and(|text| !text.is_empty());
    match usual_file(place).filter(|file| elsewhere && file.exists()) {
        None => Ok(()),
        Some(file) => Err(Error::InvalidArgument(format!(
            "the folder of CLOUDSDK_CONFIG has no {DEFAULT_FILE}, and there is `{}`: name the one \
             that is meant in GOOGLE_APPLICATION_CREDENTIALS",
            file.display()
        ))),
    }
}

/// The metadata server of a machine. An empty name is asked for by the chain, too.
fn metadata(place: &Place) -> Result<Vec<String>> {
    let [name, root, address] =
        METADATA.map(|variable| Some((variable, place.variable(variable)?)));
    let mut found = Vec::new();
    for (variable, text) in name.or(root).into_iter().chain(address) {
        found.push(host(variable, &text.to_string_lossy())?.to_owned());
    }
    if found.is_empty() {
        found.extend(USUAL_METADATA.map(str::to_owned));
    }
    Ok(found)
}
