//! Credentials and region, which come from, in this order: the call's arguments, `~/.s3cfg` (or
//! another file of that kind), then AWS's own chain: environment, shared files and profiles, web
//! identity, instance roles. Without any credentials, objects are read anonymously.
//! [`super::endpoint`] says which server is asked.

use std::error::Error as _;
use std::ffi::OsStr;
use std::io::ErrorKind;
use std::path::{Path, PathBuf};

use aws_config::BehaviorVersion;
use aws_config::environment::EnvironmentVariableRegionProvider;
use aws_config::imds::client::error::ImdsError;
use aws_config::meta::region::RegionProviderChain;
use aws_config::profile::ProfileFileRegionProvider;
use aws_credential_types::provider::error::CredentialsError;
use aws_sdk_s3::config::{
    Credentials, IdentityCache, Region, RequestChecksumCalculation, ResponseChecksumValidation,
};
use aws_sdk_s3::error::DisplayErrorContext;
use aws_sdk_s3::types::RequestPayer;
use aws_types::os_shim_internal::{Env, Fs};
use reqwest::Url;

use super::credentials::{Chain, Keys, settings};
use super::endpoint::{self, Server};
use super::name::ObjectName;
use crate::environment::reading;
use crate::error::{Error, Result, Shown};
use crate::io::net::NetOptions;
use crate::sys::brief::Brief;

/// Says who pays for requests and for what they bring.
const PAYER: &str = "AWS_REQUEST_PAYER";
/// The region that requests are signed for if nothing says otherwise.
const USUAL_REGION: &str = "us-east-1";

/// What a call says about S3.
#[derive(Debug, Clone, Default)]
pub struct S3Options {
    /// Both keys empty: read as anybody.
    pub access_key: Option<String>,
    /// See `access_key`.
    pub secret_key: Option<String>,
    /// A host, or an address with a scheme.
    pub endpoint: Option<String>,
    /// The same for where neither the call nor a file nor AWS's settings name one. None: as
    /// `TENSORIZER_S3_ENDPOINT` says.
    pub default_endpoint: Option<String>,
    /// Instead of `~/.s3cfg`.
    pub config_path: Option<PathBuf>,
    /// Whether to use `http://`; None decides by the endpoint.
    pub force_http: Option<bool>,
    /// The region that requests are signed for.
    pub region: Option<String>,
    /// Whether who asks pays, not the owner of the bucket; None: as `AWS_REQUEST_PAYER` says.
    pub requester_pays: Option<bool>,
}

/// Which server is asked for a bucket, and with which credentials.
pub struct Resolved {
    pub server: Server,
    /// True if an argument, a file or the environment names the server.
    pub named: bool,
    pub bucket: String,
    /// None: asked anonymously.
    pub credentials: Option<Keys>,
    /// True if credentials were looked for, and there are none.
    pub none_found: bool,
    /// The region that was named, or is usual.
    region: String,
    /// The region of the bucket, where AWS has named another.
    pub bucket_region: Brief<Option<String>>,
    requester_pays: bool,
    /// Whether sums of what is written go along.
    pub sums: bool,
}

impl Resolved {
    /// What the client of the SDK is told. It asks for the present credentials with each request.
    pub fn sdk(&self) -> aws_sdk_s3::config::Builder {
        let config = aws_sdk_s3::Config::builder()
            .behavior_version(BehaviorVersion::latest())
            .region(Region::new(self.region()))
            // Sums of whole objects say nothing about ranges, and asking would be signed.
            .response_checksum_validation(ResponseChecksumValidation::WhenRequired)
            // Ours go as fields: sums behind a body are more than many servers know.
            .request_checksum_calculation(RequestChecksumCalculation::WhenRequired);
        let config = self.server.configure(config);
        match &self.credentials {
            Some(keys) => {
                config.credentials_provider(keys.clone()).identity_cache(IdentityCache::no_cache())
            }
            None => config.allow_no_auth(),
        }
    }

    /// The region that requests are signed for.
    pub fn region(&self) -> String {
        self.bucket_region.lock().clone().unwrap_or_else(|| self.region.clone())
    }

    /// The address of the server.
    pub fn url(&self) -> Result<Url> {
        self.server.url(&self.bucket, &self.region())
    }

    /// The server that is asked, as messages name it.
    pub fn host(&self) -> String {
        self.server.host(&self.bucket, &self.region())
    }

    /// Who pays, where that is not the owner of the bucket.
    pub fn payer(&self) -> Option<RequestPayer> {
        self.requester_pays.then_some(RequestPayer::Requester)
    }
}

