//! Credentials of a profile that `aws login` has made: the AWS CLI keeps them in a file.

use std::path::{Path, PathBuf};

use aws_config::profile::ProfileSet;
use aws_credential_types::credential_fn::provide_credentials_fn;
use aws_credential_types::provider;
use aws_credential_types::provider::error::CredentialsError;
use aws_sdk_s3::config::{Credentials, ProvideCredentials};
use aws_sdk_s3::primitives::{DateTime, DateTimeFormat};
use serde_json::Value;
use sha2::{Digest as _, Sha256};

use crate::environment::{home, read_guarded};
use crate::sys::clock;

/// The advice for sessions that cannot be used.
pub const HOW_TO_USE_LOGINS: &str = "run `aws login` again, or have the AWS CLI renew the session: give the profile \
     `credential_process = aws configure export-credentials --format process --profile NAME`, where \
     NAME is that of the profile with `login_session`";
/// The variable that names the folder of sessions.
const FOLDER: &str = "AWS_LOGIN_CACHE_DIRECTORY";
/// Settings of a profile that take precedence over its session.
const PREFERRED: [&str; 4] = ["role_arn", "credential_source", "sso_session", "sso_start_url"];

/// The credentials of the session that the profile names. Its file is read each time, because the
/// AWS CLI renews it.
pub fn login_session(profiles: &ProfileSet) -> Option<impl ProvideCredentials + use<>> {
    let session = profiles.get("login_session")?;
    if PREFERRED.iter().any(|name| profiles.get(name).is_some()) {
        return None;
    }
    let folder = read_guarded(|| std::env::var_os(FOLDER)).map(PathBuf::from);
    let folder = folder.or_else(|| Some(home()?.join(".aws/login/cache")))?;
    let hash = Sha256::digest(session.trim());
    let name: String = hash.iter().map(|byte| format!("{byte:02x}")).collect();
    let file = folder.join(name + ".json");
    Some(provide_credentials_fn(move || std::future::ready(read(&file))))
}

fn read(file: &Path) -> provider::Result {
    let failed = |what: &str| {
        CredentialsError::provider_error(format!(
            "the session of `aws login` in `{}` {what}: {HOW_TO_USE_LOGINS}",
            file.display()
        ))
    };
    let bytes = std::fs::read(file).map_err(|e| failed(&format!("is missing ({e})")))?;
    let document: Value = serde_json::from_slice(&bytes).unwrap_or(Value::Null);
    let text = |name| Some(document.get("accessToken")?.get(name)?.as_str()?.to_owned());
    let read = ["accessKeyId", "secretAccessKey", "sessionToken", "expiresAt"].map(text);
    let [Some(access), Some(secret), token @ Some(_), Some(expiry)] = read else {
        return Err(failed("is malformed"));
    };
    let expiry = DateTime::from_str(&expiry, DateTimeFormat::DateTime).ok();
    match expiry.and_then(|expiry| expiry.try_into().ok()) {
        Some(expiry) if expiry > clock::date() => {
            Ok(Credentials::new(access, secret, token, Some(expiry), "login"))
        }
        _ => Err(failed("has expired")),
    }
}
