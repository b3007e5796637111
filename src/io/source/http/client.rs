//! Requests, redirects and bodies.

use crate::mem::Buffers;
use std::future::Future;
use std::io::ErrorKind;
use std::sync::Arc;
use std::sync::atomic::{AtomicU32, Ordering};
use std::time::Duration;

use bytes::Bytes;
use reqwest::header::{
    ACCEPT_ENCODING, HeaderMap, HeaderName, HeaderValue, IF_MATCH, LOCATION, RANGE,
};
use reqwest::{Client, ClientBuilder, Method, Request, RequestBuilder, Response, Url};

use super::failure::timed;
use super::reply::{Identity, Range};
use crate::environment::reading;
use crate::io::net::{
    ConnectionPool, Failure, NetOptions, PooledConnection, Protocols, Tls, Tries,
};

/// The most redirects of one request.
const MAX_REDIRECTS: usize = 10;
/// What servers are asked to speak, the best first.
const PROTOCOLS: Protocols = &[b"h2", b"http/1.1"];
/// Bytes that a server may send by HTTP/2 before it hears that some have arrived. It hears that after
/// half of them: 8 MiB in 50 ms fill a network of 1 Gbit/s.
pub const WINDOW: u32 = 16 << 20;

/// Says in a request who asks, where that depends on what else the request says.
pub trait Authorize: Send + Sync {
    fn authorize(&self, request: &mut Request) -> std::result::Result<(), Failure>;
}

/// Where a file is now, and what to send there.
#[derive(Clone)]
pub struct Target {
    url: Url,
    headers: Vec<(String, String)>,
    authorize: Option<Arc<dyn Authorize>>,
}

impl PartialEq for Target {
    fn eq(&self, other: &Target) -> bool {
        let same = match (&self.authorize, &other.authorize) {
            (Some(one), Some(other)) => Arc::ptr_eq(one, other),
            (one, other) => one.is_none() && other.is_none(),
        };
        same && self.url == other.url && self.headers == other.headers
    }
}

impl Target {
    pub fn new(url: Url, headers: Vec<(String, String)>) -> Self {
        Target { url, headers, authorize: None }
    }

    /// The same, where each request says who asks.
    #[cfg(feature = "clouds")]
    pub fn authorized(self, authorize: Arc<dyn Authorize>) -> Self {
        Target { authorize: Some(authorize), ..self }
    }

    /// What tells its file from others, without secrets: the address without its signature. None where
    /// there is more in its query, which may be a secret, or say which file is meant.
    pub fn name(&self) -> Option<String> {
        let keys: Vec<String> =
            self.url.query_pairs().map(|(key, _)| key.to_ascii_lowercase()).collect();
        let has = |key: &str| keys.iter().any(|found| found == key);
        // Short names are signatures only where they come together.
        let azure = has("sig") && has("sv");
        let older = has("signature") && OLDER_SIGNERS.iter().any(|key| has(key));
        let is_signature = |key: &str| {
            let key = key.to_ascii_lowercase();
            SIGNING.iter().any(|begin| key.starts_with(begin))
                || (azure && AZURE.contains(&&*key))
                || (older && (OLDER.contains(&&*key) || OLDER_SIGNERS.contains(&&*key)))
        };
        let mut url = self.url.clone();
        url.set_query(None);
        url.set_fragment(None);
        // Neither can fail for addresses that have a host.
        let _ = url.set_username("");
        let _ = url.set_password(None);
        let mut query = url::form_urlencoded::Serializer::new(String::new());
        for (key, value) in self.url.query_pairs() {
            match &*key {
                key if VERSIONS.contains(&key) => drop(query.append_pair(key, &value)),
                other if is_signature(other) => {}
                _ => return None,
            }
        }
        Some(format!("{url}?{}", query.finish()))
    }

    /// The host that is asked.
    #[cfg(feature = "s3")]
    pub fn host(&self) -> Option<&str> {
        self.url.host_str()
    }

    /// Whether it is one version of its file.
    pub fn is_version(&self) -> bool {
        self.url.query_pairs().any(|(key, _)| VERSIONS.contains(&&*key))
    }

