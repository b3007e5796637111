//! The server of `s3://` addresses: the configured endpoint, or else the server that the
//! credentials belong to.

use std::pin::pin;
use std::task::{Context, Poll, Waker};

use aws_config::SdkConfig;
use aws_sdk_s3::config::endpoint::{DefaultResolver, Params, ResolveEndpoint as _};
use aws_types::service_config::ServiceConfigKey;
use reqwest::Url;

use crate::environment::{S3_ENDPOINT, read_guarded};
use crate::error::{Error, Result, Shortened};
use crate::io::transport::show_text;

/// The default endpoint of tensorizer 2 for reading, for keys that were passed and anonymous reads.
pub const DEFAULT_READ_ENDPOINT: &str = "accel-object.ord1.coreweave.com";
/// The default endpoint of tensorizer 2 for writing, for keys that were passed.
pub const DEFAULT_WRITE_ENDPOINT: &str = "object.ord1.coreweave.com";
/// Hosts whose buckets are part of the host's name, as at AWS.
const VIRTUAL_HOSTS: [&str; 2] = ["cwobject.com", "cwlota.com"];

/// The endpoint to use, from the first of these that states one: the call or `.s3cfg` (`explicit`),
/// AWS's variables, AWS's profile, `program_default`, `TENSORIZER_S3_ENDPOINT`.
pub fn named(
    explicit: Option<String>,
    program_default: Option<String>,
    aws: &SdkConfig,
    force_http: bool,
) -> Result<Option<Server>> {
    if let Some(address) = explicit {
        return Server::endpoint(&address, force_http, false).map(Some);
    }
    let program_default = program_default.filter(|text| !text.is_empty());
    let found = of_aws(aws).or(program_default).or_else(|| S3_ENDPOINT.text());
    found.map(|address| Server::endpoint(&address, force_http, true)).transpose()
}

/// The endpoint from AWS's variables or the profile. Empty values count as not set.
fn of_aws(aws: &SdkConfig) -> Option<String> {
    let setting = |variable: &str, key: &str| {
        let setting = ServiceConfigKey::builder().service_id("S3").env(variable).profile(key);
        let found = aws.service_config()?.load_config(setting.build().ok()?);
        found.filter(|text| !text.is_empty())
    };
    let ignored = setting("AWS_IGNORE_CONFIGURED_ENDPOINT_URLS", "ignore_configured_endpoint_urls");
    if ignored.is_some_and(|text| text.eq_ignore_ascii_case("true")) {
        return None;
    }
    let variable = |name| read_guarded(|| std::env::var(name).ok()).filter(|text| !text.is_empty());
    let found = variable("AWS_ENDPOINT_URL_S3").or_else(|| variable("AWS_ENDPOINT_URL"));
    // Without a variable's name, the SDK reads the profile with its `services` section (and `_S3`).
    found.or_else(|| setting("", "endpoint_url"))
}

/// The server of the requests.
#[derive(Debug, Clone)]
pub enum Server {
    /// A configured endpoint, or a default of tensorizer 2.
    Endpoint {
        url: Url,
        /// True if buckets are part of the path, and not of the host's name.
        path_style: bool,
    },
    /// AWS: bucket, region and these settings make the host's name, by the rules of the SDK.
    Aws { fips: bool, dual_stack: bool },
}

/// Reads the place of buckets in addresses, a setting with the values of boto3 and of AWS's command:
/// true for the path, false for the host's name. None for the path, except at servers that are known
/// to have buckets in the host's name.
pub fn parse_addressing_style(text: &str) -> Result<Option<bool>> {
    match text {
        "auto" => Ok(None),
        "path" => Ok(Some(true)),
        "virtual" => Ok(Some(false)),
        _ => Err(Error::InvalidArgument(format!(
            "addressing_style of S3: expected `auto`, `path` or `virtual`, found `{}`",
            Shortened(text)
        ))),
    }
}

