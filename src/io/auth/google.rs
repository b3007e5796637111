//! Google's credentials: a service account, application default credentials, the machine's account.

use std::io::ErrorKind;
use std::path::{Path, PathBuf};

use object_store::gcp::{GoogleCloudStorageBuilder, GoogleConfigKey};
use serde_json::Value;

use super::library::{CloudCredential, MissingCredentials};
use super::settings::{
    CloudIdentity, CloudSettings, IdentitySource, check_host, check_printable, is_truthy, library,
    missing_of_store, parse_endpoint, store_provider, without_retries,
};
use super::store::CredentialEnvironment;
use crate::error::{Error, Result};
use crate::io::transport::{FixedSettings, TransportOptions};

const DEFAULT_ENDPOINT: &str = "https://storage.googleapis.com";
/// The variable with the server of an emulator.
const EMULATOR: &str = "STORAGE_EMULATOR_HOST";
/// The beginnings of the names of variables that count.
const VARIABLES: &[&str] =
    &["GOOGLE_", "GCE_METADATA_", "NO_GCE_CHECK", "CLOUDSDK_CONFIG", EMULATOR];
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

/// Types of credentials files that only Google's own clients read.
const UNSUPPORTED_TYPES: [&str; 4] = [
    "impersonated_service_account",
    "external_account",
    "external_account_authorized_user",
    "gdch_service_account",
];
/// The variable with the project that pays for requests.
const QUOTA_PROJECT: &str = "GOOGLE_CLOUD_QUOTA_PROJECT";

/// The settings of the environment for a bucket.
pub fn settings(bucket: &str, options: &TransportOptions) -> Result<CloudSettings> {
    let environment = CredentialEnvironment::read("google".to_owned(), VARIABLES, |read| {
        credential_files(&builder(read)).chain(login_files(read).into_iter().flatten()).collect()
    });
    let builder = builder(&environment).with_bucket_name(bucket);
    let source = source(&builder, &environment);
    // An emulator needs no credentials, and its name may come without `http://`.
    let emulator = environment.text(EMULATOR).map(|name| {
        let scheme = if name.contains("://") { "" } else { "http://" };
        format!("{scheme}{name}")
    });
    let base_url = builder.get_config_value(&GoogleConfigKey::BaseUrl).or(emulator);
    let mut fixed = FixedSettings::default();
    if source != IdentitySource::Anonymous && !names_credentials(&builder) {
        check_login_file(&environment)?;
        fixed.metadata = metadata_hosts(&environment)?;
    }
    if let Some(token) = builder.get_config_value(&GoogleConfigKey::BearerToken) {
        check_printable("GOOGLE_BEARER_TOKEN", &token)?;
    }
    let document = credentials_document(&builder);
    let unsupported = unsupported_type(&document);
    let of_file = document.get("quota_project_id").and_then(Value::as_str);
    let quota_project = environment.text(QUOTA_PROJECT).or(of_file);
    let quota_project = quota_project.map(|named| check_printable(QUOTA_PROJECT, named));
    let quota_project = quota_project.transpose()?.map(Into::into);
    let make = move |client| {
        if let Some(what) = &unsupported {
            return Err(MissingCredentials::failed(ErrorKind::InvalidData, what));
        }
        let store =
            builder.clone().with_http_connector(client).build().map_err(missing_of_store)?;
        Ok(library(store.credentials(), CloudCredential::Google))
    };
    let endpoint = parse_endpoint(base_url.as_deref().unwrap_or(DEFAULT_ENDPOINT))?;
    let credentials = store_provider(&environment, options, source, fixed, make);
    let identity = CloudIdentity { account: "".into(), quota_project, credentials };
    Ok(CloudSettings { endpoint, source, identity })
}

/// True if the settings name a key, a token, or a file of them.
fn names_credentials(builder: &GoogleCloudStorageBuilder) -> bool {
    CREDENTIAL_KEYS.iter().any(|(key, _)| builder.get_config_value(key).is_some())
}

