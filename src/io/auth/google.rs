//! Google's credentials: a service account, application default credentials, the machine's account.

use std::path::PathBuf;
use std::sync::Arc;

use object_store::gcp::{GoogleCloudStorageBuilder, GoogleConfigKey};

use super::cache::{CloudCredential, CredentialProvider};
use super::settings::{
    CloudSettings, RequestIdentity, check_host, check_printable, is_truthy, parse_endpoint,
};
use super::snapshot::Snapshot;
use super::token_chain::{TokenChain, without_retries};
use super::token_client::{FixedSettings, TokenClient};
use crate::error::{Error, Result};
use crate::io::transport::TransportOptions;

const DEFAULT_ENDPOINT: &str = "https://storage.googleapis.com";
/// Variables that count besides those of `GOOGLE_`.
const OTHER_VARIABLES: [&str; 7] = [
    "HOME",
    "CLOUDSDK_CONFIG",
    "STORAGE_EMULATOR_HOST",
    "NO_GCE_CHECK",
    "GCE_METADATA_HOST",
    "GCE_METADATA_ROOT",
    "GCE_METADATA_IP",
];
/// Variables that name the metadata server: of the first two the first counts.
const METADATA_VARIABLES: [&str; 3] = ["GCE_METADATA_HOST", "GCE_METADATA_ROOT", "GCE_METADATA_IP"];
const DEFAULT_METADATA_HOSTS: [&str; 2] = ["metadata.google.internal", "169.254.169.254"];
/// The file of application default credentials, in gcloud's folder.
const LOGIN_FILE: &str = "application_default_credentials.json";
/// Settings that name credentials; true for those that name a file.
const CREDENTIAL_KEYS: [(GoogleConfigKey, bool); 4] = [
    (GoogleConfigKey::ServiceAccount, true),
    (GoogleConfigKey::ServiceAccountKey, false),
    (GoogleConfigKey::ApplicationCredentials, true),
    (GoogleConfigKey::BearerToken, false),
];

/// The settings of the environment for a bucket.
pub fn settings(bucket: &str, options: &TransportOptions) -> Result<CloudSettings> {
    let is_relevant = |name: &[u8]| {
        name.starts_with(b"GOOGLE_") || OTHER_VARIABLES.iter().any(|other| other.as_bytes() == name)
    };
    let snapshot = Snapshot::take("google".to_owned(), is_relevant, |snapshot| {
        let builder = builder(snapshot);
        let files = CREDENTIAL_KEYS.iter().filter(|(_, file)| *file);
        let named = files.filter_map(|(key, _)| builder.get_config_value(key)).map(PathBuf::from);
        named.chain(login_file(snapshot)).collect()
    });
    let builder = builder(&snapshot).with_bucket_name(bucket);
    let variable = |name| snapshot.variable(name).and_then(|value| value.to_str()).unwrap_or("");
    let emulator = variable("STORAGE_EMULATOR_HOST");
    let key_or_token =
        CREDENTIAL_KEYS.iter().any(|(key, _)| builder.get_config_value(key).is_some());
    let named = key_or_token || METADATA_VARIABLES.iter().any(|name| !variable(name).is_empty());
    let anonymous = builder.get_config_value(&GoogleConfigKey::SkipSignature);
    let identity = if anonymous.is_some_and(|text| is_truthy(&text)) || !emulator.is_empty() {
        RequestIdentity::Anonymous
    } else if named {
        RequestIdentity::Configured
    } else if is_truthy(variable("NO_GCE_CHECK")) {
        RequestIdentity::Anonymous
    } else {
        RequestIdentity::Machine
    };
    let base_url = builder.get_config_value(&GoogleConfigKey::BaseUrl);
    // An emulator needs no credentials, and its name may come without `http://`.
    let scheme = if emulator.contains("://") { "" } else { "http://" };
    let base_url =
        base_url.or_else(|| (!emulator.is_empty()).then(|| format!("{scheme}{emulator}")));
    let mut fixed = FixedSettings::default();
    if identity != RequestIdentity::Anonymous && !key_or_token {
        check_login_file(&snapshot)?;
        fixed.metadata = metadata_hosts(&snapshot)?;
    }
    if let Some(token) = builder.get_config_value(&GoogleConfigKey::BearerToken) {
        check_printable("GOOGLE_BEARER_TOKEN", &token)?;
    }
    let client = TokenClient::new(options, identity == RequestIdentity::Machine, fixed);
    let chain = TokenChain::new(client, move |client| {
        let store = builder.clone().with_http_connector(client).build()?;
        Ok((Arc::clone(store.credentials()), CloudCredential::Google))
    });
    let endpoint = parse_endpoint(base_url.as_deref().unwrap_or(DEFAULT_ENDPOINT))?;
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
    let named = CREDENTIAL_KEYS.iter().any(|(key, _)| builder.get_config_value(key).is_some());
    match login_file(snapshot).filter(|file| !named && file.exists()) {
        Some(file) => builder.with_application_credentials(file.to_string_lossy()),
        None => builder,
    }
}

/// The file in which gcloud keeps the credentials of a login.
fn login_file(snapshot: &Snapshot) -> Option<PathBuf> {
    let folder = snapshot.variable("CLOUDSDK_CONFIG").filter(|text| !text.is_empty());
    folder
        .map(|folder| PathBuf::from(folder).join(LOGIN_FILE))
        .or_else(|| default_login_file(snapshot))
}

fn default_login_file(snapshot: &Snapshot) -> Option<PathBuf> {
    let home = PathBuf::from(snapshot.variable("HOME")?);
    Some(home.join(".config/gcloud").join(LOGIN_FILE))
}

/// Refuses a folder without that file if the default folder contains one, because the chain would
/// use that one.
fn check_login_file(snapshot: &Snapshot) -> Result<()> {
    let elsewhere = snapshot.variable("CLOUDSDK_CONFIG").is_some_and(|text| !text.is_empty());
    match default_login_file(snapshot).filter(|file| elsewhere && file.exists()) {
        None => Ok(()),
        Some(file) => Err(Error::InvalidArgument(format!(
            "the folder of CLOUDSDK_CONFIG has no {LOGIN_FILE}, but `{}` exists: set \
             GOOGLE_APPLICATION_CREDENTIALS to the file to use",
            file.display()
        ))),
    }
}

/// The names of the metadata server. The chain uses empty ones, too.
fn metadata_hosts(snapshot: &Snapshot) -> Result<Vec<String>> {
    let [name, root, address] =
        METADATA_VARIABLES.map(|variable| Some((variable, snapshot.variable(variable)?)));
    let mut found = Vec::new();
    for (variable, text) in name.or(root).into_iter().chain(address) {
        found.push(check_host(variable, &text.to_string_lossy())?.to_owned());
    }
    if found.is_empty() {
        found.extend(DEFAULT_METADATA_HOSTS.map(str::to_owned));
    }
    Ok(found)
}
