//! The one HTTP client: its time limits, protocols, proxies and certificates.

use std::io::ErrorKind;
use std::sync::Arc;
use std::sync::atomic::AtomicU64;
use std::time::Duration;

use reqwest::{Method, Request, RequestBuilder, Response, Url};

use super::send::{connection_failure, unless_stalled};
use super::tls::AlpnProtocols;
use super::{Failure, Tls, TransportOptions};
use crate::environment::read_guarded;

/// The protocols that servers may choose from, the best first.
const PROTOCOLS: AlpnProtocols = &[b"h2", b"http/1.1"];
/// Bytes that a server may send by HTTP/2 before it gets an acknowledgement, which is sent after
/// half of them: 8 MiB in 50 ms fill a network of 1 Gbit/s.
pub const HTTP2_WINDOW: u32 = 16 << 20;
/// Variables that name the proxy of `http://` and of `https://`: the first one that is set counts.
const HTTP_PROXIES: [&str; 4] = ["HTTP_PROXY", "http_proxy", "ALL_PROXY", "all_proxy"];
const HTTPS_PROXIES: [&str; 4] = ["HTTPS_PROXY", "https_proxy", "ALL_PROXY", "all_proxy"];
/// Schemes of proxies.
const PROXY_SCHEMES: [&str; 6] = ["http", "https", "socks4", "socks4a", "socks5", "socks5h"];

/// The configuration of the clients of one source or sink.
#[derive(Debug)]
pub struct ClientConfig {
    connect: Duration,
    stall: Duration,
    tls: Tls,
    /// The reason why no server is trusted, if the certificates are invalid.
    without_roots: Option<Arc<str>>,
    /// The advice for an untrusted certificate.
    hint: Arc<str>,
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
        Ok(ClientConfig { connect, stall, tls: found, without_roots, hint })
    }

    /// Makes a client.
    pub fn client(&self) -> Result<Client, Failure> {
        self.build(HTTP2_WINDOW, true)
    }

    /// Makes a client to which servers may send `window` bytes ahead by HTTP/2.
    pub fn client_with_window(&self, window: u32) -> Result<Client, Failure> {
        self.build(window, true)
    }

    /// Makes a client that uses no proxy.
    #[cfg(feature = "clouds")]
    pub fn client_without_proxy(&self) -> Result<Client, Failure> {
        self.build(HTTP2_WINDOW, false)
    }

    fn build(&self, window: u32, proxy: bool) -> Result<Client, Failure> {
        let builder = reqwest::Client::builder()
            .user_agent(concat!("tensorizer/", env!("CARGO_PKG_VERSION")))
            .redirect(reqwest::redirect::Policy::none())
            .connect_timeout(self.connect)
            .tcp_nodelay(true)
            .tcp_user_timeout(self.stall)
            .pool_max_idle_per_host(1)
            .http2_initial_stream_window_size(window)
            .http2_initial_connection_window_size(window)
            .tls_backend_preconfigured(self.tls.config());
        let built = read_guarded(|| {
            let variable = |name: &str| std::env::var(name).ok();
            if !proxy || names_all_hosts(variable) {
                return builder.no_proxy().build().map(|http| (http, [None, None]));
            }
            let unusable = ["http", "https"].map(|scheme| unusable_proxy(scheme, variable));
            builder.build().map(|http| (http, unusable))
        });
        let (http, unusable_proxies) = built?;
        let (hint, without_roots) = (Arc::clone(&self.hint), self.without_roots.clone());
        Ok(Client { http, stall: self.stall, hint, without_roots, unusable_proxies })
    }
}

/// True if `no_proxy` excludes every host by `*`, numeric addresses included.
fn names_all_hosts(variable: impl Fn(&str) -> Option<String>) -> bool {
    let hosts = variable("no_proxy").or_else(|| variable("NO_PROXY"));
    hosts.is_some_and(|hosts| hosts.trim() == "*")
}

