//! AWS's own chain of credentials: environment, shared files and profiles, web identity, roles of the
//! machine.

use std::error::Error as _;
use std::io::ErrorKind;
use std::path::PathBuf;
use std::sync::Arc;

use aws_config::environment::EnvironmentVariableCredentialsProvider;
use aws_config::imds::client::error::ImdsError;
use aws_config::meta::credentials::CredentialsProviderChain;
use aws_config::profile::ProfileSet;
use aws_config::{BehaviorVersion, SdkConfig};
use aws_credential_types::provider::error::CredentialsError;
use aws_credential_types::provider::future;
use aws_sdk_s3::config::{Credentials, ProvideCredentials, Region, SharedCredentialsProvider};
use aws_sdk_s3::error::DisplayErrorContext;
use aws_types::os_shim_internal::{Env, Fs};

use super::aws_login::{HOW_TO_USE_LOGINS, login_session};
use super::library::{CloudCredential, LibraryProvider, MissingCredentials};
use super::provider::{CredentialProvider, MakingProvider};
use super::store::{CredentialEnvironment, PROVIDERS};
use crate::environment::read_guarded;
use crate::io::transport::{Failure, TransportOptions, credential_client};

/// Variables that name the profile: the SDK reads the first, boto3 both.
pub const PROFILE_VARIABLES: [&str; 2] = ["AWS_PROFILE", "AWS_DEFAULT_PROFILE"];
/// The feature of the SDK for sessions of `aws login`, which its error names.
const LOGIN_FEATURE: &str = "credentials-login";
const ENVIRONMENT_CHANGED: &str = "credentials must be loaded again, but the environment variables \
                                   that configure them have changed";

/// The profile that the environment names; None for the default one. The SDK would take an empty
/// name for the name of a profile.
pub fn profile() -> Option<String> {
    read_guarded(|| {
        let values = PROFILE_VARIABLES.map(|name| std::env::var(name).ok());
        let named = values.iter().flatten().find(|name| !name.is_empty()).cloned();
        let is_empty = values.iter().flatten().next().is_some();
        named.or_else(|| is_empty.then(|| "default".to_owned()))
    })
}

/// The profiles in AWS's files; None if the files are malformed, which the chain itself reports.
pub async fn profiles() -> Option<ProfileSet> {
    let profile = profile().map(Into::into);
    aws_config::profile::load(&Fs::real(), &Env::real(), &Default::default(), profile).await.ok()
}

/// The settings of environment and profile. Contacts no server.
pub async fn settings(region: String, options: &TransportOptions) -> SdkConfig {
    let mut loader = aws_config::defaults(BehaviorVersion::latest()).region(Region::new(region));
    if let Some(profile) = profile() {
        loader = loader.profile_name(profile);
    }
    loader.http_client(credential_client(options)).load().await
}

/// The variables and files of AWS's chain.
pub fn environment(region: String) -> Arc<CredentialEnvironment> {
    CredentialEnvironment::read(region, &["AWS_"], |read| {
        let home = read.variable("HOME").map(PathBuf::from);
        let file = |name: &str, usual: &str| {
            let named = read.variable(name).map(PathBuf::from);
            named.or_else(|| Some(home.as_ref()?.join(".aws").join(usual)))
        };
        let files =
            [file("AWS_CONFIG_FILE", "config"), file("AWS_SHARED_CREDENTIALS_FILE", "credentials")];
        files.into_iter().flatten().collect()
    })
}

/// The credentials of AWS's chain in the present environment.
pub fn provider(region: String, options: &TransportOptions) -> Arc<CredentialProvider> {
    let read = environment(region.clone());
    PROVIDERS.get(&read, || {
        let (read, options) = (Arc::clone(&read), options.clone());
        let make = move || {
            let (read, region, options) = (Arc::clone(&read), region.clone(), options.clone());
            let chain = async move {
                // The chain reads the current environment, which may have changed.
                if environment(String::new()).variables != read.variables {
                    let kind = ErrorKind::PermissionDenied;
                    return Err(MissingCredentials::failed(kind, ENVIRONMENT_CHANGED));
                }
                let chain = chain(region, &options).await;
                chain.map(library).ok_or(MissingCredentials::Absent)
            };
            Box::pin(chain) as MakingProvider
        };
        CredentialProvider::new(make, None)
    })
}

/// The SDK's chain. The SDK has sessions of `aws login` only with a feature that takes a minute to
/// compile.
async fn chain(region: String, options: &TransportOptions) -> Option<SharedCredentialsProvider> {
    if let Some(session) = profiles().await.as_ref().and_then(login_session) {
        let variables = EnvironmentVariableCredentialsProvider::new();
        let chain = CredentialsProviderChain::first_try("variables", variables);
        return Some(SharedCredentialsProvider::new(chain.or_else("login", session)));
    }
    settings(region, options).await.credentials_provider()
}

/// A provider of the SDK.
pub fn library(provider: SharedCredentialsProvider) -> LibraryProvider {
    Arc::new(move || {
        let provider = provider.clone();
        Box::pin(async move {
            let found = provider.provide_credentials().await.map_err(missing_of_aws)?;
            let expiry = found.expiry();
            Ok((CloudCredential::Aws(found), expiry))
        })
    })
}

/// The credentials of two keys.
pub fn fixed(credentials: Credentials) -> Arc<CredentialProvider> {
    let make = move || {
        let provider = library(SharedCredentialsProvider::new(credentials.clone()));
        Box::pin(async { Ok(provider) }) as MakingProvider
    };
    Arc::new(CredentialProvider::new(make, None))
}

impl ProvideCredentials for CredentialProvider {
    fn provide_credentials<'a>(&'a self) -> future::ProvideCredentials<'a>
    where
        Self: 'a,
    {
        future::ProvideCredentials::new(async {
            match self.get().await {
                Ok(CloudCredential::Aws(credentials)) => Ok(credentials),
                #[cfg(feature = "clouds")]
                Ok(_) => Err(CredentialsError::not_loaded("credentials of another cloud")),
                Err(missing) => Err(CredentialsError::provider_error(Failure::from(missing))),
            }
        })
    }
}

/// The failure of the SDK's chain.
pub fn missing_of_aws(error: CredentialsError) -> MissingCredentials {
    if is_absent(&error) {
        return MissingCredentials::Absent;
    }
    let what = DisplayErrorContext(error).to_string();
    if what.contains(LOGIN_FEATURE) {
        let what = format!("a role is assumed with a session of `aws login`: {HOW_TO_USE_LOGINS}");
        return MissingCredentials::failed(ErrorKind::PermissionDenied, &what);
    }
    MissingCredentials::of(Failure::transient(ErrorKind::PermissionDenied, what))
}

/// True if no credentials are configured. Other clouds have their own service at the address of
/// AWS's metadata service. No response, or an unexpected one, from this address therefore also
/// means that there are none; a busy service does not.
fn is_absent(error: &CredentialsError) -> bool {
    match error.source().and_then(|cause| cause.downcast_ref()) {
        Some(ImdsError::ErrorResponse(error)) => {
            let status = error.response().status().as_u16();
            status < 500 && status != 429
        }
        Some(_) => true,
        None => matches!(error, CredentialsError::CredentialsNotLoaded(_)),
    }
}
