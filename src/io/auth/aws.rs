//! AWS: the settings of environment and profile, and AWS's own chain of credentials: environment,
//! shared files and profiles, web identity, roles of the machine.

use std::error::Error as _;
use std::fmt;
use std::io::ErrorKind;
use std::path::PathBuf;
use std::sync::atomic::AtomicBool;
use std::sync::{Arc, Mutex};
use std::time::{Duration, Instant};

use aws_config::environment::EnvironmentVariableRegionProvider;
use aws_config::imds::client::error::ImdsError;
use aws_config::imds::region::ImdsRegionProvider;
use aws_config::meta::region::RegionProviderChain;
use aws_config::profile::{ProfileFileRegionProvider, ProfileSet};
use aws_config::provider_config::ProviderConfig;
use aws_config::{BehaviorVersion, SdkConfig};
use aws_credential_types::provider::error::CredentialsError;
use aws_credential_types::provider::future;
use aws_sdk_s3::config::{Credentials, ProvideCredentials, Region, SharedCredentialsProvider};
use aws_sdk_s3::error::DisplayErrorContext;
use aws_types::os_shim_internal::{Env, Fs};

use super::cache::{
    BuildCredentialChain, CloudCredential, CredentialChain, CredentialFuture, CredentialProvider,
    FoundCredential, MissingCredentials, renew_at,
};
use super::snapshot::{PerSnapshot, Snapshot};
use crate::environment::read_guarded;
use crate::error::{Error, Escaped, Result};
use crate::io::transport::{Failure, LazySdkClient, TransportOptions, Trust};
use crate::sys::clock;
use crate::sys::sync::unpoisoned;

/// Time for which a missing region of the machine is cached: finding out may take seconds.
const ABSENCE_CACHED_FOR: Duration = Duration::from_secs(60);
/// Variables that name the profile: the SDK reads the first, boto3 both.
const PROFILE_VARIABLES: [&str; 2] = ["AWS_PROFILE", "AWS_DEFAULT_PROFILE"];
/// Variables of a pair of keys.
const KEY_VARIABLES: [&str; 2] = ["AWS_ACCESS_KEY_ID", "AWS_SECRET_ACCESS_KEY"];
/// Variables that show that AWS is used: key, region, profile, role, web identity, container.
const SIGNS: [&str; 10] = [
    "AWS_ACCESS_KEY_ID",
    "AWS_SECRET_ACCESS_KEY",
    "AWS_REGION",
    "AWS_DEFAULT_REGION",
    "AWS_PROFILE",
    "AWS_DEFAULT_PROFILE",
    "AWS_ROLE_ARN",
    "AWS_WEB_IDENTITY_TOKEN_FILE",
    "AWS_CONTAINER_CREDENTIALS_RELATIVE_URI",
    "AWS_CONTAINER_CREDENTIALS_FULL_URI",
];
/// The same, as settings of a profile.
const PROFILE_SIGNS: [&str; 7] = [
    "aws_access_key_id",
    "region",
    "role_arn",
    "sso_session",
    "sso_start_url",
    "credential_process",
    "web_identity_token_file",
];
const ENVIRONMENT_CHANGED: &str = "credentials must be loaded again, but the environment variables \
                                   that configure them have changed";

/// Credentials of S3.
#[derive(Clone)]
pub enum AwsCredentialSource {
    /// Keys of the call, or of its `.s3cfg`.
    Fixed(Credentials),
    /// Credentials that AWS's chain finds.
    Chain(CredentialProvider),
}

impl fmt::Debug for AwsCredentialSource {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        // The environment may hold secrets.
        f.write_str("AwsCredentialSource")
    }
}

impl AwsCredentialSource {
    /// The current credentials.
    pub async fn get(&self) -> Result<Credentials, MissingCredentials> {
        match self {
            AwsCredentialSource::Fixed(credentials) => Ok(credentials.clone()),
            AwsCredentialSource::Chain(provider) => match provider.get().await? {
                CloudCredential::Aws(credentials) => Ok(credentials),
                #[cfg(feature = "clouds")]
                _ => Err(MissingCredentials::Absent),
            },
        }
    }