/// The identity that the settings ask for.
fn source(
    builder: &GoogleCloudStorageBuilder,
    environment: &CredentialEnvironment,
) -> IdentitySource {
    let anonymous = builder.get_config_value(&GoogleConfigKey::SkipSignature);
    let is_named = |name: &&str| environment.text(name).is_some();
    if anonymous.is_some_and(|text| is_truthy(&text)) || is_named(&EMULATOR) {
        IdentitySource::Anonymous
    } else if names_credentials(builder) || METADATA_VARIABLES.iter().any(is_named) {
        IdentitySource::Configured
    } else if environment.text("NO_GCE_CHECK").is_some_and(is_truthy) {
        IdentitySource::Anonymous
    } else {
        IdentitySource::Machine
    }
}

/// The files of credentials that the settings name.
fn credential_files(builder: &GoogleCloudStorageBuilder) -> impl Iterator<Item = PathBuf> {
    let files = CREDENTIAL_KEYS.iter().filter(|(_, file)| *file);
    files.filter_map(|(key, _)| builder.get_config_value(key)).map(PathBuf::from)
}

/// The content of the file of credentials, unless the settings have a token. Null if it cannot be
/// read, which the library reports.
fn credentials_document(builder: &GoogleCloudStorageBuilder) -> Value {
    let has_token = builder.get_config_value(&GoogleConfigKey::BearerToken).is_some();
    let path = credential_files(builder).next().filter(|_| !has_token);
    let read = path.and_then(|path| serde_json::from_slice(&std::fs::read(path).ok()?).ok());
    read.unwrap_or(Value::Null)
}

/// The message for credentials of a type that is not supported.
fn unsupported_type(document: &Value) -> Option<String> {
    let kind = document.get("type")?.as_str()?;
    UNSUPPORTED_TYPES.contains(&kind).then(|| {
        format!(
            "the credentials file has the type `{kind}`, which is not supported: set \
             GOOGLE_BEARER_TOKEN to what `gcloud auth application-default print-access-token` \
             prints, or use a file of the type `service_account` or `authorized_user`"
        )
    })
}

fn builder(environment: &CredentialEnvironment) -> GoogleCloudStorageBuilder {
    let mut builder = GoogleCloudStorageBuilder::new().with_retry(without_retries());
    for (name, value) in environment.texts().filter(|(name, _)| name.starts_with("GOOGLE_")) {
        if let Ok(key) = name.to_ascii_lowercase().parse() {
            builder = builder.with_config(key, value);
        }
    }
    let [named, default] = login_files(environment);
    match named.or(default).filter(|file| !names_credentials(&builder) && file.exists()) {
        Some(file) => builder.with_application_credentials(file.to_string_lossy()),
        None => builder,
    }
}

/// The files in which gcloud keeps the credentials of a login: in the folder that the settings name,
/// and in the default one.
fn login_files(environment: &CredentialEnvironment) -> [Option<PathBuf>; 2] {
    let named = environment.variable("CLOUDSDK_CONFIG").filter(|text| !text.is_empty());
    let default = environment.variable("HOME").map(|home| Path::new(home).join(".config/gcloud"));
    [named.map(PathBuf::from), default].map(|folder| Some(folder?.join(LOGIN_FILE)))
}

/// Refuses a folder without that file if the default folder contains one, because the chain would
/// use that one.
fn check_login_file(environment: &CredentialEnvironment) -> Result<()> {
    let [named, default] = login_files(environment);
    match default.filter(|file| named.is_some() && file.exists()) {
        None => Ok(()),
        Some(file) => Err(Error::InvalidArgument(format!(
            "the folder of CLOUDSDK_CONFIG has no {LOGIN_FILE}, but `{}` exists: set \
             GOOGLE_APPLICATION_CREDENTIALS to the file to use",
            file.display()
        ))),
    }
}

/// The names of the metadata server. The chain uses empty ones, too.
fn metadata_hosts(environment: &CredentialEnvironment) -> Result<Vec<String>> {
    let [name, root, address] =
        METADATA_VARIABLES.map(|variable| Some((variable, environment.variable(variable)?)));
    let mut found = Vec::new();
    for (variable, text) in name.or(root).into_iter().chain(address) {
        found.push(check_host(variable, &text.to_string_lossy())?.to_owned());
    }
    if found.is_empty() {
        found.extend(DEFAULT_METADATA_HOSTS.map(str::to_owned));
    }
    Ok(found)
}