#[cfg(test)]
impl Resolved {
    /// That of a bucket called `bucket` in `us-east-1`, without credentials.
    pub fn without_credentials(server: Server, none_found: bool) -> Self {
        Resolved {
            server,
            named: true,
            bucket: "bucket".to_owned(),
            credentials: None,
            none_found,
            region: USUAL_REGION.to_owned(),
            bucket_region: Brief::new(None),
            requester_pays: false,
            sums: true,
        }
    }
}

/// The `[default]` section of a file as `s3cmd` has it.
#[derive(Default)]
struct S3Cfg {
    access_key: Option<String>,
    secret_key: Option<String>,
    host: Option<String>,
    use_https: Option<bool>,
}

fn read_s3cfg(path: &Path) -> std::io::Result<S3Cfg> {
    let mut found = S3Cfg::default();
    let mut within = false;
    for line in std::fs::read_to_string(path)?.lines().map(str::trim) {
        if let Some(section) = line.strip_prefix('[').and_then(|rest| rest.strip_suffix(']')) {
            within = section.trim() == "default";
        }
        let Some((name, value)) = line.split_once(['=', ':']).filter(|_| within) else { continue };
        let value = value.trim();
        let text = (!value.is_empty()).then(|| value.to_owned());
        match name.trim() {
            "access_key" => found.access_key = text,
            "secret_key" => found.secret_key = text,
            "host_base" => found.host = text,
            "use_https" => found.use_https = Some(!value.eq_ignore_ascii_case("false")),
            _ => {}
        }
    }
    Ok(found)
}

/// Reads the file that was named, which must be there, or `~/.s3cfg`, which need not.
fn find_s3cfg(options: &S3Options) -> Result<S3Cfg> {
    if let Some(path) = &options.config_path {
        let shown = path.display().to_string();
        return read_s3cfg(path).map_err(|e| Error::io("reading", &shown, e));
    }
    let home = reading(|| std::env::var_os("HOME")).map(|home| Path::new(&home).join(".s3cfg"));
    let found = home.and_then(|path| read_s3cfg(&path).ok());
    Ok(found.unwrap_or_else(S3Cfg::default))
}

/// Finds out which server is asked for an object, and with which credentials. No server is asked for
/// what is given, or known in this process. `default` is the default endpoint of tensorizer 2.
pub async fn resolve(
    options: &S3Options,
    net: &NetOptions,
    default: &str,
    name: &ObjectName,
) -> Result<Resolved> {
    let uri = name.shown();
    let file = find_s3cfg(options)?;
    let region = match &options.region {
        Some(region) => Some(region.clone()),
        None => named_region().await,
    };
    let usual = region.clone().unwrap_or_else(|| USUAL_REGION.to_owned());
    let aws = settings(usual.clone(), net).await;
    let force_http = options.force_http.or(file.use_https.map(|https| !https)).unwrap_or(false);
    let given = options.endpoint.clone().or(file.host);
    let assigned = options.default_endpoint.clone();
    let named = endpoint::named(given, assigned, &aws, force_http)?;

    let chain = Chain::now(usual.clone(), net);
    let access = options.access_key.clone().or(file.access_key);
    let secret = options.secret_key.clone().or(file.secret_key);
    let mut none_found = false;
    let credentials = match (access, secret) {
        (Some(access), Some(secret)) if access.is_empty() && secret.is_empty() => None,
        (Some(access), Some(secret)) => {
            Some(Keys::Given(Credentials::new(access, secret, None, None, "tensorizer")))
        }
        (None, None) => {
            check_profile(&uri).await?;
            let keys = Keys::Found(chain.clone());
            match keys.get().await {
                Ok(_) => Some(keys),
                // Not to have any is no error: the object may be for everybody.
                Err(error) if is_nobody(&error) => {
                    none_found = true;
                    None
                }
                Err(error) => {
                    let what = format!("finding credentials: {}", DisplayErrorContext(error));
                    let error = std::io::Error::new(ErrorKind::PermissionDenied, what);
                    return Err(Error::io("opening", &uri, error));
                }
            }
        }
        _ => {
            return Err(Error::InvalidArgument(format!(
                "`{uri}`: an access key needs its secret key, and only one of them was found"
            )));
        }
    };

    let is_named = named.is_some();
    // Credentials of AWS's chain go to AWS, whatever the region. Nothing else says where keys of other
    // origins belong, and old scripts expect the default.
    let server = match (named, &credentials) {
        (Some(server), _) => server,
        (None, Some(Keys::Found(_))) if force_http => {
            return Err(Error::InvalidArgument(format!(
                "`{uri}`: AWS is asked by https:// only: name an endpoint, or do not force http://"
            )));
        }
        (None, Some(Keys::Found(_))) => Server::aws(&aws),
        (None, _) => Server::endpoint(default, force_http, false)?,
    };
    // Where a machine of AWS is says nothing about the servers of others.
    let machine = if region.is_none() && server.is_aws() { chain.region().await } else { None };
    let region = machine.unwrap_or(usual);
    let sums = aws.request_checksum_calculation() != Some(RequestChecksumCalculation::WhenRequired);
    let requester_pays = match options.requester_pays {
        Some(pays) => pays,
        None => payer(reading(|| std::env::var_os(PAYER)).as_deref())?,
    };
    let bucket = name.bucket.clone();
    server.url(&bucket, &region)?;
    Ok(Resolved {
        server,
        named: is_named,
        bucket,
        credentials,
        none_found,
        region,
        bucket_region: Brief::new(None),
        requester_pays,
        sums,
    })
}

