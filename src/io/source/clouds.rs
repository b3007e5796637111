//! `gs://bucket/key`, `az://container/blob` and `abfss://`: addresses of HTTP servers, and who asks.

use std::io::ErrorKind;
use std::sync::Arc;
use std::time::{Duration, Instant, SystemTime};

use reqwest::{Request, Url};

use super::http::client::{Authorize, Target};
use super::http::{self, Sign, Work};
use super::{KnownHeads, ReadAt};
use crate::cancel::Cancel;
use crate::error::{Error, Result};
use crate::io::net::clouds::{
    AZURE_VERSION, Cloud, Credential, Keys, Object, Resolved, address, as_anybody, resolve,
};
use crate::io::net::{Failure, NetOptions, wait_for};
use crate::sys::clock;

/// How long a chain is not asked again: it has a new token minutes before one expires.
const VALID: Duration = Duration::from_secs(30);

/// Opens an address. Files of which the heads are known are opened without a request.
pub fn open(
    uri: &str,
    http: NetOptions,
    known: &KnownHeads,
    cancel: &dyn Cancel,
) -> Result<Arc<dyn ReadAt>> {
    let object = Object::parse(uri)?;
    // Finding credentials may need the network, on machines of a cloud.
    let Resolved { bucket, account, keys } =
        wait_for(&object.shown, &http, cancel, resolve(&object, &http))?;
    let shown = object.shown.clone();
    let tls = bucket.scheme() == "https";
    let Some(keys) = keys else {
        let mut http = http;
        if object.cloud == Cloud::Azure {
            http.headers.push((AZURE_VERSION.0.to_owned(), AZURE_VERSION.1.to_owned()));
        }
        let address = address(&bucket, &object.key).map_err(Error::InvalidArgument)?;
        let opened = http::open_as(address.as_str(), &shown, http, known, cancel);
        return opened.map_err(|error| as_anybody(error, object.cloud));
    };
    let headers = http.headers.clone();
    let signer =
        Signer { bucket: Arc::new(bucket), account: account.into(), keys, object, headers };
    http::open_signed(Box::new(signer), tls, &shown, http, known, cancel)
}

/// An address as messages show it; None for what is none.
pub fn shown(uri: &str) -> Option<String> {
    Object::parse(uri).ok().map(|object| object.shown)
}

/// Says who asks for an object.
struct Signer {
    bucket: Arc<Url>,
    account: Arc<str>,
    keys: Keys,
    object: Object,
    /// What the caller sends along.
    headers: Vec<(String, String)>,
}

impl Sign for Signer {
    fn sign(&self) -> Work<'_, (Target, SystemTime)> {
        Box::pin(self.signed())
    }

    fn refused(&self, used: Instant) {
        self.keys.refused(used);
    }

    fn shows_tokens(&self) -> bool {
        true
    }

    fn name(&self) -> String {
        format!("{:?} {} {}", self.object.cloud, self.bucket, self.object.key)
    }

    fn beside(&self, name: &str) -> Box<dyn Sign> {
        Box::new(Signer {
            bucket: Arc::clone(&self.bucket),
            account: Arc::clone(&self.account),
            keys: self.keys.clone(),
            object: self.object.beside(name),
            headers: self.headers.clone(),
        })
    }
}

impl Signer {
    async fn signed(&self) -> std::result::Result<(Target, SystemTime), Failure> {
        let credential = self.keys.get().await?;
        let url = address(&self.bucket, &self.object.key)
            .map_err(|what| Failure::lasting(ErrorKind::InvalidInput, what))?;
        let by = By { credential, account: Arc::clone(&self.account) };
        let target = Target::new(url, self.headers.clone()).authorized(Arc::new(by));
        let now = clock::date();
        Ok((target, now.checked_add(VALID).unwrap_or(now)))
    }
}

/// What signs each request.
struct By {
    credential: Credential,
    account: Arc<str>,
}

impl Authorize for By {
    fn authorize(&self, request: &mut Request) -> std::result::Result<(), Failure> {
        self.credential.sign(&self.account, request)
    }
}

#[cfg(test)]
#[allow(clippy::unwrap_used)]
mod tests {
    use std::sync::atomic::Ordering;

    use super::*;
    use crate::cancel::Never;
    use crate::io::net::simulated::{Day, OBJECT_LEN, options};
    use crate::io::source::read_exact_at;
    use crate::mem::Buffers;

    #[test]
    fn a_day_of_reading_is_never_refused() {
        for uri in ["gs://bucket/key", "az://container/blob"] {
            let (day, net, object) = (Day::new(3600, 180), options(), Object::parse(uri).unwrap());
            let (shown, keys) = (object.shown.clone(), Keys::on(&day, object.cloud, &net));
            let (bucket, headers) = (Arc::new(day.serve().parse().unwrap()), Vec::new());
            let signer = Signer { bucket, account: "account".into(), keys, object, headers };
            let known = KnownHeads::default();
            let source =
                http::open_signed(Box::new(signer), false, &shown, net, &known, &Never).unwrap();
            while day.now() < 24 * 3600 {
                // A token that was taken back is asked for anew, once.
                if day.now() == 43_320 {
                    day.expire();
                }
                // Behind what is read ahead.
                let (at, mut bytes) = (OBJECT_LEN / 2 + day.now(), [0; 5]);
                let what = || "bytes".to_owned();
                read_exact_at(&*source, at, &mut Buffers::of(&mut bytes), &what, &Never).unwrap();
                assert_eq!(bytes, [7; 5]);
                day.pass(60);
            }
            assert_eq!(day.refused.load(Ordering::Relaxed), 1, "{uri}");
            assert!((25..32).contains(&day.given()), "{uri}: {} times", day.given());
        }
    }
}
