//! Tests of proxies, and of the advice for failures of TLS.
#![allow(clippy::unwrap_used)]

use std::io::{self, ErrorKind};
use std::time::Duration;

use hyper::header::HeaderValue;
use hyper_util::rt::TokioIo;
use rustls::pki_types::UnixTime;
use rustls::{AlertDescription, CertificateError, Error, InvalidMessage};
use tokio::net::TcpStream;

use super::proxies::*;
use super::tls_failure::tls_failure;
use super::{Failure, Repeat};
use crate::environment::{CLIENT_CERT, CLIENT_KEY};

/// The proxies of these variables.
fn of(variables: &[(&str, &str)]) -> Proxies {
    Proxies::from_variables(|asked| {
        variables.iter().find(|(name, _)| *name == asked).map(|(_, to)| (*to).to_owned())
    })
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
    let https = "https://host/x".parse().unwrap();
    for good in ["", "host:1", "HTTP://host:1", "socks5h://host:1", "socks5://user:x@host"] {
        assert_eq!(of(&[("https_proxy", good)]).refusal(&https), None);
    }
    let bad = of(&[("https_proxy", "quic://user:hu5hw0rd@host")]);
    let what = bad.refusal(&https).unwrap();
    assert!(what.starts_with("https_proxy names a proxy with `quic://`"), "{what}");
    assert!(!what.contains("hu5hw0rd"));
    // For requests that do not use the proxy.
    assert_eq!(bad.refusal(&"http://host/x".parse().unwrap()), None);
}

#[test]
fn variables_mean_what_they_mean_in_python() {
    let proxy = |variables: &[(&str, &str)], url: &str| {
        let proxy = of(variables).proxy(&url.parse().unwrap());
        proxy.map(|proxy| proxy.uri().host().unwrap().to_owned())
    };
    let [http, https] = ["http://a.example.org:81/x", "https://10.1.2.3/x"];
    let p = Some("p".to_owned());
    // The lower-case one counts, even if it is empty.
    assert_eq!(proxy(&[("http_proxy", "p"), ("HTTP_PROXY", "q")], http), p);
    assert_eq!(proxy(&[("http_proxy", ""), ("HTTP_PROXY", "q")], http), None);
    assert_eq!(proxy(&[("HTTP_PROXY", "p")], http), p);
    // In a CGI script, a request may have set it.
    assert_eq!(proxy(&[("HTTP_PROXY", "p"), (CGI, "GET")], http), None);
    assert_eq!(proxy(&[("http_proxy", "p"), (CGI, "GET")], http), p);
    assert_eq!(proxy(&[("ALL_PROXY", "p")], https), p);
    for (hosts, found) in [
        ("example.org", [None, p.clone()]),
        (".example.org , 10.0.0.0/8", [None, None]),
        ("*.example.org", [None, p.clone()]),
        ("a.example.org:81,10.1.2.3:443", [None, None]),
        ("a.example.org:82,10.1.2.3:80", [p.clone(), p.clone()]),
        ("b.example.org ample.org 10.1.2.4", [p.clone(), p.clone()]),
        ("*", [None, None]),
        ("", [p.clone(), p.clone()]),
    ] {
        let variables = [("all_proxy", "p"), ("no_proxy", hosts), ("NO_PROXY", "*")];
        assert_eq!([http, https].map(|url| proxy(&variables, url)), found, "{hosts}");
    }
    for hosts in ["::1", "[::1]", "[::1]:80", "::/64"] {
        assert_eq!(proxy(&[("all_proxy", "p"), ("no_proxy", hosts)], "http://[::1]/"), None);
    }
}