    /// Removes the credentials that were in use at that time, because a server has refused them.
    pub fn invalidate(&self, used: Instant) {
        if let AwsCredentialSource::Chain(provider) = self {
            provider.invalidate(used);
        }
    }
}

impl ProvideCredentials for AwsCredentialSource {
    fn provide_credentials<'a>(&'a self) -> future::ProvideCredentials<'a>
    where
        Self: 'a,
    {
        future::ProvideCredentials::new(async {
            self.get()
                .await
                .map_err(|missing| CredentialsError::provider_error(Failure::from(missing)))
        })
    }
}

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

/// The settings of environment and profile. Contacts no server.
pub async fn settings(region: String, options: &TransportOptions) -> SdkConfig {
    let mut loader = aws_config::defaults(BehaviorVersion::latest()).region(Region::new(region));
    if let Some(profile) = profile() {
        loader = loader.profile_name(profile);
    }
    loader.http_client(LazySdkClient::new(options)).load().await
}

/// The region from the environment or the profile.
pub async fn named_region() -> Option<String> {
    let mut of_profile = ProfileFileRegionProvider::builder();
    if let Some(profile) = profile() {
        of_profile = of_profile.profile_name(profile);
    }
    let found = RegionProviderChain::first_try(EnvironmentVariableRegionProvider::new());
    found.or_else(of_profile.build()).region().await.map(|region| region.to_string())
}

/// The profiles in AWS's files; None if the files are malformed, which the chain itself reports.
async fn profiles() -> Option<ProfileSet> {
    let profile = profile().map(Into::into);
    aws_config::profile::load(&Fs::real(), &Env::real(), &Default::default(), profile).await.ok()
}

/// The certificates that the environment, or `ca_bundle` of the profile, names for AWS.
pub async fn trust() -> Option<Trust> {
    if let Some(trust) = Trust::from_variable("AWS_CA_BUNDLE") {
        return Some(trust);
    }
    let profiles = profiles().await?;
    let path = profiles.get("ca_bundle").filter(|path| !path.is_empty())?;
    let path = PathBuf::from(path);
    let path = match path.strip_prefix("~") {
        Ok(rest) => crate::environment::home()?.join(rest),
        Err(_) => path,
    };
    Some(Trust::Bundle { path, named_by: "`ca_bundle` of AWS's profile" })
}

/// A setting in the section `s3` of the profile.
pub async fn setting_of_s3(name: &str) -> Option<String> {
    let profiles = profiles().await?;
    let mut settings = profiles.get("s3")?.lines().filter_map(|line| line.split_once('='));
    let found = settings.find(|(found, _)| found.trim() == name);
    found.map(|(_, value)| value.trim().to_owned())
}

/// Refuses a profile that no file contains. Without files, the chain would skip the profile and use
/// other credentials.
pub async fn check_profile(uri: &str) -> Result<()> {
    let Some(profile) = profile().filter(|name| name != "default") else { return Ok(()) };
    if profiles().await.is_none_or(|profiles| profiles.get_profile(&profile).is_some()) {
        return Ok(());
    }
    let is_set = |name: &&str| std::env::var_os(name).is_some_and(|value| !value.is_empty());
    let variable = read_guarded(|| PROFILE_VARIABLES.into_iter().find(|name| is_set(name)));
    let what = format!(
        "{} names the profile `{}`, which was not found: neither ~/.aws/config nor \
         ~/.aws/credentials (or the files that AWS_CONFIG_FILE and AWS_SHARED_CREDENTIALS_FILE \
         name) has it",
        variable.unwrap_or("AWS_PROFILE"),
        Escaped(&profile)
    );
    Err(Error::io("opening", uri, std::io::Error::new(ErrorKind::PermissionDenied, what)))
}