/// The message for a proxy that cannot be used, of requests to URLs with this scheme.
fn unusable_proxy(url_scheme: &str, variable: impl Fn(&str) -> Option<String>) -> Option<String> {
    let names = if url_scheme == "https" { HTTPS_PROXIES } else { HTTP_PROXIES };
    let set = |name: &'static str| Some((name, variable(name).filter(|value| !value.is_empty())?));
    let (name, value) = names.into_iter().find_map(set)?;
    let (scheme, _) = value.split_once("://")?;
    // The builder of clients knows `socks` in lower case only, and ignores other schemes.
    let is_http = ["http", "https"].iter().any(|http| scheme.eq_ignore_ascii_case(http));
    let is_usable = is_http || PROXY_SCHEMES.contains(&scheme);
    (!is_usable).then(|| {
        let expected = PROXY_SCHEMES.join(", ");
        format!("{name} names a proxy with `{scheme}://`: expected one of {expected}")
    })
}

/// A client. Its connections live on the event loop on which it was made.
#[derive(Debug, Clone)]
pub struct Client {
    http: reqwest::Client,
    stall: Duration,
    hint: Arc<str>,
    without_roots: Option<Arc<str>>,
    /// Messages for proxies of `http://` and of `https://` that cannot be used.
    unusable_proxies: [Option<String>; 2],
}

impl Client {
    /// Time limit for a server that neither sends nor takes bytes.
    pub fn stall(&self) -> Duration {
        self.stall
    }

    /// Begins a request.
    pub fn request(&self, method: Method, url: Url) -> RequestBuilder {
        self.http.request(method, url)
    }

    /// Sends a request, and waits for the head of its response. `sent` counts the bytes of its
    /// body.
    pub async fn send(
        &self,
        request: Request,
        sent: Option<&AtomicU64>,
    ) -> Result<Response, Failure> {
        self.send_with_time_limit(request, sent, self.stall).await
    }

    /// The same with another time limit for the server.
    pub async fn send_with_time_limit(
        &self,
        request: Request,
        sent: Option<&AtomicU64>,
        stall: Duration,
    ) -> Result<Response, Failure> {
        self.check(request.url())?;
        let response = unless_stalled(stall, sent, self.http.execute(request)).await?;
        response.map_err(|error| connection_failure(error, &self.hint))
    }

    /// Fails if no server of `https://` is trusted, or if the proxy cannot be used.
    fn check(&self, url: &Url) -> Result<(), Failure> {
        let is_https = url.scheme() == "https";
        let [of_http, of_https] = &self.unusable_proxies;
        let proxy = if is_https { of_https } else { of_http };
        let roots = self.without_roots.as_deref().filter(|_| is_https);
        match proxy.as_deref().or(roots) {
            Some(what) => Err(Failure::permanent(ErrorKind::InvalidInput, what)),
            None => Ok(()),
        }
    }
}

#[cfg(test)]
#[allow(clippy::unwrap_used)]
mod tests {
    use super::*;

    #[test]
    fn an_asterisk_excludes_every_host_from_proxies() {
        let all = |name: &'static str, value: &'static str| {
            names_all_hosts(|asked| (asked == name).then(|| value.to_owned()))
        };
        assert!(all("NO_PROXY", "*") && all("no_proxy", " * "));
        assert!(!all("NO_PROXY", "*.example.org,*") && !all("NO_PROXY", "") && !all("X", "*"));
    }

    #[test]
    fn a_proxy_of_an_unknown_kind_is_refused() {
        let check = |value: &'static str, url_scheme: &str| {
            unusable_proxy(url_scheme, |name| (name == "https_proxy").then(|| value.to_owned()))
        };
        for good in ["", "host:1", "HTTP://host:1", "socks5h://host:1", "socks5://user:x@host"] {
            assert_eq!(check(good, "https"), None);
        }
        let bad = "quic://user:secret@host";
        let what = check(bad, "https").unwrap();
        assert!(what.starts_with("https_proxy names a proxy with `quic://`"), "{what}");
        assert!(!what.contains("secret"));
        // For requests that do not use the proxy.
        assert_eq!(check(bad, "http"), None);
    }
}
