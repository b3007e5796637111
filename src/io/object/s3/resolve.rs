//! The server, the region and the credentials of a bucket. Credentials come from, in this order:
//! the call's arguments, `~/.s3cfg` or another file of that kind, AWS's own chain. Without any,
//! objects are read anonymously. [`super::server_choice`] has the rules for the server.

use std::ffi::OsStr;
use std::io::ErrorKind;
use std::sync::Arc;

use aws_config::{BehaviorVersion, SdkConfig};
use aws_sdk_s3::Client;
use aws_sdk_s3::config::retry::RetryConfig;
use aws_sdk_s3::config::{
    AppName, Credentials, IdentityCache, ProvideCredentials, Region, RequestChecksumCalculation,
    ResponseChecksumValidation,
};
use aws_sdk_s3::types::{RequestPayer, ServerSideEncryption};
use aws_smithy_runtime_api::client::http::HttpClient;
use reqwest::Url;

use super::address::S3Address;
use super::aws_settings;
use super::clock::ServerClock;
use super::endpoint::{
    self, DEFAULT_READ_ENDPOINT, DEFAULT_WRITE_ENDPOINT, Server, parse_addressing_style,
};
use super::s3cfg::S3Cfg;
use super::server_choice::{KnownSettings, ServerChoice, StatedKeys, choose, stated_keys};
use crate::cancel::Cancel;
use crate::environment::{S3_ADDRESSING_STYLE, S3_ENCRYPTION, S3_KMS_KEY_ID, read_guarded};
use crate::error::{Error, Escaped, Result};
use crate::io::auth::{CredentialProvider, MissingCredentials, aws};
use crate::io::transport::{S3_SETTINGS, TransportOptions, Trust, run_once};
use crate::io::{OpenOptions, S3Options};
use crate::sys::fork_safe_mutex::ForkSafeMutex;

/// The variable that names the payer of requests.
const PAYER: &str = "AWS_REQUEST_PAYER";
/// The default region for signatures.
const DEFAULT_REGION: &str = "us-east-1";

/// A bucket: its server, and the credentials of requests.
pub struct S3Bucket {
    pub server: Server,
    /// True if an argument, a file or the environment states the server.
    pub is_endpoint_named: bool,
    pub bucket: String,
    /// None for anonymous requests.
    pub credentials: Option<Arc<CredentialProvider>>,
    /// True if a search for credentials has found none.
    pub none_found: bool,
    /// The configured region, or the default one.
    region: String,
    /// The region of the bucket, if AWS has named another one.
    pub bucket_region: ForkSafeMutex<Option<String>>,
    /// The time that requests are signed at.
    pub clock: ServerClock,
    requester_pays: bool,
    /// True if uploads carry checksums.
    pub checksums: bool,
    /// The encryption of uploads by the server: its name, and the id of a key.
    pub encryption: (Option<ServerSideEncryption>, Option<String>),
}

impl S3Bucket {
    /// A client of the SDK over this one of HTTP. It asks for the present credentials with each
    /// request.
    pub fn client(&self, http: impl HttpClient + 'static) -> Client {
        let config = aws_sdk_s3::Config::builder()
            .behavior_version(BehaviorVersion::latest())
            .region(Region::new(self.region()))
            .time_source(self.clock.clone())
            .http_client(http)
            // Retries are those of the transport.
            .retry_config(RetryConfig::disabled())
            // Checksums of whole objects say nothing about ranges, and asking would be signed.
            .response_checksum_validation(ResponseChecksumValidation::WhenRequired)
            // Checksums are sent as headers here, because many servers do not support checksums
            // after a body.
            .request_checksum_calculation(RequestChecksumCalculation::WhenRequired);
        let mut config = self.server.configure(config);
        // The name of the program that AWS's clients send with their own.
        let name = read_guarded(|| std::env::var("AWS_SDK_UA_APP_ID")).ok();
        config.set_app_name(name.and_then(|name| AppName::new(name).ok()));
        let config = match &self.credentials {
            Some(keys) => {
                // It keeps them itself.
                let keys: Arc<dyn ProvideCredentials> = Arc::<CredentialProvider>::clone(keys);
                config.credentials_provider(keys).identity_cache(IdentityCache::no_cache())
            }
            None => config.allow_no_auth(),
        };
        read_guarded(|| Client::from_conf(config.build()))
    }

    /// The region that requests are signed for.
    pub fn region(&self) -> String {
        self.bucket_region.lock().clone().unwrap_or_else(|| self.region.clone())
    }

    /// The address of the server.
    pub fn url(&self) -> Result<Url> {
        self.server.url(&self.bucket, &self.region())
    }

    /// The host of the server, for messages.
    pub fn host(&self) -> String {
        self.server.host(&self.bucket, &self.region())
    }