    /// Another file in the same folder, asked for in the same way.
    pub fn beside(&self, name: &str) -> Option<Target> {
        let mut url = self.url.clone();
        url.path_segments_mut().ok()?.pop().extend(name.split('/'));
        Some(Target { url, ..self.clone() })
    }

    /// The target of a redirect. Credentials and other extra headers stay with their host, and what
    /// was asked for in secret is not asked for in the open.
    fn moved(&self, to: &str) -> std::result::Result<Target, Failure> {
        let refused = |what: &str| Failure::lasting(ErrorKind::InvalidData, what);
        let url = self.url.join(to).ok().filter(|url| matches!(url.scheme(), "http" | "https"));
        let mut url = url.ok_or_else(|| refused("the server redirects to what is no address"))?;
        if self.url.scheme() == "https" && url.scheme() == "http" {
            return Err(refused("the server redirects from https:// to http://, which is refused"));
        }
        let same = url.origin() == self.url.origin();
        if same && url.username().is_empty() {
            // Neither can fail: the address has a host.
            let _ = url.set_username(self.url.username());
            let _ = url.set_password(self.url.password());
        }
        Ok(if same { Target { url, ..self.clone() } } else { Target::new(url, Vec::new()) })
    }

    fn fields(&self) -> std::result::Result<HeaderMap, Failure> {
        let mut fields = HeaderMap::new();
        for (name, value) in &self.headers {
            let bad = |_| ();
            let name = HeaderName::from_bytes(name.as_bytes()).map_err(|e| bad(e.to_string()));
            let value = HeaderValue::from_str(value).map_err(|e| bad(e.to_string()));
            let (Ok(name), Ok(mut value)) = (name, value) else {
                let what = "an extra header is not well-formed";
                return Err(Failure::lasting(ErrorKind::InvalidInput, what));
            };
            value.set_sensitive(true);
            fields.append(name, value);
        }
        Ok(fields)
    }
}

/// The fields of queries that name a version of a file: of S3, Google and Azure.
const VERSIONS: [&str; 3] = ["versionId", "generation", "versionid"];
/// What the fields of queries begin with by which S3 and Google sign.
const SIGNING: [&str; 2] = ["x-amz-", "x-goog-"];
/// Those by which Azure does.
const AZURE: [&str; 17] = [
    "sv", "ss", "srt", "sp", "se", "st", "spr", "sip", "sig", "sr", "skoid", "sktid", "skt", "ske",
    "sks", "skv", "saoid",
];
/// Those of the older signatures of S3, of its CloudFront and of Google, and who has signed.
const OLDER: [&str; 3] = ["expires", "signature", "policy"];
const OLDER_SIGNERS: [&str; 3] = ["awsaccesskeyid", "googleaccessid", "key-pair-id"];

/// The clients of one source.
pub struct Clients {
    pool: ConnectionPool<Client>,
    options: NetOptions,
    certificates: Certificates,
    /// Bytes that a server may send ahead on a new connection.
    window: AtomicU32,
}

/// A client that a thread has for itself.
pub struct OneClient {
    connection: PooledConnection<Client>,
    stall: Duration,
    /// Why no server can be believed.
    missing: Option<String>,
}

impl Clients {
    /// Reads the certificates; what is wrong with them is the error, if `tls` needs them at once.
    pub fn new(options: &NetOptions, tls: bool) -> std::result::Result<Self, String> {
        let certificates = Certificates::read(options, tls)?;
        let (pool, window) = (ConnectionPool::default(), AtomicU32::new(WINDOW));
        Ok(Clients { pool, options: options.clone(), certificates, window })
    }

    /// Bytes that a server may send ahead on each connection.
    pub fn window(&self) -> u32 {
        self.window.load(Ordering::Relaxed)
    }

    /// Has servers send no more ahead than that. Connections on which they may send more are closed.
    pub fn set_window(&self, window: u32) {
        if self.window.fetch_min(window, Ordering::Relaxed) > window {
            self.pool.clear();
        }
    }

