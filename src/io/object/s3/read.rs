//! Reading objects of S3: signed requests, of which the bodies are those of other HTTP servers.

use std::sync::Arc;
use std::time::SystemTime;

use aws_sdk_s3::Client;
use reqwest::header::{HeaderMap, LOCATION};

use super::address::S3Address;
use super::endpoint::Server;
use super::refusal::bucket_region_of;
use super::resolve::{S3Bucket, find};
use crate::cancel::Cancel;
use crate::error::Result;
use crate::io::http::{self, FileUrl, Refusal, Sign, SignFuture};
use crate::io::transport::{Failure, RequestTarget, TransportOptions, with_guarded_polls};
use crate::io::{OpenOptions, ReadAt};
use crate::sys::fork_safe_mutex::ForkSafeMutex;

/// Opens an address, without a request if the head of its file is cached.
pub fn open(uri: &str, options: &OpenOptions, cancel: &dyn Cancel) -> Result<Arc<dyn ReadAt>> {
    let address = S3Address::parse(uri)?;
    let display_address = address.display_address();
    let (transport, bucket) = find(options, &address, true, cancel)?;
    let (tls, client) = (bucket.server.is_tls(), Arc::new(ForkSafeMutex::new(None)));
    let bucket = Arc::new(bucket);
    let signer = S3Signer { bucket, address, transport: transport.clone(), client };
    let options = OpenOptions { transport, ..options.clone() };
    http::open_url(FileUrl::signed(Box::new(signer)), tls, display_address, None, &options, cancel)
}

/// The address for messages; None if it cannot be parsed.
pub fn display_address(uri: &str) -> Option<String> {
    S3Address::parse(uri).ok().map(|address| address.display_address())
}

/// Signs the requests for an object, if there are credentials.
#[derive(Clone)]
struct S3Signer {
    bucket: Arc<S3Bucket>,
    address: S3Address,
    /// With the headers of the caller.
    transport: TransportOptions,
    /// Signs for the region that the bucket was in.
    client: Arc<ForkSafeMutex<Option<(String, Client)>>>,
}

impl Sign for S3Signer {
    fn sign(&self) -> SignFuture<'_, (RequestTarget, SystemTime)> {
        Box::pin(with_guarded_polls(async {
            let region = self.bucket.region();
            let known = self.client.lock().clone().filter(|(of, _)| *of == region);
            let (_, client) = known.unwrap_or_else(|| {
                let made = (region, self.bucket.signing_client(&self.transport));
                self.client.lock().insert(made).clone()
            });
            self.bucket.sign(&client, &self.address, &self.transport.headers).await
        }))
    }

    fn refusal(&self, refused: &Refusal<'_>) -> Failure {
        let Refusal { url, status, headers, reason, signed } = *refused;
        if let Some(keys) = self.bucket.credentials.as_ref().filter(|_| reason.says_expired()) {
            keys.invalidate(signed);
            // It has the sessions that it has begun with them.
            self.client.lock().take();
        }
        self.bucket.refusal(status, headers, reason, url.host_str())
    }

    fn cache_key(&self) -> String {
        let server = self.bucket.url().map_or(String::new(), |url| {
            // Without a user and a password.
            url.origin().ascii_serialization() + url.path()
        });
        format!("s3 {server} {}", self.address.display_address())
    }

    fn host(&self) -> Option<String> {
        Some(self.bucket.host())
    }

    fn is_final(&self, headers: &HeaderMap) -> bool {
        let is_aws = matches!(self.bucket.server, Server::Aws { .. });
        !headers.contains_key(LOCATION) || (is_aws && bucket_region_of(headers).is_some())
    }

    fn is_version(&self) -> bool {
        self.address.version.is_some()
    }

    fn sibling(&self, name: &str) -> Box<dyn Sign> {
        Box::new(S3Signer { address: self.address.sibling(name), ..self.clone() })
    }
}