    /// The payer, where that is not the owner of the bucket.
    pub fn payer(&self) -> Option<RequestPayer> {
        self.requester_pays.then_some(RequestPayer::Requester)
    }
}

/// Finds the server and the credentials of a bucket, for reading or for writing, and the transport
/// options for it. Contacts no server for values that are given or cached.
pub fn find(
    options: &OpenOptions,
    address: &S3Address,
    reads: bool,
    cancel: &dyn Cancel,
) -> Result<(TransportOptions, S3Bucket)> {
    let found = async {
        let mut transport =
            TransportOptions { trust_settings: S3_SETTINGS, ..options.transport.clone() };
        // The certificates may be those that AWS's settings name.
        if let Some(trust) = aws_settings::trust().await {
            if transport.trust == Trust::Default {
                transport.trust = trust.clone();
            }
            transport.credential_trust = trust;
        }
        let bucket = resolve(&options.s3, &transport, address, reads).await?;
        Ok((transport, bucket))
    };
    run_once(&address.display_address(), &options.transport, cancel, found)
}

async fn resolve(
    s3: &S3Options,
    options: &TransportOptions,
    address: &S3Address,
    reads: bool,
) -> Result<S3Bucket> {
    let file = S3Cfg::find(s3.config_path.as_deref())?;
    let stated_region = s3.region.clone().filter(|region| !region.is_empty());
    let region = stated_region.clone().or(aws_settings::named_region().await);
    let default_region = region.clone().unwrap_or_else(|| DEFAULT_REGION.to_owned());
    let settings = aws::settings(default_region.clone(), options).await;
    let force_http = s3.force_http.or(file.use_https.map(|https| !https)).unwrap_or(false);
    let (explicit, assigned) = (s3.endpoint.clone().or(file.host), s3.default_endpoint.clone());
    let mut named = endpoint::named(explicit, assigned, &settings, force_http)?;
    let style = addressing_style(s3, file.host_bucket.as_deref()).await?;
    if let (Some(Server::Endpoint { path_style, .. }), Some(stated)) = (&mut named, style) {
        *path_style = stated;
    }
    let (is_endpoint_named, bucket) = (named.is_some(), address.bucket.clone());
    let access = s3.access_key.clone().or(file.access_key);
    let secret = s3.secret_key.clone().or(file.secret_key);
    let token = s3.session_token.clone().or(file.session_token);
    let uri = address.display_address();
    let known = KnownSettings {
        has_endpoint: is_endpoint_named,
        has_region: stated_region.is_some(),
        keys: StatedKeys::None,
        aws_sign: None,
        chain_has_credentials: false,
        bucket: &bucket,
        reads,
    };
    let (choice, credentials, none_found) =
        choose_server((access, secret, token), known, &default_region, options, &uri).await?;
    let server = match (choice, named) {
        (ServerChoice::Endpoint, Some(server)) => server,
        (ServerChoice::OldDefault, _) => {
            let address = if reads { DEFAULT_READ_ENDPOINT } else { DEFAULT_WRITE_ENDPOINT };
            Server::endpoint(address, force_http, false)?
        }
        _ => aws_server(&settings, force_http, &uri)?,
    };
    // The region of a machine of AWS says nothing about other servers.
    let machine = match region {
        None if server.is_aws() => aws_settings::machine_region(options).await,
        _ => None,
    };
    let region = machine.unwrap_or(default_region);
    let payer = read_guarded(|| std::env::var_os(PAYER));
    let required = Some(RequestChecksumCalculation::WhenRequired);
    server.url(&bucket, &region)?;
    Ok(S3Bucket {
        server,
        is_endpoint_named,
        bucket,
        credentials,
        none_found,
        region,
        bucket_region: ForkSafeMutex::new(None),
        clock: ServerClock::default(),
        requester_pays: s3.requester_pays.map_or_else(|| requester_pays(payer.as_deref()), Ok)?,
        encryption: encryption(s3)?,
        checksums: settings.request_checksum_calculation() != required,
    })
}

/// Chooses the server by what is known, and by the credentials: those of two keys, or else of AWS's
/// chain. True if the chain has none. Keys whose server is unknown are refused before anything is
/// sent.
async fn choose_server(
    (access, secret, token): (Option<String>, Option<String>, Option<String>),
    known: KnownSettings<'_>,
    region: &str,
    options: &TransportOptions,
    uri: &str,
) -> Result<(ServerChoice, Option<Arc<CredentialProvider>>, bool)> {
    let invalid = |what| Error::InvalidArgument(format!("`{uri}`: {what}"));
    let keys = stated_keys(access.as_deref(), secret.as_deref()).map_err(invalid)?;
    let mut known = KnownSettings { keys, ..known };
    let (mut credentials, mut aws_sign) = (None, None);
    if let (StatedKeys::Both, Some(access), Some(secret)) = (keys, access, secret) {
        let keys = Credentials::new(access, secret, token, None, "tensorizer");
        (credentials, aws_sign) = (Some(aws::fixed(keys)), aws_settings::sign().await);
    } else if keys == StatedKeys::None {
        credentials = chain_credentials(region, options, uri).await?;
        known.chain_has_credentials = credentials.is_some();
    }
    known.aws_sign = aws_sign.as_deref();
    let none_found = keys == StatedKeys::None && credentials.is_none();
    Ok((choose(known).map_err(invalid)?, credentials, none_found))
}

