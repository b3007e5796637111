//! The one HTTP client: its time limits, protocols, proxies and certificates.

use std::io::{self, ErrorKind};
use std::sync::Arc;
use std::sync::atomic::AtomicU64;
use std::time::Duration;

use cookie_store::{CookieStore, RawCookie};
use hyper::Uri;
use hyper::header::{ACCEPT, COOKIE, HeaderValue, PROXY_AUTHORIZATION, SET_COOKIE, USER_AGENT};
use hyper_rustls::{HttpsConnector, MaybeHttpsStream};
use hyper_util::client::legacy;
use hyper_util::rt::{TokioExecutor, TokioTimer};
use reqwest::{Body, Request, Response, Url};
use tower::Service as _;
use tower::util::{BoxCloneSyncService, service_fn};

use super::proxies::{
    BoxError, Proxies, ProxyConnector, ServerStream, TcpConnector, is_of_machine, resolver,
};
use super::send::{connection_failure, unless_stalled};
use super::tls::AlpnProtocols;
use super::{Failure, Tls, TransportOptions, timer};
use crate::environment::read_guarded;
use crate::sys::fork_safe_mutex::ForkSafeMutex;
use crate::traffic::Traffic;

/// The protocols that servers may choose from, the best first.
const PROTOCOLS: AlpnProtocols = &[b"h2", b"http/1.1"];
/// Bytes that a server may send by HTTP/2 before it gets an acknowledgement, which is sent after
/// half of them: 8 MiB in 50 ms fill a network of 1 Gbit/s.
pub const HTTP2_WINDOW: u32 = 16 << 20;
/// Time until an idle connection is closed, and between the probes of one that is silent.
const IDLE: Duration = Duration::from_secs(90);
const PROBES: Duration = Duration::from_secs(15);
/// Probes without an answer after which a connection is given up.
const MOST_PROBES: u32 = 3;
/// The name of this product, and its version.
pub const OUR_NAME: &str = concat!("tensorizer/", env!("CARGO_PKG_VERSION"));

/// The configuration of the clients of one source or sink.
#[derive(Debug, Clone)]
pub struct ClientConfig {
    connect: Duration,
    /// Time limit for a server that neither sends nor takes bytes.
    pub stall: Duration,
    tls: Tls,
    /// The reason why no server is trusted, if the certificates are invalid.
    without_roots: Option<Arc<str>>,
    /// The advice for an untrusted certificate.
    hint: Arc<str>,
    /// The cookies that servers have set: a redirect may expect one.
    cookies: Arc<ForkSafeMutex<CookieStore>>,
    traffic: Arc<Traffic>,
}

impl ClientConfig {
    /// Reads the certificates. If they are invalid, that is an error only if `tls` is true.
    /// Otherwise they are needed only after a redirect to `https://`.
    pub fn new(options: &TransportOptions, tls: bool) -> Result<Self, String> {
        let (found, without_roots) = match Tls::new(&options.trust, PROTOCOLS) {
            Ok(found) => (found, None),
            Err(what) if tls => return Err(what),
            Err(what) => (Tls::without_roots()?, Some(what.into())),
        };
        let hint = options.trust.resolved().hint(options.trust_settings).into();
        let TransportOptions { connect, stall, .. } = *options;
        let cookies = Arc::new(ForkSafeMutex::new(CookieStore::new()));
        let traffic = Arc::clone(&options.traffic);
        Ok(ClientConfig { connect, stall, tls: found, without_roots, hint, cookies, traffic })
    }

    /// Makes a client.
    pub fn client(&self) -> Result<Client, Failure> {
        self.build(HTTP2_WINDOW, true)
    }

    /// Makes a client to which servers may send `window` bytes ahead by HTTP/2; `proxy`: true if it
    /// uses proxies.
    pub fn build(&self, window: u32, proxy: bool) -> Result<Client, Failure> {
        let variable = |name: &str| std::env::var(name).ok();
        let proxies = proxy.then(|| read_guarded(|| Proxies::from_variables(variable)));
        let proxies = Arc::new(proxies.unwrap_or_else(Proxies::default));
        let http = legacy::Client::builder(TokioExecutor::new())
            .timer(TokioTimer::new())
            .pool_timer(TokioTimer::new())
            .pool_idle_timeout(IDLE)
            .pool_max_idle_per_host(1)
            .http2_initial_stream_window_size(window)
            .http2_initial_connection_window_size(window)
            .build(self.connector(&proxies));
        let requests = reqwest::Client::builder().no_proxy().build()?;
        Ok(Client { http, requests, config: self.clone(), proxies })
    }