#[test]
fn tunnels_are_opened_by_any_success_and_refused_with_a_reason() {
    let runtime = tokio::runtime::Builder::new_current_thread().enable_all().build().unwrap();
    let asked = |answer: String| {
        runtime.block_on(async {
            let listener = tokio::net::TcpListener::bind("127.0.0.1:0").await.unwrap();
            let proxy = TcpStream::connect(listener.local_addr().unwrap()).await.unwrap();
            let (server, _) = listener.accept().await.unwrap();
            server.writable().await.unwrap();
            server.try_write(answer.as_bytes()).unwrap();
            let auth = HeaderValue::from_static("Basic eA==");
            let opened = tunnel(TokioIo::new(proxy).into(), "host:443", Some(&auth)).await;
            let mut request = [0; 4096];
            let len = server.try_read(&mut request).unwrap();
            let request = String::from_utf8_lossy(request.get(..len).unwrap()).to_lowercase();
            assert!(request.starts_with("connect host:443 http/1.1\r\nhost: host:443\r\n"));
            assert!(request.contains("proxy-authorization: basic ea=="), "{request}");
            opened.map(drop).map_err(|error| error.downcast::<Failure>().unwrap())
        })
    };
    asked("HTTP/1.1 200 Connection established\r\n\r\n".to_owned()).unwrap();
    asked("HTTP/1.1 201 Created\r\nContent-Length: 9\r\n\r\n".to_owned()).unwrap();
    let long = format!("X-Policy: {}\r\n", "x".repeat(500)).repeat(200);
    asked(format!("HTTP/1.0 200 OK\r\n{long}\r\n")).unwrap();
    for (status, repeat) in [(403, Repeat::Never), (407, Repeat::Never), (503, Repeat::Attempts)] {
        let answer = format!("HTTP/1.1 {status} X\r\nContent-Length: 6\r\n\r\npolicy");
        let failure = asked(answer).unwrap_err();
        let what = failure.to_string();
        assert!(what.starts_with(&format!("the proxy answered {status} ")), "{what}");
        assert!(what.contains(": policy"), "{what}");
        assert_eq!((failure.status, failure.repeat), (Some(status), repeat));
    }
}

#[test]
fn advice_follows_the_error() {
    let [noon, one] =
        [43_200, 46_800].map(|at| UnixTime::since_unix_epoch(Duration::from_secs(at)));
    let names = |presented: &[&str]| CertificateError::NotValidForNameContext {
        expected: "localhost".try_into().unwrap(),
        presented: presented.iter().map(|name| (*name).to_owned()).collect(),
    };
    let not_after = CertificateError::ExpiredContext { time: one, not_after: noon };
    let not_before = CertificateError::NotValidYetContext { time: noon, not_before: one };
    let peer = rustls::PeerIncompatible::NoCipherSuitesInCommon;
    for (error, parts) in [
        (
            not_after.into(),
            ["expired on Thu, 01 Jan 1970 12:00:00 GMT", "says Thu, 01 Jan 1970 13"],
        ),
        (
            not_before.into(),
            ["valid from Thu, 01 Jan 1970 13:00:00 GMT", "says Thu, 01 Jan 1970 12"],
        ),
        (names(&["a.example"]).into(), ["a.example", "use a name in the address"]),
        (names(&[]).into(), ["localhost", "no name that could be compared"]),
        (CertificateError::UnknownIssuer.into(), ["not trusted", "; HINT, or the server"]),
        (CertificateError::BadSignature.into(), ["not trusted", "needs another certificate"]),
        (Error::InvalidMessage(InvalidMessage::InvalidContentType), ["not use TLS", "http://"]),
        (Error::PeerIncompatible(peer), ["no protocol or cipher", "TLS 1.2"]),
        (Error::AlertReceived(AlertDescription::ProtocolVersion), ["cipher", "TLS 1.2"]),
        (Error::AlertReceived(AlertDescription::HandshakeFailure), ["cipher", CLIENT_CERT.name]),
        (
            Error::AlertReceived(AlertDescription::CertificateRequired),
            ["this client", CLIENT_KEY.name],
        ),
    ] {
        let carried = io::Error::other(io::Error::new(ErrorKind::InvalidData, error));
        let failure = tls_failure(&carried, "HINT").unwrap();
        assert_eq!(failure.repeat, Repeat::Never);
        for part in parts {
            assert!(failure.to_string().contains(part), "{failure}: {part}");
        }
    }
    for error in [Error::DecryptError, Error::AlertReceived(AlertDescription::InternalError)] {
        assert!(tls_failure(&io::Error::other(error), "HINT").is_none());
    }
    assert!(tls_failure(&io::Error::other("certificate"), "HINT").is_none());
}
