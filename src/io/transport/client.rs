//! The one HTTP client: its time limits, protocols, proxies and certificates.

use std::io::ErrorKind;
use std::sync::Arc;
use std::sync::atomic::AtomicU64;
use std::time::Duration;

use reqwest::{Method, Request, RequestBuilder, Response, Url};

use super::send::{connection_failure, unless_stalled};
use super::tls::Protocols;
use super::{Failure, Tls, TransportOptions};
use crate::environment::reading;

/// The protocols that servers may choose from, the best first.
const PROTOCOLS: Protocols = &[b"h2", b"http/1.1"];
/// Bytes that a server may send by HTTP/2 before it hears that some have arrived. It hears that after
/// half of them: 8 MiB in 50 ms fill a network of 1 Gbit/s.
pub const HTTP2_WINDOW: u32 = 16 << 20;
/// Variables that name a proxy.
const PROXIES: [&str; 6] =
    ["HTTPS_PROXY", "https_proxy", "HTTP_PROXY", "http_proxy", "ALL_PROXY", "all_proxy"];
/// Schemes of proxies.
const PROXY_SCHEMES: [&str; 6] = ["http", "https", "socks4", "socks4a", "socks5", "socks5h"];

/// All that clients of one source or sink are made of.
#[derive(Debug)]
pub struct ClientConfig {
    connect: Duration,
    stall: Duration,
    tls: Tls,
    /// Why no server is trusted.
    without_roots: Option<Arc<str>>,
    /// The advice for an untrusted certificate.
    hint: Arc<str>,
}

impl ClientConfig {
    /// Reads the certificates. What is wrong with them is the error if `tls` needs them at once;
    /// otherwise they are needed only if the server redirects to `https://`.
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
        self.make(HTTP2_WINDOW, true)
    }

    /// Makes a client to which servers may send `window` bytes ahead by HTTP/2.
    pub fn client_with_window(&self, window: u32) -> Result<Client, Failure> {
        self.make(window, true)
    }

    /// Makes a client that uses no proxy.
    #[cfg(feature = "clouds")]
    pub fn client_without_proxy(&self) -> Result<Client, Failure> {
        self.make(HTTP2_WINDOW, false)
    }

    fn make(&self, window: u32, proxy: bool) -> Result<Client, Failure> {
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
        let made: Result<reqwest::Result<_>, String> = reading(|| {
            let variable = |name: &str| std::env::var(name).ok();
            if !proxy || names_all_hosts(variable) {
                return Ok(builder.no_proxy().build());
            }
            // The builder reads the same variables, and ignores a scheme that it does not know.
            check_proxies(variable)?;
            Ok(builder.build())
        });
        let http = made.map_err(|what| Failure::permanent(ErrorKind::InvalidInput, what))??;
        let (hint, without_roots) = (Arc::clone(&self.hint), self.without_roots.clone());
        Ok(Client { http, stall: self.stall, hint, without_roots })
    }
}

/// True if `no_proxy` excludes every host by `*`, numeric addresses included.
fn names_all_hosts(variable: impl Fn(&str) -> Option<String>) -> bool {
    let hosts = variable("no_proxy").or_else(|| variable("NO_PROXY"));
    hosts.is_some_and(|hosts| hosts.trim() == "*")
}

/// Refuses a proxy of a kind that cannot be used.
fn check_proxies(variable: impl Fn(&str) -> Option<String>) -> Result<(), String> {
    for name in PROXIES {
        let Some(value) = variable(name) else { continue };
        let Some((scheme, _)) = value.split_once("://") else { continue };
        // The builder knows `socks` in lower case only.
        let is_http = ["http", "https"].iter().any(|http| scheme.eq_ignore_ascii_case(http));
        if !is_http && !PROXY_SCHEMES.contains(&scheme) {
            return Err(format!(
                "{name} names a proxy with `{scheme}://`: expected one of {}",
                PROXY_SCHEMES.join(", ")
            ));
        }
    }
    Ok(())
}

/// A client. Its connections live on the event loop on which it was made.
#[derive(Debug, Clone)]
pub struct Client {
    http: reqwest::Client,
    stall: Duration,
    hint: Arc<str>,
    without_roots: Option<Arc<str>>,
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

    /// Sends a request, and waits for the head of its answer. `sent` counts the bytes of its body.
    pub async fn send(
        &self,
        request: Request,
        sent: Option<&AtomicU64>,
    ) -> Result<Response, Failure> {
        self.send_patiently(request, sent, self.stall).await
    }

    /// The same with another time limit for the server.
    pub async fn send_patiently(
        &self,
        request: Request,
        sent: Option<&AtomicU64>,
        stall: Duration,
    ) -> Result<Response, Failure> {
        self.check(request.url())?;
        let answer = unless_stalled(stall, sent, self.http.execute(request)).await?;
        answer.map_err(|error| connection_failure(error, &self.hint))
    }

    /// Fails for `https://` if no server is trusted.
    fn check(&self, url: &Url) -> Result<(), Failure> {
        match &self.without_roots {
            Some(what) if url.scheme() == "https" => {
                Err(Failure::permanent(ErrorKind::InvalidInput, &**what))
            }
            _ => Ok(()),
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
        let check = |value: &'static str| {
            check_proxies(|asked| (asked == "https_proxy").then(|| value.to_owned()))
        };
        for good in [
            "",
            "host:1",
            "http://host:1",
            "HTTP://host:1",
            "socks5h://host:1",
            "socks5://user:x@host",
        ] {
            check(good).unwrap();
        }
        let what = check("quic://user:secret@host").unwrap_err();
        assert!(what.starts_with("https_proxy names a proxy with `quic://`"), "{what}");
        assert!(!what.contains("secret"));
    }
}