    /// Connects by TCP, through a proxy if there is one, and by TLS, all within the time limit.
    fn connector(&self, proxies: &Arc<Proxies>) -> Connector {
        let mut http = TcpConnector::new_with_resolver(resolver());
        http.enforce_http(false);
        // Divided among the addresses of a name: one that does not answer must not take all of it.
        http.set_connect_timeout(Some(self.connect));
        http.set_nodelay(true);
        http.set_tcp_user_timeout(Some(self.stall));
        http.set_keepalive(Some(PROBES));
        http.set_keepalive_interval(Some(PROBES));
        http.set_keepalive_retries(Some(MOST_PROBES));
        let mut tls_of_proxy = self.tls.config();
        tls_of_proxy.alpn_protocols.clear();
        let to_proxy = HttpsConnector::from((http.clone(), tls_of_proxy));
        let plain = ProxyConnector { proxies: Arc::clone(proxies), http, to_proxy };
        let plain = service_fn(move |to: Uri| Box::pin(plain.clone().connect(to)));
        let encrypted = HttpsConnector::from((plain, self.tls.config()));
        let limit = self.connect;
        BoxCloneSyncService::new(service_fn(move |to: Uri| {
            let connecting = encrypted.clone().call(to);
            async move {
                timer::timeout(limit, connecting).await.unwrap_or_else(|_| {
                    let what = format!("no connection within {} s", limit.as_secs_f64());
                    Err(io::Error::new(ErrorKind::TimedOut, what).into())
                })
            }
        }))
    }
}

type Connector = BoxCloneSyncService<Uri, MaybeHttpsStream<ServerStream>, BoxError>;

/// A client. Its connections live on the event loop on which it was made.
#[derive(Debug, Clone)]
pub struct Client {
    http: legacy::Client<Connector, Body>,
    /// Builds requests.
    pub requests: reqwest::Client,
    pub config: ClientConfig,
    proxies: Arc<Proxies>,
}

impl Client {
    /// Sends a request, and waits for the head of its response. `sent` counts the bytes of its
    /// body.
    pub async fn send(
        &self,
        request: Request,
        sent: Option<&AtomicU64>,
    ) -> Result<Response, Failure> {
        #[cfg(all(test, any(feature = "clouds", feature = "s3")))]
        if let Some(server) = super::simulated::RamServer::find(request.url()) {
            return Ok(server.respond(&request));
        }
        self.config.traffic.request();
        let url = request.url().clone();
        let mut request = hyper::Request::try_from(request)?;
        self.check(request.uri())?;
        for (name, value) in [
            (USER_AGENT, Some(HeaderValue::from_static(OUR_NAME))),
            (ACCEPT, Some(HeaderValue::from_static("*/*"))),
            (COOKIE, self.cookies_of(&url)),
            (PROXY_AUTHORIZATION, self.proxies.authorization(request.uri())),
        ] {
            if let Some(value) = value {
                request.headers_mut().entry(name).or_insert(value);
            }
        }
        let response = unless_stalled(self.config.stall, sent, self.http.request(request)).await?;
        let response = response.map_err(|error| connection_failure(&error, &self.config.hint))?;
        let set = response.headers().get_all(SET_COOKIE).into_iter();
        let set = set.filter_map(|value| RawCookie::parse(value.to_str().ok()?.to_owned()).ok());
        self.config.cookies.lock().store_response_cookies(set, &url);
        Ok(response.map(Body::wrap).into())
    }

    /// The header with the cookies for a URL.
    fn cookies_of(&self, url: &Url) -> Option<HeaderValue> {
        let cookies = self.config.cookies.lock();
        let pairs = cookies.get_request_values(url).map(|(name, value)| format!("{name}={value}"));
        let text = pairs.collect::<Vec<_>>().join("; ");
        HeaderValue::from_str(&text).ok().filter(|_| !text.is_empty())
    }

    /// Fails if no server of `https://` is trusted, or if the proxy cannot be used.
    fn check(&self, to: &Uri) -> Result<(), Failure> {
        let roots = self.config.without_roots.as_deref();
        let roots = roots.filter(|_| to.scheme_str() == Some("https"));
        let refusal = self.proxies.refusal(to).or(roots);
        refusal.map_or(Ok(()), |what| Err(Failure::permanent(ErrorKind::InvalidInput, what)))
    }
}

/// Makes a client of the transport for each request for credentials, of which there are few.
#[derive(Debug, Clone)]
pub struct CredentialClient {
    pub options: TransportOptions,
}

impl CredentialClient {
    /// A client with the options of a source or sink, except their headers and certificates.
    /// `trust_settings`: the settings that name certificates, for messages.
    pub fn new(options: &TransportOptions, trust_settings: &'static str) -> Self {
        let (headers, trust) = (Vec::new(), options.credential_trust.clone());
        let options = TransportOptions { headers, trust, trust_settings, ..options.clone() };
        CredentialClient { options }
    }

    /// A client for a request to a host. Services of the machine are asked without a proxy.
    pub fn connect(&self, host: &str, tls: bool) -> Result<Client, Failure> {
        let config = ClientConfig::new(&self.options, tls)
            .map_err(|what| Failure::permanent(ErrorKind::InvalidInput, what))?;
        config.build(HTTP2_WINDOW, !is_of_machine(host))
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::io::transport::Trust;

    #[test]
    fn certificates_and_headers_of_the_call_are_not_for_credentials() {
        let mut options = TransportOptions::from_environment().unwrap();
        options.trust = Trust::Anything;
        options.headers.push(("authorization".to_owned(), "of the call".to_owned()));
        let client = CredentialClient::new(&options, "AWS_CA_BUNDLE");
        assert_eq!(client.options.trust, Trust::Default);
        assert!(client.options.headers.is_empty());
    }
}
