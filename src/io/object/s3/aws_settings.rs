//! Settings of AWS in the environment and the profile, except credentials.

use std::io::ErrorKind;
use std::time::{Duration, Instant};

use aws_config::imds::region::ImdsRegionProvider;
use aws_config::meta::region::ProvideRegion as _;
use aws_config::profile::ProfileFileRegionProvider;
use aws_config::provider_config::ProviderConfig;

use crate::environment::{expand_home, read_guarded};
use crate::error::{Error, Escaped, Result};
use crate::io::auth::PerEnvironment;
use crate::io::auth::aws::{self, PROFILE_VARIABLES, profile, profiles};
use crate::io::transport::{TransportOptions, Trust, credential_client};
use crate::sys::clock;

/// Time for which a missing region of the machine is known: finding out may take seconds.
const ABSENCE_KNOWN_FOR: Duration = Duration::from_secs(60);
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
const PROFILE_SIGNS: [&str; 8] = [
    "aws_access_key_id",
    "region",
    "role_arn",
    "sso_session",
    "sso_start_url",
    "login_session",
    "credential_process",
    "web_identity_token_file",
];

/// The region from the environment or the profile.
pub async fn named_region() -> Option<String> {
    if let Some(region) = variable("AWS_REGION").or_else(|| variable("AWS_DEFAULT_REGION")) {
        return Some(region);
    }
    // It follows `source_profile`.
    let mut of_profile = ProfileFileRegionProvider::builder();
    if let Some(profile) = profile() {
        of_profile = of_profile.profile_name(profile);
    }
    of_profile.build().region().await.map(|region| region.to_string())
}

/// The certificates that the environment, or `ca_bundle` of the profile, names for AWS.
pub async fn trust() -> Option<Trust> {
    if let Some(trust) = Trust::from_variable("AWS_CA_BUNDLE") {
        return Some(trust);
    }
    let profiles = profiles().await?;
    let path = profiles.get("ca_bundle").filter(|path| !path.is_empty())?;
    let path = expand_home(path.into())?;
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
    Err(Error::failed("opening", uri, ErrorKind::PermissionDenied, what))
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
    let (names, are_set) = match KEY_VARIABLES.map(|name| variable(name).is_some()) {
        [false, false] => {
            let Some(profiles) = profiles().await else { return Ok(()) };
            let names = ["aws_access_key_id", "aws_secret_access_key"];
            (names, names.map(|name| profiles.get(name).is_some()))
        }
        [access, secret] => {
            (KEY_VARIABLES, [access, secret || variable("SECRET_ACCESS_KEY").is_some()])
        }
    };
    let (set, missing) = match (names, are_set) {
        ([set, missing], [true, false]) | ([missing, set], [false, true]) => (set, missing),
        _ => return Ok(()),
    };
    let what = format!("`{uri}`: {set} is set, and {missing} is missing: set both, or neither");
    Err(Error::InvalidArgument(what))
}

/// The value of a variable; None if it is blank.
fn variable(name: &str) -> Option<String> {
    read_guarded(|| std::env::var(name).ok()).filter(|value| !value.trim().is_empty())
}

/// The region of this machine from its metadata service, and the time of the look-up.
type MachineRegion = tokio::sync::Mutex<Option<(Option<String>, Instant)>>;

static REGIONS: PerEnvironment<MachineRegion> = PerEnvironment::new();

/// The region that the metadata service of this machine names.
pub async fn machine_region(options: &TransportOptions) -> Option<String> {
    let kept = REGIONS.get(&aws::environment(String::new()), MachineRegion::default);
    let mut kept = kept.lock().await;
    let is_current = |(region, since): &(Option<String>, Instant)| {
        region.is_some() || clock::since(*since) < ABSENCE_KNOWN_FOR
    };
    if let Some((region, _)) = kept.clone().filter(is_current) {
        return region;
    }
    let config = ProviderConfig::default().with_http_client(credential_client(options));
    let provider = ImdsRegionProvider::builder().configure(&config).build();
    let region = provider.region().await.map(|region| region.to_string());
    kept.insert((region, clock::now())).0.clone()
}