/// The first variable, or setting of the profile, that shows that AWS is used.
pub async fn sign() -> Option<String> {
    if let Some(name) = SIGNS.into_iter().find(|name| variable(name).is_some()) {
        return Some(name.to_owned());
    }
    let profiles = profiles().await?;
    let found = PROFILE_SIGNS.into_iter().find(|name| profiles.get(name).is_some());
    found.map(|name| format!("`{name}` of AWS's profile"))
}

/// Refuses one key of a pair, of the environment or else of the profile, without the other. The
/// chain would skip half a pair of the environment, and use other credentials or none.
pub async fn check_pair(uri: &str) -> Result<()> {
    let [access, secret] = KEY_VARIABLES;
    let has_secret = variable(secret).is_some();
    let (set, missing) = match variable(access) {
        Some(_) if has_secret || variable("SECRET_ACCESS_KEY").is_some() => return Ok(()),
        Some(_) => (access, secret),
        None if has_secret => (secret, access),
        None => {
            let Some(profiles) = profiles().await else { return Ok(()) };
            let [access, secret] = ["aws_access_key_id", "aws_secret_access_key"];
            match [access, secret].map(|name| profiles.get(name).is_some()) {
                [true, false] => (access, secret),
                [false, true] => (secret, access),
                _ => return Ok(()),
            }
        }
    };
    let what = format!("`{uri}`: {set} is set, and {missing} is missing: set both, or neither");
    Err(Error::InvalidArgument(what))
}

/// The value of a variable; None if it is blank.
fn variable(name: &str) -> Option<String> {
    read_guarded(|| std::env::var(name).ok()).filter(|value| !value.trim().is_empty())
}

/// The variables and files of AWS's chain.
fn snapshot(region: String) -> Snapshot {
    let is_relevant = |name: &[u8]| name == b"HOME" || name.starts_with(b"AWS_");
    Snapshot::take(region, is_relevant, |snapshot| {
        let home = snapshot.variable("HOME").map(PathBuf::from);
        let file = |name: &str, usual: &str| {
            let named = snapshot.variable(name).map(PathBuf::from);
            named.or_else(|| Some(home.as_ref()?.join(".aws").join(usual)))
        };
        let files =
            [file("AWS_CONFIG_FILE", "config"), file("AWS_SHARED_CREDENTIALS_FILE", "credentials")];
        files.into_iter().flatten().collect()
    })
}

/// The credentials of AWS's chain in the present environment.
pub fn provider(region: String, options: &TransportOptions) -> CredentialProvider {
    let builder = AwsChain {
        snapshot: snapshot(String::new()),
        region: region.clone(),
        options: options.clone(),
    };
    CredentialProvider::new(snapshot(region), Arc::new(builder))
}

/// Builds AWS's chain.
struct AwsChain {
    snapshot: Snapshot,
    region: String,
    options: TransportOptions,
}

impl BuildCredentialChain for AwsChain {
    fn build(&self, _answered: &Arc<AtomicBool>) -> CredentialFuture<'_, Arc<dyn CredentialChain>> {
        Box::pin(async {
            // The chain reads the current environment, which may have changed since the snapshot.
            if !snapshot(String::new()).has_same_variables(&self.snapshot) {
                return Err(MissingCredentials::Failed(Failure::permanent(
                    ErrorKind::PermissionDenied,
                    format!("finding credentials: {ENVIRONMENT_CHANGED}"),
                )));
            }
            let settings = settings(self.region.clone(), &self.options).await;
            let provider = settings.credentials_provider().ok_or(MissingCredentials::Absent)?;
            Ok(Arc::new(AwsProvider(provider)) as Arc<dyn CredentialChain>)
        })
    }
}

/// A credential provider of the SDK as a credential chain.
struct AwsProvider(SharedCredentialsProvider);

impl CredentialChain for AwsProvider {
    fn get(&self) -> CredentialFuture<'_, FoundCredential> {
        Box::pin(async {
            let credentials = self.0.provide_credentials().await.map_err(missing_credentials)?;
            let expiry = credentials.expiry();
            let renew_at = expiry.map(|expiry| renew_at(clock::date(), expiry));
            Ok(FoundCredential { credential: CloudCredential::Aws(credentials), expiry, renew_at })
        })
    }
}

