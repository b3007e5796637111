//! Reading objects of Google and blobs of Azure: each request is authorized.

use std::io::ErrorKind;
use std::sync::Arc;
use std::time::{Duration, SystemTime};

use reqwest::{StatusCode, Url};

use super::address::{Cloud, CloudAddress};
use super::authorize::{AZURE_VERSION, with_project_hint};
use super::bucket::{object_url, resolve, with_anonymous_hint};
use crate::cancel::Cancel;
use crate::error::{Error, Result};
use crate::io::auth::CloudIdentity;
use crate::io::http::{self, FileUrl, Refusal, Sign, SignFuture};
use crate::io::transport::{Failure, RequestTarget, run_once};
use crate::io::{OpenOptions, ReadAt};
use crate::sys::clock;

/// Time for which one credential is used: the provider has a new one minutes before it expires.
const VALID_FOR: Duration = Duration::from_secs(30);

/// Opens an address, without a request if the head of its file is cached.
pub fn open(uri: &str, options: &OpenOptions, cancel: &dyn Cancel) -> Result<Arc<dyn ReadAt>> {
    let address = CloudAddress::parse(uri)?;
    let display_address = address.display_address.clone();
    // Finding credentials may need the network, on machines of a cloud.
    let found = resolve(&address, &options.transport);
    let (url, identity) = run_once(&display_address, &options.transport, cancel, found)?;
    let tls = url.scheme() == "https";
    let Some(identity) = identity else {
        let mut options = options.clone();
        if address.cloud == Cloud::Azure {
            let (name, value) = AZURE_VERSION;
            options.transport.headers.push((name.to_owned(), value.to_owned()));
        }
        let url = object_url(&url, &address.key).map_err(Error::InvalidArgument)?;
        let opened = http::open_as(url, display_address, None, &options, cancel);
        return opened.map_err(|error| with_anonymous_hint(error, address.cloud));
    };
    let headers = options.transport.headers.clone();
    let signer = CloudSigner { bucket: url, identity, address, headers };
    http::open_url(FileUrl::signed(Box::new(signer)), tls, display_address, None, options, cancel)
}

/// The address for messages; None if it cannot be parsed.
pub fn display_address(uri: &str) -> Option<String> {
    CloudAddress::parse(uri).ok().map(|address| address.display_address)
}

/// Authorizes requests for an object.
#[derive(Clone)]
struct CloudSigner {
    bucket: Url,
    identity: CloudIdentity,
    address: CloudAddress,
    /// Headers of the caller.
    headers: Vec<(String, String)>,
}

impl Sign for CloudSigner {
    fn sign(&self) -> SignFuture<'_, (RequestTarget, SystemTime)> {
        Box::pin(async {
            let authorize = self.identity.authorization().await?;
            let url = object_url(&self.bucket, &self.address.key)
                .map_err(|what| Failure::permanent(ErrorKind::InvalidInput, what))?;
            let target = RequestTarget::new(url, self.headers.clone());
            let now = clock::date();
            let until = now.checked_add(VALID_FOR).unwrap_or(now);
            Ok((target.authorized(Arc::new(authorize)), until))
        })
    }

    fn refusal(&self, refused: &Refusal<'_>) -> Failure {
        // The status 401 means that a token has expired.
        let expired = refused.reason.says_expired() || refused.status == StatusCode::UNAUTHORIZED;
        if expired {
            self.identity.credentials.invalidate(refused.signed);
        }
        let code = refused.reason.code.as_deref().unwrap_or("");
        with_project_hint(refused.failure().if_renewable(expired), code)
    }

    fn cache_key(&self) -> String {
        format!("{:?} {} {}", self.address.cloud, self.bucket, self.address.key)
    }

    fn sibling(&self, name: &str) -> Box<dyn Sign> {
        Box::new(CloudSigner { address: self.address.sibling(name), ..self.clone() })
    }
}

#[cfg(test)]
mod tests {
    use std::sync::atomic::Ordering;

    use super::*;
    use crate::cancel::Never;
    use crate::io::auth::simulated;
    use crate::io::read_exact_at;
    use crate::io::transport::simulated::{OBJECT_LEN, SimulatedCloud, options};
    use crate::mem::Buffers;

    #[test]
    fn a_day_of_reading_is_never_refused() {
        for uri in ["gs://bucket/key", "az://container/blob"] {
            let (simulated_cloud, transport) = (SimulatedCloud::new(3600, 180), options());
            let address = CloudAddress::parse(uri).unwrap();
            let credentials = match address.cloud {
                Cloud::Google => simulated::google(&simulated_cloud),
                Cloud::Azure => simulated::azure(&simulated_cloud),
            };
            let display_address = address.display_address.clone();
            let (bucket, headers) = (simulated_cloud.serve().parse().unwrap(), Vec::new());
            let account = "account".into();
            let identity = CloudIdentity { account, quota_project: None, credentials };
            let signer = CloudSigner { bucket, identity, address, headers };
            let environment = OpenOptions::from_environment().unwrap();
            let options = OpenOptions { transport, cache: None, ..environment };
            let url = FileUrl::signed(Box::new(signer));
            let source =
                http::open_url(url, false, display_address, None, &options, &Never).unwrap();
            while simulated_cloud.now() < 24 * 3600 {
                // A token that was revoked is renewed once.
                if simulated_cloud.now() == 43_320 {
                    simulated_cloud.revoke_all();
                }
                // Positions after the head, which is cached.
                let (at, mut bytes) = (OBJECT_LEN / 2 + simulated_cloud.now(), [0; 5]);
                read_exact_at(&*source, at, &mut Buffers::from_slice(&mut bytes), "bytes", &Never)
                    .unwrap();
                assert_eq!(bytes, [7; 5]);
                simulated_cloud.advance(60);
            }
            assert_eq!(simulated_cloud.refused.load(Ordering::Relaxed), 1, "{uri}");
            assert!(
                (25..32).contains(&simulated_cloud.issued()),
                "{uri}: {} times",
                simulated_cloud.issued()
            );
        }
    }
}
