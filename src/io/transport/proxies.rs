//! Proxies: chosen by the variables that other programs use, too, and connections through them.

use std::error::Error as StdError;
use std::io::{self, IoSlice};
use std::net::{IpAddr, Ipv6Addr, SocketAddr};
use std::pin::Pin;
use std::sync::Arc;
use std::task::{Context, Poll};
use std::time::Duration;
use std::vec;

use hyper::client::conn::http1;
use hyper::header::{HOST, HeaderValue};
use hyper::rt::{Read, ReadBufCursor, Write};
use hyper::{Request, Uri, upgrade};
use hyper_rustls::{HttpsConnector, MaybeHttpsStream};
use hyper_util::client::legacy::connect::dns::Name;
use hyper_util::client::legacy::connect::proxy::{SocksV4, SocksV5};
use hyper_util::client::legacy::connect::{Connected, Connection, HttpConnector};
use hyper_util::client::proxy::matcher::{Intercept, Matcher};
use hyper_util::rt::TokioIo;
use reqwest::Body;
use tokio::net::TcpStream;
use tower::Service as _;
use tower::util::{ServiceFn, service_fn};

use super::{ErrorDocument, Repeat, lookup, read_beginning, status_failure};

/// Variables that name the proxy of `http://`, of `https://` and of both, and the hosts without one:
/// of each two, the first one that is set counts, even if it is empty.
const HTTP_PROXIES: [&str; 2] = ["http_proxy", "HTTP_PROXY"];
const HTTPS_PROXIES: [&str; 2] = ["https_proxy", "HTTPS_PROXY"];
const ALL_PROXIES: [&str; 2] = ["all_proxy", "ALL_PROXY"];
const NO_PROXIES: [&str; 2] = ["no_proxy", "NO_PROXY"];
/// A CGI script has this variable. A request could set `HTTP_PROXY` there, by a header `Proxy`.
pub const CGI: &str = "REQUEST_METHOD";
/// AWS's services of IPv6: metadata, and credentials of pods.
const AWS_SERVICES: [Ipv6Addr; 2] = [
    Ipv6Addr::new(0xfd00, 0xec2, 0, 0, 0, 0, 0, 0x254),
    Ipv6Addr::new(0xfd00, 0xec2, 0, 0, 0, 0, 0, 0x23),
];
/// Names of this machine and of its metadata service.
const MACHINE_NAMES: [&str; 2] = ["localhost", "metadata.google.internal"];
/// Schemes of proxies.
const PROXY_SCHEMES: [&str; 6] = ["http", "https", "socks4", "socks4a", "socks5", "socks5h"];
/// The most headers of a proxy's answer.
const MOST_HEADERS: usize = 1000;
/// Time limit for the text of a proxy's refusal.
const REFUSAL_TIME: Duration = Duration::from_secs(5);

/// True for a host that is reached from this machine only: loopback, and the link-local addresses of
/// the services that give credentials. A proxy would ask its own machine, and see the tokens.
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

/// The proxies of a client.
#[derive(Debug, Default)]
pub struct Proxies {
    /// The messages for requests to `http://` and to `https://` whose proxy cannot be used.
    unusable: [Option<String>; 2],
    /// None if there are no proxies.
    matcher: Option<Matcher>,
    /// Matchers without the hosts of a `no_proxy` entry, and the port of the entry.
    exceptions: Vec<(Option<u16>, Matcher)>,
}

impl Proxies {
    /// The proxies that variables name, as Python's `urllib` and `requests` read them.
    pub fn from_variables(variable: impl Fn(&str) -> Option<String>) -> Self {
        let named = |names: [&'static str; 2]| {
            names.into_iter().find_map(|name| {
                let is_usable = name != "HTTP_PROXY" || variable(CGI).is_none();
                Some((name, variable(name).filter(|_| is_usable)?))
            })
        };
        let proxy = |names| named(names).filter(|(_, value)| !value.is_empty());
        let of_schemes =
            [HTTP_PROXIES, HTTPS_PROXIES].map(|names| proxy(names).or_else(|| proxy(ALL_PROXIES)));
        let hosts = named(NO_PROXIES).map_or(String::new(), |(_, hosts)| hosts);
        let entries = hosts.split([',', ' ']).map(str::trim).filter(|entry| !entry.is_empty());
        if entries.clone().any(|entry| entry == "*") || of_schemes.iter().all(Option::is_none) {
            return Proxies::default();
        }
        let value = |of: &Option<(_, String)>| of.clone().map_or(String::new(), |(_, value)| value);
        let [http, https] = of_schemes.each_ref().map(value);
        Proxies {
            unusable: of_schemes.map(|of| unusable_proxy(of?)),
            matcher: Some(Matcher::builder().http(http).https(https).build()),
            exceptions: entries.map(exception).collect(),
        }
    }

