//! Google's credentials: a service account, application default credentials, the machine's account.

use std::path::PathBuf;
use std::sync::Arc;

use object_store::gcp::{GoogleCloudStorageBuilder, GoogleConfigKey};

use super::cache::{CloudCredential, CredentialProvider};
use super::settings::{CloudSettings, RequestIdentity, endpoint, host, printable, says_yes};
use super::snapshot::Snapshot;
use super::token_chain::{TokenChain, without_retries};
use super::token_client::{FixedSettings, TokenClient};
use crate::error::{Error, Result};
use crate::io::transport::TransportOptions;

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
/// Variables that name the metadata server: of the first two the first counts.
const METADATA: [&str; 3] = ["GCE_METADATA_HOST", "GCE_METADATA_ROOT", "GCE_METADATA_IP"];
const USUAL_METADATA: [&str; 2] = ["metadata.google.internal", "169.254.169.254"];
/// The file of application default credentials, in gcloud's folder.
const DEFAULT_FILE: &str = "application_default_credentials.json";
/// Settings that name credentials; true for those that name a file.
const NAMING: [(GoogleConfigKey, bool); 4] = [
    (GoogleConfigKey::ServiceAccount, true),
    (GoogleConfigKey::ServiceAccountKey, false),
    (GoogleConfigKey::ApplicationCredentials, true),
    (GoogleConfigKey::BearerToken, false),
];

/// The settings of the environment for a bucket.
pub fn settings(bucket: &str, options: &TransportOptions) -> Result<CloudSettings> {
    let counts = |name: &[u8]| {
        name.starts_with(b"GOOGLE_") || VARIABLES.iter().any(|other| other.as_bytes() == name)
    };
    let snapshot = Snapshot::take("google".to_owned(), counts, |snapshot| {
        let builder = builder(snapshot);
        let files = NAMING.iter().filter(|(_, file)| *file);
        let named = files.filter_map(|(key, _)| builder.get_config_value(key)).map(PathBuf::from);
        named.chain(default_file(snapshot)).collect()
    });
    let builder = builder(&snapshot).with_bucket_name(bucket);
    let set = |name| snapshot.variable(name).and_then(|value| value.to_str()).unwrap_or("");
    let emulator = set("STORAGE_EMULATOR_HOST");
    let key_or_token = NAMING.iter().any(|(key, _)| builder.get_config_value(key).is_some());
    let named = key_or_token || METADATA.iter().any(|name| !set(name).is_empty());
    let anonymous = builder.get_config_value(&GoogleConfigKey::SkipSignature);
    let identity = if anonymous.is_some_and(|text| says_yes(&text)) || !emulator.is_empty() {
        RequestIdentity::Anonymous
    } else if named {
        RequestIdentity::Configured
    } else if says_yes(set("NO_GCE_CHECK")) {
        RequestIdentity::Anonymous
    } else {
        RequestIdentity::Machine
    };
    let given = builder.get_config_value(&GoogleConfigKey::BaseUrl);
    // An emulator needs no credentials, and its name may come without `http://`.
    let with = if emulator.contains("://") { "" } else { "http://" };
    let given = given.or_else(|| (!emulator.is_empty()).then(|| format!("{with}{emulator}")));
    let mut fixed = FixedSettings::default();
    if identity != RequestIdentity::Anonymous && !key_or_token {
        check_default_file(&snapshot)?;
        fixed.metadata = metadata(&snapshot)?;
    }
    if let Some(token) = builder.get_config_value(&GoogleConfigKey::BearerToken) {
        printable("GOOGLE_BEARER_TOKEN", &token)?;
    }
    let client = TokenClient::new(options, identity == RequestIdentity::Machine, fixed);
    let chain = TokenChain::new(client, move |client| {
        let store = builder.clone().with_http_connector(client).build()?;
        Ok((Arc::clone(store.credentials()), CloudCredential::Google))
    });
    let endpoint = endpoint(given.as_deref().unwrap_or(USUAL_ENDPOINT))?;
    let credentials = CredentialProvider::new(snapshot, Arc::new(chain));
    Ok(CloudSettings { endpoint, account: String::new(), identity, credentials })
}

fn builder(snapshot: &Snapshot) -> GoogleCloudStorageBuilder {
    let mut builder = GoogleCloudStorageBuilder::new().with_retry(without_retries());
    for (name, value) in snapshot.texts().filter(|(name, _)| name.starts_with("GOOGLE_")) {
        if let Ok(key) = name.to_ascii_lowercase().parse() {
            builder = builder.with_config(key, value);
        }
    }
    let named = NAMING.iter().any(|(key, _)| builder.get_config_value(key).is_some());
    match default_file(snapshot).filter(|file| !named && file.exists()) {
        Some(file) => builder.with_application_credentials(file.to_string_lossy()),
        None => builder,
    }
}

/// The file in which gcloud keeps the credentials of a login.
fn default_file(snapshot: &Snapshot) -> Option<PathBuf> {
    let folder = snapshot.variable("CLOUDSDK_CONFIG").filter(|text| !text.is_empty());
    folder.map(|folder| PathBuf::from(folder).join(DEFAULT_FILE)).or_else(|| usual_file(snapshot))
}

fn usual_file(snapshot: &Snapshot) -> Option<PathBuf> {
    let home = PathBuf::from(snapshot.variable("HOME")?);
    Some(home.join(".config/gcloud").join(DEFAULT_FILE))
}

/// Refuses a folder without that file where the usual folder has one: the chain would find that.
fn check_default_file(snapshot: &Snapshot) -> Result<()> {
    let elsewhere = snapshot.variable("CLOUDSDK_CONFIG").is_some_and(|text| !text.is_empty());
    match usual_file(snapshot).filter(|file| elsewhere && file.exists()) {
        None => Ok(()),
        Some(file) => Err(Error::InvalidArgument(format!(
            "the folder of CLOUDSDK_CONFIG has no {DEFAULT_FILE}, and there is `{}`: name the one \
             that is meant in GOOGLE_APPLICATION_CREDENTIALS",
            file.display()
        ))),
    }
}

/// The names of the metadata server. The chain uses empty ones, too.
fn metadata(snapshot: &Snapshot) -> Result<Vec<String>> {
    let [name, root, address] =
        METADATA.map(|variable| Some((variable, snapshot.variable(variable)?)));
    let mut found = Vec::new();
    for (variable, text) in name.or(root).into_iter().chain(address) {
        found.push(host(variable, &text.to_string_lossy())?.to_owned());
    }
    if found.is_empty() {
        found.extend(USUAL_METADATA.map(str::to_owned));
    }
    Ok(found)
}