    /// Lends a client for the length of a call.
    pub fn with<T>(
        &self,
        tries: &Tries<'_>,
        body: impl FnOnce(&OneClient) -> std::result::Result<T, Failure>,
    ) -> std::result::Result<T, Failure> {
        let client = self.take(tries)?;
        let result = body(&client);
        self.pool.put(client.connection);
        result
    }

    /// Gives a client away.
    pub fn take(&self, tries: &Tries<'_>) -> std::result::Result<OneClient, Failure> {
        self.pool.take(tries, || self.connect()).map(|connection| self.one(connection))
    }

    /// Gives a client away that has no connection yet.
    pub fn new_one(&self, tries: &Tries<'_>) -> std::result::Result<OneClient, Failure> {
        PooledConnection::new(tries, || self.connect()).map(|connection| self.one(connection))
    }

    async fn connect(&self) -> std::result::Result<Client, Failure> {
        let window = self.window();
        let builder = builder(&self.options, &self.certificates)
            .http2_initial_stream_window_size(window)
            .http2_initial_connection_window_size(window);
        reading(|| builder.build()).map_err(Failure::from)
    }

    fn one(&self, connection: PooledConnection<Client>) -> OneClient {
        let missing = self.certificates.missing.clone();
        OneClient { connection, stall: self.options.stall, missing }
    }
}

/// A client with the options of a source or a sink.
pub fn connect(options: &NetOptions, certificates: &Certificates) -> reqwest::Result<Client> {
    let builder = builder(options, certificates);
    // Proxies.
    reading(|| builder.build())
}

/// What makes one. It reads the environment when it does.
pub fn builder(options: &NetOptions, certificates: &Certificates) -> ClientBuilder {
    Client::builder()
        .user_agent(concat!("tensorizer/", env!("CARGO_PKG_VERSION")))
        .redirect(reqwest::redirect::Policy::none())
        .connect_timeout(options.connect)
        .tcp_nodelay(true)
        .tcp_user_timeout(options.stall)
        .pool_max_idle_per_host(1)
        .http2_initial_stream_window_size(WINDOW)
        .http2_initial_connection_window_size(WINDOW)
        .tls_backend_preconfigured(certificates.tls.config())
}

/// Whom to believe.
#[derive(Debug)]
pub struct Certificates {
    tls: Tls,
    /// Why nobody, where the address does not need anybody.
    missing: Option<String>,
}

impl Certificates {
    /// Reads them; what is wrong with them is the error, if `tls` needs them at once. Otherwise they
    /// are needed only if the server redirects to an address that does.
    pub fn read(options: &NetOptions, tls: bool) -> std::result::Result<Self, String> {
        match Tls::new(&options.trust, PROTOCOLS) {
            Ok(tls) => Ok(Certificates { tls, missing: None }),
            Err(what) if tls => Err(what),
            Err(what) => Ok(Certificates { tls: Tls::nobody()?, missing: Some(what) }),
        }
    }
}

impl OneClient {
    /// Runs a request on this thread, until it ends or may not go on.
    pub fn run<T>(
        &self,
        tries: &Tries<'_>,
        request: impl Future<Output = std::result::Result<T, Failure>>,
    ) -> std::result::Result<T, Failure> {
        self.connection.run(tries, request)
    }

    /// Asks for a range, or for everything, and follows redirects, except those of which `is_answer`
    /// is true. The file must be the one that was opened, if that is known.
    pub async fn follow(
        &self,
        target: &Target,
        range: Option<Range>,
        opened: Option<&Identity>,
        is_answer: impl Fn(&HeaderMap) -> bool,
    ) -> std::result::Result<(Target, Response), Failure> {
        let mut target = target.clone();
        for _ in 0..=MAX_REDIRECTS {
            let mut request = self.request(Method::GET, &target)?;
            if let Some(range) = range {
                request = request.header(RANGE, range.field());
            }
            if let Some(tag) = opened.and_then(Identity::strong_tag) {
                request = request.header(IF_MATCH, tag);
            }
            let mut request = request.build()?;
            if let Some(authorize) = &target.authorize {
                authorize.authorize(&mut request)?;
            }
            let sent = self.connection.client().execute(request);
            let response = timed(self.stall, sent).await??;
            if !response.status().is_redirection() || is_answer(response.headers()) {
                return Ok((target, response));
            }
            target = target.moved(place(&response)?)?;
        }
        Err(too_many())
    }