    /// The message for a request that needs a proxy that cannot be used.
    pub fn refusal(&self, to: &Uri) -> Option<&str> {
        let [of_http, of_https] = &self.unusable;
        let message = if to.scheme_str() == Some("https") { of_https } else { of_http };
        message.as_deref().filter(|_| !self.is_exception(to))
    }

    /// The proxy of a request.
    pub fn proxy(&self, to: &Uri) -> Option<Intercept> {
        self.matcher.as_ref()?.intercept(to).filter(|_| !self.is_exception(to))
    }

    /// The header for a proxy that gets the request itself: it makes no tunnel for `http://`.
    pub fn authorization(&self, to: &Uri) -> Option<HeaderValue> {
        let proxy = self.proxy(to).filter(|_| to.scheme_str() == Some("http"))?;
        proxy.basic_auth().cloned()
    }

    fn is_exception(&self, to: &Uri) -> bool {
        self.exceptions.iter().any(|(port, matcher)| {
            port.is_none_or(|port| port == port_of(to)) && matcher.intercept(to).is_none()
        })
    }
}

/// An entry of `no_proxy`: a network, an address, or a domain, which can begin with `.` or `*.`; an
/// address or domain can have a port.
fn exception(entry: &str) -> (Option<u16>, Matcher) {
    let whole = (entry.trim_start_matches('*'), None);
    let (host, port) = match entry.rsplit_once(':') {
        // More colons are those of an address of IPv6.
        Some((host, port)) if !host.contains(':') || host.ends_with(']') => {
            port.parse().map_or(whole, |port| (host.trim_start_matches('*'), Some(port)))
        }
        _ => whole,
    };
    let host = host.trim_matches(['[', ']']);
    (port, Matcher::builder().all("http://proxy.invalid").no(host).build())
}

fn port_of(to: &Uri) -> u16 {
    to.port_u16().unwrap_or(if to.scheme_str() == Some("https") { 443 } else { 80 })
}

/// The message for a proxy that cannot be used.
fn unusable_proxy((name, value): (&str, String)) -> Option<String> {
    let (scheme, _) = value.split_once("://")?;
    // URIs have `socks` in lower case only.
    let is_http = ["http", "https"].iter().any(|http| scheme.eq_ignore_ascii_case(http));
    let is_usable = is_http || PROXY_SCHEMES.contains(&scheme);
    (!is_usable).then(|| {
        let expected = PROXY_SCHEMES.join(", ");
        format!("{name} names a proxy with `{scheme}://`: expected one of {expected}")
    })
}

/// An error of a connector.
pub type BoxError = Box<dyn StdError + Send + Sync>;
/// Connects by TCP.
pub type TcpConnector = HttpConnector<ServiceFn<fn(Name) -> LookedUp>>;
type LookedUp = Pin<Box<dyn Future<Output = io::Result<vec::IntoIter<SocketAddr>>> + Send>>;
type PlainOrTls = MaybeHttpsStream<TokioIo<TcpStream>>;

/// Looks up names for [`TcpConnector`].
pub fn resolver() -> ServiceFn<fn(Name) -> LookedUp> {
    service_fn(|name| Box::pin(async move { Ok(lookup(name.as_str(), 0).await?.into_iter()) }))
}

/// Connects to a server, or to its proxy.
#[derive(Debug, Clone)]
pub struct ProxyConnector {
    pub proxies: Arc<Proxies>,
    pub http: TcpConnector,
    /// Connects to proxies, by TLS if they have `https://`.
    pub to_proxy: HttpsConnector<TcpConnector>,
}

