//! Google's chain: a service account, application default credentials, the machine's own account.

use std::path::PathBuf;
use std::sync::Arc;

use object_store::gcp::{GoogleCloudStorageBuilder, GoogleConfigKey};

use super::connector::OnDemand;
use super::keys::{Keys, Provider, once};
use super::object::Object;
use super::settings::{Settings, Who, endpoint, says_yes};
use crate::error::Result;
use crate::io::net::NetOptions;
use crate::io::net::place::Place;

const USUAL_ENDPOINT: &str = "https://storage.googleapis.com";
/// Variables that count besides those of `GOOGLE_`.
const VARIABLES: [&str; 8] = [
    "HOME",
    "CLOUDSDK_CONFIG",
    "SERVICE_ACCOUNT",
    "STORAGE_EMULATOR_HOST",
    "NO_GCE_CHECK",
    "GCE_METADATA_HOST",
    "GCE_METADATA_ROOT",
    "GCE_METADATA_IP",
];
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
    let named = NAMING.iter().any(|(key, _)| builder.get_config_value(key).is_some())
        || ["GCE_METADATA_HOST", "GCE_METADATA_ROOT", "GCE_METADATA_IP"]
            .iter()
            .any(|name| !set(name).is_empty());
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
    let given = given.or_else(|| (!emulator.is_empty()).then(|| emulator.to_owned()));
    let connector = OnDemand::new(net, who == Who::Machine);
    let build = move || {
        let store = builder.clone().with_http_connector(connector.clone()).build()?;
        Ok(Provider::Google(Arc::clone(store.credentials())))
    };
    let endpoint = endpoint(given.as_deref().unwrap_or(USUAL_ENDPOINT))?;
    let keys = Keys::new(place, Arc::new(build));
    Ok(Settings { endpoint, account: String::new(), who, keys })
}

fn builder(place: &Place) -> GoogleCloudStorageBuilder {
    let mut builder = GoogleCloudStorageBuilder::new().with_retry(once());
    for (name, value) in place.texts().filter(|(name, _)| !VARIABLES[3..].contains(name)) {
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
    let folder = folder
        .map(PathBuf::from)
        .or_else(|| Some(PathBuf::from(place.variable("HOME")?).join(".config/gcloud")))?;
    Some(folder.join(DEFAULT_FILE))
}