impl Server {
    /// An endpoint. `http_allowed` is true if a plain `http://` in the address is accepted, as it
    /// is in settings.
    pub fn endpoint(address: &str, force_http: bool, http_allowed: bool) -> Result<Self> {
        let mut url = endpoint_url(address, force_http, http_allowed)?;
        // The rules of the SDK append the bucket to the path as it is.
        url.set_path(&format!("{}/", url.path().trim_end_matches('/')));
        let is_virtual =
            url.port().is_none() && VIRTUAL_HOSTS.iter().any(|&host| url.host_str() == Some(host));
        let path_style = !is_virtual && !is_amazon(&url);
        Ok(Server::Endpoint { url, path_style })
    }

    /// True if the server is AWS, also if it was configured.
    pub fn is_aws(&self) -> bool {
        !matches!(self, Server::Endpoint { url, .. } if !is_amazon(url))
    }

    /// True if requests use TLS.
    pub fn is_tls(&self) -> bool {
        !matches!(self, Server::Endpoint { url, .. } if url.scheme() != "https")
    }

    /// Makes the SDK send requests to this server.
    pub fn configure(&self, config: aws_sdk_s3::config::Builder) -> aws_sdk_s3::config::Builder {
        match self {
            Server::Endpoint { url, path_style } => {
                config.endpoint_url(url.as_str()).force_path_style(*path_style)
            }
            Server::Aws { fips, dual_stack } => config.use_fips(*fips).use_dual_stack(*dual_stack),
        }
    }

    /// The address of the server: that of the endpoint, or AWS's for this bucket in this region.
    pub fn url(&self, bucket: &str, region: &str) -> Result<Url> {
        let (fips, dual_stack) = match *self {
            Server::Endpoint { ref url, .. } => return Ok(url.clone()),
            Server::Aws { fips, dual_stack } => (fips, dual_stack),
        };
        let bad = |error: &dyn std::fmt::Display| {
            let region = show_text(region);
            Error::InvalidArgument(format!(
                "no endpoint of AWS for the bucket `{bucket}` in the region `{region}`: {error}"
            ))
        };
        let params = Params::builder().bucket(bucket).region(region).use_fips(fips);
        let params = params.use_dual_stack(dual_stack).build().map_err(|e| bad(&e))?;
        let resolver = DefaultResolver::new();
        // The rules are in memory, so the future is ready at once.
        let found = pin!(resolver.resolve_endpoint(&params));
        match found.poll(&mut Context::from_waker(Waker::noop())) {
            Poll::Ready(Ok(found)) => Url::parse(found.url()).map_err(|e| bad(&e)),
            Poll::Ready(Err(error)) => Err(bad(&error)),
            Poll::Pending => Err(Error::Bug("the endpoint rules of AWS gave no answer".to_owned())),
        }
    }

    /// The host for messages, with its port unless that is the default one.
    pub fn host(&self, bucket: &str, region: &str) -> String {
        let Ok(url) = self.url(bucket, region) else { return "AWS".to_owned() };
        let host = url.host_str().unwrap_or("");
        let host = match self {
            Server::Endpoint { path_style: false, .. } => format!("{bucket}.{host}"),
            _ => host.to_owned(),
        };
        url.port().map_or(host.clone(), |port| format!("{host}:{port}"))
    }
}

fn is_amazon(url: &Url) -> bool {
    let host = url.host_str().unwrap_or("");
    host.ends_with(".amazonaws.com") || host.ends_with(".amazonaws.com.cn")
}