impl ProxyConnector {
    /// The connection over which the server is reached.
    pub async fn connect(mut self, to: Uri) -> Result<ServerStream, BoxError> {
        let Some(proxy) = self.proxies.proxy(&to) else {
            return Ok(ServerStream { stream: self.http.call(to).await?.into(), is_proxy: false });
        };
        let (at, scheme) = (proxy.uri().clone(), to.scheme_str().unwrap_or("").to_owned());
        // Without a port, connectors of SOCKS take 443.
        let server = match at.scheme_str() {
            Some("socks4") => resolved(&to, SocketAddr::is_ipv4).await?,
            Some("socks5") => resolved(&to, |_| true).await?,
            _ => format!("{}:{}", to.host().unwrap_or(""), port_of(&to)),
        };
        let to: Uri = format!("{scheme}://{server}/").parse()?;
        let stream = match at.scheme_str() {
            Some("socks4" | "socks4a") => SocksV4::new(at, self.http).call(to).await?.into(),
            Some("socks5" | "socks5h") => {
                let mut socks = SocksV5::new(at, self.http);
                if let Some((user, password)) = proxy.raw_auth() {
                    socks = socks.with_auth(user.to_owned(), password.to_owned());
                }
                socks.call(to).await?.into()
            }
            _ => {
                let stream = self.to_proxy.call(at).await?;
                if scheme == "http" {
                    return Ok(ServerStream { stream, is_proxy: true });
                }
                tunnel(stream, &server, proxy.basic_auth()).await?
            }
        };
        Ok(ServerStream { stream, is_proxy: false })
    }
}

/// The address of a server, for proxies that do not look up names.
async fn resolved(to: &Uri, fits: impl Fn(&SocketAddr) -> bool) -> Result<String, BoxError> {
    let host = to.host().unwrap_or("").trim_matches(['[', ']']);
    let found = lookup(host, port_of(to)).await.map_err(|e| format!("dns error: {e}"))?;
    Ok(found.into_iter().find(fits).ok_or("dns error: no address of this kind")?.to_string())
}

/// Asks a proxy for a connection to a server.
pub async fn tunnel(
    stream: PlainOrTls,
    server: &str,
    auth: Option<&HeaderValue>,
) -> Result<PlainOrTls, BoxError> {
    let mut request = Request::connect(server).header(HOST, server);
    if let Some(auth) = auth {
        request = request.header("proxy-authorization", auth);
    }
    let (mut sender, connection) =
        http1::Builder::new().max_headers(MOST_HEADERS).handshake(stream).await?;
    tokio::spawn(connection.with_upgrades());
    let response = sender.send_request(request.body(String::new())?).await?;
    if response.status().is_success() {
        let upgraded = upgrade::on(response).await?.downcast::<PlainOrTls>();
        return Ok(upgraded.map_err(|_| "the proxy's connection is of another kind")?.io);
    }
    let mut response = reqwest::Response::from(response.map(Body::wrap));
    let (status, headers) = (response.status(), response.headers().clone());
    let body = read_beginning(&mut response, REFUSAL_TIME).await;
    let reason = ErrorDocument::read(&headers, &body);
    let what = format!("the proxy answered {status}{reason}");
    let mut failure = status_failure(status, &headers, what);
    // Busy or not: it may be the server that the proxy cannot reach.
    failure.repeat = failure.repeat.min(Repeat::Attempts);
    // It is not the refusal of the server, after which callers would look for another file, or not
    // use a local copy.
    failure.error = io::Error::new(io::ErrorKind::ConnectionAborted, failure.error.to_string());
    Err(Box::new(failure))
}

/// A connection to a server, or to the proxy that gets its requests.
pub struct ServerStream {
    stream: PlainOrTls,
    is_proxy: bool,
}

impl Connection for ServerStream {
    fn connected(&self) -> Connected {
        self.stream.connected().proxy(self.is_proxy)
    }
}

impl Read for ServerStream {
    fn poll_read(
        mut self: Pin<&mut Self>,
        context: &mut Context<'_>,
        buffer: ReadBufCursor<'_>,
    ) -> Poll<io::Result<()>> {
        Pin::new(&mut self.stream).poll_read(context, buffer)
    }
}

impl Write for ServerStream {
    fn poll_write(
        mut self: Pin<&mut Self>,
        context: &mut Context<'_>,
        bytes: &[u8],
    ) -> Poll<io::Result<usize>> {
        Pin::new(&mut self.stream).poll_write(context, bytes)
    }

    fn poll_write_vectored(
        mut self: Pin<&mut Self>,
        context: &mut Context<'_>,
        parts: &[IoSlice<'_>],
    ) -> Poll<io::Result<usize>> {
        Pin::new(&mut self.stream).poll_write_vectored(context, parts)
    }

    fn is_write_vectored(&self) -> bool {
        self.stream.is_write_vectored()
    }

    fn poll_flush(mut self: Pin<&mut Self>, context: &mut Context<'_>) -> Poll<io::Result<()>> {
        Pin::new(&mut self.stream).poll_flush(context)
    }

    fn poll_shutdown(mut self: Pin<&mut Self>, context: &mut Context<'_>) -> Poll<io::Result<()>> {
        Pin::new(&mut self.stream).poll_shutdown(context)
    }
}