#[cfg(test)]
mod tests {
    use std::sync::atomic::Ordering;

    use aws_sdk_s3::config::Credentials;

    use super::*;
    use crate::cancel::Never;
    use crate::io::auth::{aws, simulated};
    use crate::io::transport::simulated::{OBJECT_LEN, SimulatedCloud, options};
    use crate::io::{S3Options, read_exact_at};
    use crate::mem::Buffers;

    /// The path of each URL, signed or not, for buckets in the path and in the host's name.
    #[test]
    fn urls_name_the_key_unchanged() {
        let runtime = tokio::runtime::Builder::new_current_thread().enable_all().build().unwrap();
        let keys = aws::fixed(Credentials::new("k", "s", None, None, "test"));
        let aws = Server::Aws { fips: false, dual_stack: false };
        let endpoint = |text| Server::endpoint(text, false, false).unwrap();
        for (server, root) in [
            (endpoint("host:9000"), "host/bucket/"),
            (endpoint("host/storage/v1/s3"), "host/storage/v1/s3/bucket/"),
            (endpoint("cwobject.com"), "bucket.cwobject.com/"),
            (aws, "bucket.s3.us-east-1.amazonaws.com/"),
        ] {
            for (key, path) in [
                ("a/k", "a/k"),
                ("/k", "/k"),
                ("//x//k", "//x//k"),
                ("k/", "k/"),
                ("%2e%2E/ü +", "%252e%252E/%C3%BC%20%2B"),
            ] {
                for credentials in [None, Some(keys.clone())] {
                    let mut bucket = S3Bucket::without_credentials(server.clone(), false);
                    bucket.credentials = credentials;
                    let address = S3Address::parse(&format!("s3://bucket/{key}")).unwrap();
                    let bucket = Arc::new(bucket);
                    let client = ForkSafeMutex::new(None);
                    let signer =
                        S3Signer { bucket, address, transport: options(), client: client.into() };
                    let (target, _) = runtime.block_on(signer.sign()).unwrap();
                    let url = target.url;
                    let found = format!("{}{}", url.host_str().unwrap(), url.path());
                    assert_eq!(found, format!("{root}{path}"), "{url}");
                }
            }
        }
    }

    /// Credentials of an hour and of a quarter, from a service that is away for a part of the time
    /// in which they are renewed: of the quarter, each time.
    #[test]
    fn hours_of_reading_are_never_refused() {
        for (hold, away, step, hours, expected_issued) in
            [(3600, 180, 60, 12, 13..16), (900, 40, 30, 5, 22..25)]
        {
            let (simulated_cloud, net, region) =
                (SimulatedCloud::new(hold, away), options(), format!("read-{hold}"));
            simulated::aws(&simulated_cloud, &region, &net);
            let s3 = S3Options {
                endpoint: Some(simulated_cloud.serve()),
                force_http: Some(true),
                region: Some(region),
                ..S3Options::default()
            };
            let environment = OpenOptions::from_environment().unwrap();
            let options = OpenOptions { transport: net, s3, cache: None, ..environment };
            let source = open("s3://bucket/key", &options, &Never).unwrap();
            while simulated_cloud.now() < hours * 3600 {
                // Positions after the head, which is cached.
                let (at, mut bytes) = (OBJECT_LEN / 2 + simulated_cloud.now(), [0; 5]);
                read_exact_at(&*source, at, &mut Buffers::from_slice(&mut bytes), "bytes", &Never)
                    .unwrap();
                assert_eq!(bytes, [7; 5]);
                simulated_cloud.advance(step);
            }
            assert_eq!(simulated_cloud.refused.load(Ordering::Relaxed), 0);
            assert!(simulated_cloud.served.load(Ordering::Relaxed) >= hours * 3600 / step);
            assert!(
                expected_issued.contains(&simulated_cloud.issued()),
                "{} times",
                simulated_cloud.issued()
            );
        }
    }
}