/// Refuses a profile that `AWS_PROFILE` names and no file has: the chain would pass it over where
/// there are no files, and take other credentials.
async fn check_profile(uri: &str) -> Result<()> {
    let named = reading(|| std::env::var("AWS_PROFILE").ok());
    // The profile of this name need not be there.
    let Some(profile) = named.filter(|name| !matches!(&**name, "" | "default")) else {
        return Ok(());
    };
    let files =
        aws_config::profile::load(&Fs::real(), &Env::real(), &Default::default(), None).await;
    // The chain itself says what is wrong with a file.
    if files.map_or(true, |files| files.get_profile(&profile).is_some()) {
        return Ok(());
    }
    let what = format!(
        "AWS_PROFILE names the profile `{}`, which is in neither of AWS's files: ~/.aws/config and \
         ~/.aws/credentials, or those that AWS_CONFIG_FILE and AWS_SHARED_CREDENTIALS_FILE name",
        Shown(&profile)
    );
    Err(Error::io("opening", uri, std::io::Error::new(ErrorKind::PermissionDenied, what)))
}

/// Whether the variable says that who asks pays. Other programs take one or the other word for it.
fn payer(value: Option<&OsStr>) -> Result<bool> {
    match value.map(OsStr::to_ascii_lowercase).as_deref().map(OsStr::to_str) {
        None | Some(Some("" | "false" | "0")) => Ok(false),
        Some(Some("requester" | "true" | "1")) => Ok(true),
        Some(_) => Err(Error::InvalidArgument(format!(
            "the environment variable {PAYER} must be `requester`, or empty"
        ))),
    }
}

/// Whether nobody has said who asks. A machine whose own service gives no answer is nobody, too:
/// clouds other than AWS have another service in its place. One that is busy will know.
fn is_nobody(error: &CredentialsError) -> bool {
    let of_machine = error.source().and_then(|cause| cause.downcast_ref::<ImdsError>());
    match of_machine {
        Some(ImdsError::ErrorResponse(answer)) => {
            let status = answer.response().status().as_u16();
            status < 500 && status != 429
        }
        Some(_) => true,
        None => matches!(error, CredentialsError::CredentialsNotLoaded(_)),
    }
}

/// The region that the environment or a profile names.
async fn named_region() -> Option<String> {
    let found = RegionProviderChain::first_try(EnvironmentVariableRegionProvider::new());
    let found = found.or_else(ProfileFileRegionProvider::new()).region().await;
    found.map(|region| region.to_string())
}

#[cfg(test)]
#[allow(clippy::unwrap_used)]
mod tests {
    use super::*;

    #[test]
    fn who_pays() {
        let pays = |text: &str| payer(Some(OsStr::new(text)));
        for text in ["requester", "Requester", "true", "1"] {
            assert!(pays(text).unwrap(), "{text}");
        }
        assert!(!payer(None).unwrap() && !pays("").unwrap() && !pays("false").unwrap());
        assert!(pays("BucketOwner").unwrap_err().to_string().contains(PAYER));
    }

    #[test]
    fn the_default_section_counts() {
        let folder = tempfile::tempdir().unwrap();
        let path = folder.path().join("s3cfg");
        let text = "[other]\naccess_key = no\n[default]\naccess_key = key\nsecret_key=se=cret\n\
                    host_base = host:1\nuse_https = False\n";
        std::fs::write(&path, text).unwrap();
        let found = read_s3cfg(&path).unwrap();
        assert_eq!(found.access_key.unwrap(), "key");
        assert_eq!(found.secret_key.unwrap(), "se=cret");
        assert_eq!(found.host.unwrap(), "host:1");
        assert_eq!(found.use_https, Some(false));
    }
}