fn endpoint_url(endpoint: &str, force_http: bool, http_allowed: bool) -> Result<Url> {
    let address = show_text(endpoint);
    let bad = |what: &str| Error::InvalidArgument(format!("S3 endpoint `{address}`: {what}"));
    let (scheme, host) = endpoint.split_once("://").unwrap_or(("https", endpoint));
    let scheme = match scheme.to_ascii_lowercase().as_str() {
        "http" if !force_http && !http_allowed => {
            let what = "Non-HTTPS endpoint URLs are not allowed.";
            return Err(Error::InvalidArgument(what.to_owned()));
        }
        "https" if !force_http => "https",
        "http" | "https" => "http",
        _ => return Err(bad("expected https:// or http://")),
    };
    let url = Url::parse(&format!("{scheme}://{host}")).map_err(|e| bad(&e.to_string()))?;
    match (url.query(), url.fragment()) {
        (None, None) => Ok(url),
        _ => Err(bad("expected the address of a server, without `?` and `#`")),
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn endpoint_url_has_the_requested_scheme() {
        let url = |text, force, allowed| endpoint_url(text, force, allowed).map(String::from);
        assert_eq!(url("host:9000", false, false).unwrap(), "https://host:9000/");
        assert_eq!(url("host", true, false).unwrap(), "http://host/");
        assert_eq!(url("https://host", true, false).unwrap(), "http://host/");
        assert_eq!(url("http://host", false, true).unwrap(), "http://host/");
        assert!(url("http://host", false, false).is_err());
        assert!(url("ftp://host", false, false).is_err());
        for more in ["?token=secret", "/path?secret", "/#secret"] {
            let error = endpoint_url(&format!("host{more}"), false, false).unwrap_err().to_string();
            assert!(error.contains("without `?` and `#`") && !error.contains("secret"), "{error}");
        }
    }

    #[test]
    fn paths_of_endpoints_end_with_a_slash() {
        for (address, expected) in [
            ("host", "https://host/"),
            ("host/", "https://host/"),
            ("host/storage/v1/s3", "https://host/storage/v1/s3/"),
            ("host/storage/v1/s3//", "https://host/storage/v1/s3/"),
        ] {
            let url = Server::endpoint(address, false, false).unwrap().url("bucket", "r").unwrap();
            assert_eq!(url.as_str(), expected);
        }
    }

    #[test]
    fn aws_host_depends_on_partition_fips_and_dual_stack() {
        let host = |bucket: &str, region: &str, fips, dual_stack| {
            Server::Aws { fips, dual_stack }.url(bucket, region).map(String::from)
        };
        for (bucket, region, fips, dual_stack, url) in [
            ("bucket", "eu-west-1", false, false, "https://bucket.s3.eu-west-1.amazonaws.com/"),
            ("bucket", "us-east-1", false, false, "https://bucket.s3.us-east-1.amazonaws.com/"),
            (
                "bucket",
                "cn-north-1",
                false,
                false,
                "https://bucket.s3.cn-north-1.amazonaws.com.cn/",
            ),
            (
                "bucket",
                "us-gov-west-1",
                true,
                false,
                "https://bucket.s3-fips.us-gov-west-1.amazonaws.com/",
            ),
            (
                "bucket",
                "eu-west-1",
                false,
                true,
                "https://bucket.s3.dualstack.eu-west-1.amazonaws.com/",
            ),
            (
                "bucket",
                "us-east-1",
                true,
                true,
                "https://bucket.s3-fips.dualstack.us-east-1.amazonaws.com/",
            ),
            ("with.dot", "eu-west-1", false, false, "https://s3.eu-west-1.amazonaws.com/with.dot"),
        ] {
            assert_eq!(host(bucket, region, fips, dual_stack).unwrap(), url);
        }
        let refused = host("bucket", "cn-north-1", true, false).unwrap_err().to_string();
        assert!(refused.contains("`cn-north-1`: Partition does not support FIPS"), "{refused}");
        assert!(host("bucket", "a b", false, false).unwrap_err().to_string().contains("`a b`"));
    }

    #[test]
    fn messages_name_the_host_of_the_request() {
        let host = |address| Server::endpoint(address, false, false).unwrap().host("bucket", "r");
        assert_eq!(host("storage.example:9000/path"), "storage.example:9000");
        assert_eq!(host("cwobject.com"), "bucket.cwobject.com");
        assert_eq!(host("https://s3.eu-west-1.amazonaws.com"), "bucket.s3.eu-west-1.amazonaws.com");
        let aws = Server::Aws { fips: false, dual_stack: false };
        assert_eq!(aws.host("bucket", "eu-west-1"), "bucket.s3.eu-west-1.amazonaws.com");
    }
}
