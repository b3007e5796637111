//! The one HTTP client: its time limits, protocols, proxies and certificates.

use std::io::ErrorKind;
#[cfg(any(feature = "clouds", feature = "s3"))]
use std::net::{IpAddr, Ipv6Addr};
use std::sync::Arc;
use std::sync::atomic::AtomicU64;
use std::time::Duration;

use hyper_util::client::proxy::matcher::Matcher;
use reqwest::{Method, Request, RequestBuilder, Response, Url};

use super::lookup::Resolver;
use super::send::{connection_failure, unless_stalled};
use super::tls::AlpnProtocols;
use super::{Failure, Tls, TransportOptions};
use crate::environment::read_guarded;

/// The protocols that servers may choose from, the best first.
const PROTOCOLS: AlpnProtocols = &[b"h2", b"http/1.1"];
/// Bytes that a server may send by HTTP/2 before it gets an acknowledgement, which is sent after
/// half of them: 8 MiB in 50 ms fill a network of 1 Gbit/s.
pub const HTTP2_WINDOW: u32 = 16 << 20;
/// Variables that name the proxy of `http://`, of `https://` and of both, and the hosts without one:
/// of each two, the first one that is set counts, even if it is empty.
const HTTP_PROXIES: [&str; 2] = ["HTTP_PROXY", "http_proxy"];
const HTTPS_PROXIES: [&str; 2] = ["HTTPS_PROXY", "https_proxy"];
const ALL_PROXIES: [&str; 2] = ["ALL_PROXY", "all_proxy"];
const NO_PROXIES: [&str; 2] = ["NO_PROXY", "no_proxy"];
/// A CGI script has this variable, and uses no proxies: a request could name one.
const CGI: &str = "REQUEST_METHOD";
/// AWS's services of IPv6: metadata, and credentials of pods.
#[cfg(any(feature = "clouds", feature = "s3"))]
const AWS_SERVICES: [Ipv6Addr; 2] = [
    Ipv6Addr::new(0xfd00, 0xec2, 0, 0, 0, 0, 0, 0x254),
    Ipv6Addr::new(0xfd00, 0xec2, 0, 0, 0, 0, 0, 0x23),
];
/// Names of this machine and of its metadata service.
#[cfg(any(feature = "clouds", feature = "s3"))]
const MACHINE_NAMES: [&str; 2] = ["localhost", "metadata.google.internal"];
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
    #[cfg(any(feature = "clouds", feature = "s3"))]
    pub fn client_without_proxy(&self) -> Result<Client, Failure> {
        self.build(HTTP2_WINDOW, false)
    }

    fn build(&self, window: u32, proxy: bool) -> Result<Client, Failure> {
        let builder = reqwest::Client::builder()
            .user_agent(concat!("tensorizer/", env!("CARGO_PKG_VERSION")))
            .redirect(reqwest::redirect::Policy::none())
            .connect_timeout(self.connect)
            .dns_resolver(Arc::new(Resolver))
            .tcp_nodelay(true)
            .tcp_user_timeout(self.stall)
            .pool_max_idle_per_host(1)
            .http2_initial_stream_window_size(window)
            .http2_initial_connection_window_size(window)
            .tls_backend_preconfigured(self.tls.config());
        let built = read_guarded(|| {
            let variable = |name: &str| std::env::var(name).ok();
            let unusable = UnusableProxies::from_variables(variable);
            if !proxy || names_all_hosts(variable) {
                let unusable = UnusableProxies::default();
                return builder.no_proxy().build().map(|http| (http, unusable));
            }
            builder.build().map(|http| (http, unusable))
        });
        let (http, unusable_proxies) = built?;
        let (hint, without_roots) = (Arc::clone(&self.hint), self.without_roots.clone());
        Ok(Client { http, stall: self.stall, hint, without_roots, unusable_proxies })
    }
}

/// True for a host that is reached from this machine only: loopback, and the link-local addresses of
/// the services that give credentials. A proxy would ask its own machine, and see the tokens.
#[cfg(any(feature = "clouds", feature = "s3"))]
pub fn is_of_machine(host: &str) -> bool {
    let host = host.trim_start_matches('[').trim_end_matches(']');
    match host.parse::<IpAddr>().map(|ip| ip.to_canonical()) {
        Ok(IpAddr::V4(ip)) => ip.is_loopback() || ip.is_link_local(),
        Ok(IpAddr::V6(ip)) => {
            ip.is_loopback() || ip.is_unicast_link_local() || AWS_SERVICES.contains(&ip)
        }
        Err(_) => MACHINE_NAMES.iter().any(|name| host.eq_ignore_ascii_case(name)),
    }
}

/// True if `no_proxy` excludes every host by `*`, numeric addresses included.
fn names_all_hosts(variable: impl Fn(&str) -> Option<String>) -> bool {
    first_set(NO_PROXIES, variable).is_some_and(|(_, hosts)| hosts.trim() == "*")
}