    /// Asks for the fields alone. Redirects to the same host are followed; another is the answer.
    #[cfg(feature = "hf")]
    pub async fn fields(&self, target: &Target) -> std::result::Result<Response, Failure> {
        let mut target = target.clone();
        for _ in 0..=MAX_REDIRECTS {
            let request = self.request(Method::HEAD, &target)?;
            let response = timed(self.stall, request.send()).await??;
            if !response.status().is_redirection() {
                return Ok(response);
            }
            let moved = target.moved(place(&response)?)?;
            if moved.url.origin() != target.url.origin() {
                return Ok(response);
            }
            target = moved;
        }
        Err(too_many())
    }

    fn request(
        &self,
        method: Method,
        target: &Target,
    ) -> std::result::Result<RequestBuilder, Failure> {
        if let Some(what) = self.missing.as_ref().filter(|_| target.url.scheme() == "https") {
            return Err(Failure::lasting(ErrorKind::InvalidInput, what));
        }
        let request = self.connection.client().request(method, target.url.clone());
        Ok(request.headers(target.fields()?).header(ACCEPT_ENCODING, "identity"))
    }

    /// The next bytes of a body; none at its end.
    pub async fn chunk(
        &self,
        response: &mut Response,
        tries: &Tries<'_>,
    ) -> std::result::Result<Bytes, Failure> {
        let bytes = timed(self.stall, response.chunk()).await??.unwrap_or(Bytes::new());
        tries.moved(bytes.len() as u64);
        // Bytes that never cease to come would not let the event loop look.
        tries.check()?;
        Ok(bytes)
    }

    /// Keeps a body, which must have `len` bytes if that is known.
    pub async fn collect(
        &self,
        mut response: Response,
        len: Option<u64>,
        out: &mut Vec<u8>,
        tries: &Tries<'_>,
    ) -> std::result::Result<(), Failure> {
        loop {
            let bytes = self.chunk(&mut response, tries).await?;
            out.extend_from_slice(&bytes);
            let found = out.len() as u64;
            match len {
                Some(len) if found > len || (bytes.is_empty() && found < len) => {
                    let what = format!("expected a body of {len} bytes, found {found}");
                    return Err(Failure::passing(ErrorKind::UnexpectedEof, what));
                }
                _ if bytes.is_empty() => return Ok(()),
                _ => {}
            }
        }
    }

    /// Puts a body where it belongs. `done` is the position after the last byte that arrived,
    /// also when this fails.
    pub async fn scatter(
        &self,
        mut response: Response,
        range: Range,
        buffers: &mut Buffers<'_>,
        done: &mut u64,
        tries: &Tries<'_>,
    ) -> std::result::Result<(), Failure> {
        while *done < range.end {
            let bytes = self.chunk(&mut response, tries).await?;
            if bytes.is_empty() {
                let what = format!("the body ended at byte {done} of {}", range.end);
                return Err(Failure::passing(ErrorKind::UnexpectedEof, what));
            }
            if bytes.len() as u64 > range.end - *done {
                let what = format!("the body goes on behind byte {}", range.end);
                return Err(Failure::lasting(ErrorKind::InvalidData, what));
            }
            *done += buffers.put(&bytes) as u64;
        }
        // The end of the body is read too, so that the connection can be used again.
        if !self.chunk(&mut response, tries).await?.is_empty() {
            let what = format!("the body goes on behind byte {}", range.end);
            return Err(Failure::lasting(ErrorKind::InvalidData, what));
        }
        Ok(())
    }
}

/// Where a redirect leads to.
fn place(response: &Response) -> std::result::Result<&str, Failure> {
    let to = response.headers().get(LOCATION).and_then(|value| value.to_str().ok());
    to.ok_or_else(|| {
        let what = format!("the server answered {} without a place", response.status());
        Failure::lasting(ErrorKind::InvalidData, what)
    })
}

fn too_many() -> Failure {
    Failure::lasting(ErrorKind::InvalidData, format!("more than {MAX_REDIRECTS} redirects"))
}