/// The place of buckets in addresses, from the first of these that states one: the call, the
/// environment, AWS's profile, `.s3cfg`.
async fn addressing_style(s3: &S3Options, host_bucket: Option<&str>) -> Result<Option<bool>> {
    let mut stated = s3.addressing_style.clone().or_else(|| S3_ADDRESSING_STYLE.text());
    if stated.is_none() {
        stated = aws_settings::setting_of_s3("addressing_style").await;
    }
    match stated {
        Some(stated) => parse_addressing_style(&stated),
        None => Ok(host_bucket.map(|host| !host.contains("%(bucket)"))),
    }
}

/// The encryption of uploads, and the id of its key.
fn encryption(s3: &S3Options) -> Result<(Option<ServerSideEncryption>, Option<String>)> {
    let name = s3.encryption.clone().or_else(|| S3_ENCRYPTION.text());
    let key = s3.kms_key_id.clone().or_else(|| S3_KMS_KEY_ID.text());
    let parsed = name.as_deref().map(ServerSideEncryption::try_parse).transpose();
    let name = parsed.map_err(|_| {
        Error::InvalidArgument(format!(
            "encryption of S3: expected one of {}, found `{}`",
            ServerSideEncryption::values().join(", "),
            Escaped(name.as_deref().unwrap_or(""))
        ))
    })?;
    // A key alone asks for the encryption that has keys.
    let name = name.or_else(|| key.is_some().then_some(ServerSideEncryption::AwsKms));
    Ok((name, key))
}

/// AWS, with the settings of environment and profile. It is asked by TLS only.
fn aws_server(settings: &SdkConfig, force_http: bool, uri: &str) -> Result<Server> {
    if force_http {
        return Err(Error::InvalidArgument(format!(
            "`{uri}`: AWS is accessed by https:// only: give an endpoint, or do not force http://"
        )));
    }
    let (fips, dual_stack) = (settings.use_fips(), settings.use_dual_stack());
    Ok(Server::Aws { fips: fips.unwrap_or(false), dual_stack: dual_stack.unwrap_or(false) })
}

/// The credentials of AWS's chain; None if there are none.
async fn chain_credentials(
    region: &str,
    options: &TransportOptions,
    uri: &str,
) -> Result<Option<Arc<CredentialProvider>>> {
    aws_settings::check_pair(uri).await?;
    aws_settings::check_profile(uri).await?;
    let keys = aws::provider(region.to_owned(), options);
    match keys.get().await {
        Ok(_) => Ok(Some(keys)),
        // Not an error, because the object may be public.
        Err(MissingCredentials::Absent) => Ok(None),
        Err(MissingCredentials::Failed(failure)) => {
            let what = failure.error.to_string();
            Err(Error::failed("opening", uri, ErrorKind::PermissionDenied, what))
        }
    }
}

/// True if the variable states that the requester pays. Programs use different values for it.
fn requester_pays(value: Option<&OsStr>) -> Result<bool> {
    match value.map(OsStr::to_ascii_lowercase).as_deref().map(OsStr::to_str) {
        None | Some(Some("" | "false" | "0")) => Ok(false),
        Some(Some("requester" | "true" | "1")) => Ok(true),
        Some(_) => Err(Error::InvalidArgument(format!(
            "the environment variable {PAYER} must be `requester`, or empty"
        ))),
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    impl S3Bucket {
        /// That of a bucket called `bucket` in `us-east-1`, without credentials.
        pub fn without_credentials(server: Server, none_found: bool) -> Self {
            S3Bucket {
                server,
                is_endpoint_named: true,
                bucket: "bucket".to_owned(),
                credentials: None,
                none_found,
                region: DEFAULT_REGION.to_owned(),
                bucket_region: ForkSafeMutex::new(None),
                clock: ServerClock::default(),
                requester_pays: false,
                checksums: true,
                encryption: (None, None),
            }
        }
    }

    #[test]
    fn requester_pays_if_the_variable_is_set() {
        let pays = |text: &str| requester_pays(Some(OsStr::new(text)));
        for text in ["requester", "Requester", "true", "1"] {
            assert!(pays(text).unwrap(), "{text}");
        }
        assert!(!requester_pays(None).unwrap() && !pays("").unwrap() && !pays("false").unwrap());
        assert!(pays("BucketOwner").unwrap_err().to_string().contains(PAYER));
    }
}