fn missing_credentials(error: CredentialsError) -> MissingCredentials {
    if is_absent(&error) {
        return MissingCredentials::Absent;
    }
    let what = format!("finding credentials: {}", DisplayErrorContext(error));
    MissingCredentials::Failed(Failure::transient(ErrorKind::PermissionDenied, what))
}

/// True if no credentials are configured. Other clouds have their own service at the address of
/// AWS's metadata service. No response, or an unexpected one, from this address therefore also
/// means that there are none; a busy service does not.
fn is_absent(error: &CredentialsError) -> bool {
    let of_metadata_service = error.source().and_then(|cause| cause.downcast_ref::<ImdsError>());
    match of_metadata_service {
        Some(ImdsError::ErrorResponse(error)) => {
            let status = error.response().status().as_u16();
            status < 500 && status != 429
        }
        Some(_) => true,
        None => matches!(error, CredentialsError::CredentialsNotLoaded(_)),
    }
}

/// The region of this machine from its metadata service, and the time of the look-up.
#[derive(Default)]
struct MachineRegion {
    asking: tokio::sync::Mutex<()>,
    found: Mutex<Option<(Option<String>, Instant)>>,
}

static REGIONS: PerSnapshot<MachineRegion> = PerSnapshot::new();

/// The region that the metadata service of this machine names.
pub async fn machine_region(options: &TransportOptions) -> Option<String> {
    let cached = REGIONS.get(&Arc::new(snapshot(String::new())));
    let _asking = cached.asking.lock().await;
    let is_current = |(region, since): &(Option<String>, Instant)| {
        region.is_some() || clock::since(*since) < ABSENCE_CACHED_FOR
    };
    let before = unpoisoned(cached.found.lock()).clone().filter(is_current);
    if let Some((region, _)) = before {
        return region;
    }
    let config = ProviderConfig::default().with_http_client(LazySdkClient::new(options));
    let provider = ImdsRegionProvider::builder().configure(&config).build();
    let region = provider.region().await.map(|region| region.to_string());
    unpoisoned(cached.found.lock()).insert((region, clock::now())).0.clone()
}

/// Has the chain of an environment find the credentials of a simulated cloud, for tests.
#[cfg(test)]
pub fn simulate(
    simulated_cloud: &Arc<crate::io::transport::simulated::SimulatedCloud>,
    region: &str,
    options: &TransportOptions,
) {
    let found = SharedCredentialsProvider::new(SimulatedAwsProvider(Arc::clone(simulated_cloud)));
    provider(region.to_owned(), options).use_chain(Arc::new(AwsProvider(found)));
}

#[cfg(test)]
#[derive(Debug)]
struct SimulatedAwsProvider(Arc<crate::io::transport::simulated::SimulatedCloud>);

#[cfg(test)]
impl ProvideCredentials for SimulatedAwsProvider {
    fn provide_credentials<'a>(&'a self) -> future::ProvideCredentials<'a>
    where
        Self: 'a,
    {
        let issued = self.0.issue().map(|(name, hold)| {
            Credentials::new(name, "secret", None, clock::date().checked_add(hold), "day")
        });
        let unavailable = || CredentialsError::provider_error("no answer");
        future::ProvideCredentials::ready(issued.ok_or_else(unavailable))
    }
}

#[cfg(test)]
#[allow(clippy::unwrap_used)]
mod tests {
    use super::*;

    #[test]
    fn absent_credentials_differ_from_an_unavailable_service() {
        let unavailable = missing_credentials(CredentialsError::provider_error("no answer"));
        let MissingCredentials::Failed(failure) = unavailable else { panic!("absent") };
        assert!(format!("{failure:?}").contains("repeat: Attempts"), "{failure:?}");
        assert!(matches!(
            missing_credentials(CredentialsError::not_loaded("none")),
            MissingCredentials::Absent
        ));
    }
}