/// Returns the first variable that is set, with its value.
fn first_set(
    names: [&'static str; 2],
    variable: impl Fn(&str) -> Option<String>,
) -> Option<(&'static str, String)> {
    names.into_iter().find_map(|name| Some((name, variable(name)?)))
}

/// Proxies that cannot be used: requests that need one of them fail.
#[derive(Debug, Clone, Default)]
struct UnusableProxies {
    /// The messages for requests to `http://` and to `https://`.
    messages: [Option<Arc<str>>; 2],
    /// Intercepts the requests that need a proxy.
    needs_proxy: Option<Arc<Matcher>>,
}

impl UnusableProxies {
    fn from_variables(variable: impl Fn(&str) -> Option<String> + Copy) -> Self {
        if variable(CGI).is_some() || names_all_hosts(variable) {
            return UnusableProxies::default();
        }
        let messages = [HTTP_PROXIES, HTTPS_PROXIES].map(|names| unusable_proxy(names, variable));
        let hosts = first_set(NO_PROXIES, variable).map_or(String::new(), |(_, hosts)| hosts);
        let needs_proxy = Matcher::builder().all("http://proxy.invalid").no(hosts).build();
        UnusableProxies {
            messages: messages.map(|message| message.map(Arc::from)),
            needs_proxy: Some(Arc::new(needs_proxy)),
        }
    }

    /// The message for a request that needs a proxy that cannot be used.
    fn message(&self, url: &Url) -> Option<&str> {
        let [of_http, of_https] = &self.messages;
        let message = if url.scheme() == "https" { of_https } else { of_http };
        let is_needed = |matcher: &Arc<Matcher>| {
            url.as_str().parse().is_ok_and(|uri| matcher.intercept(&uri).is_some())
        };
        message.as_deref().filter(|_| self.needs_proxy.as_ref().is_some_and(is_needed))
    }
}

/// The message for a proxy that cannot be used. `names`: the variables for the scheme of a URL.
fn unusable_proxy(
    names: [&'static str; 2],
    variable: impl Fn(&str) -> Option<String> + Copy,
) -> Option<String> {
    let not_empty = |(_, value): &(&str, String)| !value.is_empty();
    let of_scheme = first_set(names, variable).filter(not_empty);
    let (name, value) = of_scheme.or_else(|| first_set(ALL_PROXIES, variable).filter(not_empty))?;
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
    unusable_proxies: UnusableProxies,
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
        #[cfg(test)]
        #[cfg(any(feature = "clouds", feature = "s3"))]
        if let Some(server) = super::simulated::RamServer::find(request.url()) {
            return Ok(server.respond(&request));
        }
        self.check(request.url())?;
        let response = unless_stalled(stall, sent, self.http.execute(request)).await?;
        response.map_err(|error| connection_failure(error, &self.hint))
    }

    /// Fails if no server of `https://` is trusted, or if the proxy cannot be used.
    fn check(&self, url: &Url) -> Result<(), Failure> {
        let roots = self.without_roots.as_deref().filter(|_| url.scheme() == "https");
        match self.unusable_proxies.message(url).or(roots) {
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

    #[cfg(any(feature = "clouds", feature = "s3"))]
    #[test]
    fn services_of_the_machine_are_recognized() {
        for host in [
            "169.254.169.254",
            "169.254.170.2",
            "169.254.170.23",
            "[fd00:ec2::23]",
            "fd00:ec2::254",
            "127.0.0.1",
            "127.1.2.3",
            "[::1]",
            "::ffff:169.254.170.2",
            "LocalHost",
            "metadata.google.internal",
        ] {
            assert!(is_of_machine(host), "{host}");
        }
        for host in ["", "example.org", "10.0.0.1", "169.255.0.1", "fd00:ec2::1", "localhost.a"] {
            assert!(!is_of_machine(host), "{host}");
        }
    }

    #[test]
    fn a_proxy_of_an_unknown_kind_is_refused() {
        let check = |value: &'static str, url_scheme: &str| {
            let variable = |name: &str| (name == "https_proxy").then(|| value.to_owned());
            let url = Url::parse(&format!("{url_scheme}://host/x")).unwrap();
            UnusableProxies::from_variables(variable).message(&url).map(str::to_owned)
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

    #[test]
    fn a_proxy_that_a_host_does_not_need_is_not_refused() {
        let refused = |variables: &[(&str, &str)], url: &str| {
            let value = |asked: &str| {
                variables.iter().find(|(name, _)| *name == asked).map(|(_, to)| (*to).to_owned())
            };
            let url = Url::parse(url).unwrap();
            UnusableProxies::from_variables(value).message(&url).is_some()
        };
        let bad = ("https_proxy", "quic://host");
        assert!(refused(&[bad], "https://127.0.0.1:1/x"));
        for hosts in ["127.0.0.1", "127.0.0.0/8,x", "*"] {
            assert!(!refused(&[bad, ("no_proxy", hosts)], "https://127.0.0.1:1/x"), "{hosts}");
        }
        assert!(refused(&[bad, ("no_proxy", "example.org")], "https://example.com/x"));
        assert!(!refused(&[bad, ("no_proxy", "example.org")], "https://a.example.org/x"));
        // The first of two spellings counts, even if it is empty.
        assert!(!refused(&[bad, ("HTTPS_PROXY", "")], "https://example.com/x"));
        let all = [bad, ("NO_PROXY", ""), ("no_proxy", "example.com")];
        assert!(refused(&all, "https://example.com/x"));
        assert!(!refused(&[bad, ("REQUEST_METHOD", "GET")], "https://example.com/x"));
    }
}
