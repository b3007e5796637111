//! Refusals of servers: the reason that they give, and whether the request is repeated.

use std::fmt;
use std::io::ErrorKind;
use std::time::{Duration, SystemTime};

use reqwest::StatusCode;
use reqwest::header::{AsHeaderName, DATE, HeaderMap, HeaderName, LOCATION, RETRY_AFTER};
use serde_json::Value;

use super::failure::{Failure, Repeat, show_text};
use crate::error::Shortened;
use crate::sys::clock;

/// Texts of S3, Azure and others for expired credentials and signed URLs.
const EXPIRED: [&str; 7] = [
    "ExpiredToken",
    "RequestExpired",
    "TokenRefreshRequired",
    "Request has expired",
    "token has expired",
    "Signature not valid in the specified time frame",
    "Lifetime validation failed",
];
/// Headers with the code of a refusal: of Azure, and of Hugging Face's hub.
const CODE_FIELDS: [&str; 2] = ["x-ms-error-code", "x-error-code"];
/// The header with the message of the hub.
const MESSAGE_FIELD: &str = "x-error-message";
/// Header of the hub and others: the rules of requests, and the time until more are allowed.
const RATE_LIMIT: HeaderName = HeaderName::from_static("ratelimit");
/// Headers with the ids of a request, for which the support of a server asks.
const REQUEST_IDS: [&str; 6] = [
    "x-amz-request-id",
    "x-amz-id-2",
    "x-ms-request-id",
    "x-guploader-uploadid",
    "x-request-id",
    "cf-ray",
];
/// Names of the message in documents of JSON, and of its code.
const JSON_MESSAGES: [&str; 4] = ["message", "error_description", "error", "detail"];
const JSON_CODES: [&str; 3] = ["code", "status", "error"];

/// The reason of a refusal, as far as the response gives one.
#[derive(Debug, Default, PartialEq, Eq)]
pub struct ErrorDocument {
    pub code: Option<String>,
    pub message: Option<String>,
}

impl ErrorDocument {
    /// Reads the headers and the beginning of the body: XML as of S3, Google and Azure, JSON, or a
    /// line of text. Pages of HTML say nothing that the status does not.
    pub fn read(headers: &HeaderMap, body: &[u8]) -> Self {
        let text = String::from_utf8_lossy(body);
        let text = text.trim();
        let field = |name| header_text(headers, name).map(str::to_owned);
        let mut found = match text.chars().next() {
            Some('<') => Self::of_xml(text),
            Some('{' | '[') => {
                serde_json::from_str(text).map_or(ErrorDocument::default(), |of| Self::of_json(&of))
            }
            _ => {
                let line = text.lines().next().filter(|line| !line.contains('\u{fffd}'));
                ErrorDocument { code: None, message: line.map(str::to_owned) }
            }
        };
        found.code = found.code.or_else(|| CODE_FIELDS.into_iter().find_map(field));
        found.message = field(MESSAGE_FIELD).or(found.message);
        found
    }

    fn of_xml(text: &str) -> Self {
        let element = |name| xml_element(text, name).map(str::to_owned);
        // Azure says in a detail that a token has expired: after the first line, which is shown.
        let detail = element("AuthenticationErrorDetail").map(|detail| format!("\n{detail}"));
        let message = element("Message").map(|message| message + &detail.unwrap_or(String::new()));
        ErrorDocument { code: element("Code"), message }
    }

    fn of_json(document: &Value) -> Self {
        let first = |value: &Value| value.get(0).cloned();
        let inner = document.get("errors").and_then(first).or_else(|| first(document));
        let inner = inner.or_else(|| document.get("error").filter(|e| e.is_object()).cloned());
        let document = inner.as_ref().unwrap_or(document);
        let text = |name: &str| document.get(name)?.as_str().map(str::to_owned);
        let message = JSON_MESSAGES.into_iter().find_map(text);
        let code = JSON_CODES.into_iter().find_map(text).filter(|_| message.is_some());
        ErrorDocument { code: code.filter(|code| Some(code) != message.as_ref()), message }
    }

    /// True if it says that credentials, or the signature of a URL, have expired.
    pub fn says_expired(&self) -> bool {
        let texts = [&self.code, &self.message];
        texts.into_iter().flatten().any(|text| EXPIRED.iter().any(|part| text.contains(part)))
    }

    /// The same without texts that the request has as secrets.
    pub fn without(self, secrets: &[String]) -> Self {
        let [code, message] = [self.code, self.message].map(|text| Some(hide(text?, secrets)));
        ErrorDocument { code, message }
    }
}

/// The text of the first XML element of a name; None if there is none, or it is empty.
pub fn xml_element<'t>(text: &'t str, name: &str) -> Option<&'t str> {
    let (_, rest) = text.split_once(&format!("<{name}>"))?;
    let (found, _) = rest.split_once(&format!("</{name}>"))?;
    Some(found.trim()).filter(|found| !found.is_empty())
}

/// The value of a header, if it is text.
pub fn header_text(headers: &HeaderMap, name: impl AsHeaderName) -> Option<&str> {
    headers.get(name)?.to_str().ok()
}

/// A text without secrets.
pub fn hide(text: String, secrets: &[String]) -> String {
    secrets.iter().fold(text, |text, secret| text.replace(secret.as_str(), "..."))
}

impl fmt::Display for ErrorDocument {
    /// Its code and the first line of its message, each after a colon.
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        for text in [&self.code, &self.message].into_iter().flatten() {
            let line = text.lines().next().unwrap_or("");
            write!(f, ": {}", Shortened(&without_queries(line)))?;
        }
        Ok(())
    }
}

/// A text whose addresses have no queries, which may be signatures.
fn without_queries(text: &str) -> String {
    let words = text.split(' ').map(|word| match word.split_once('?') {
        Some((address, query)) if word.contains("://") && !query.is_empty() => {
            format!("{address}?...")
        }
        _ => word.to_owned(),
    });
    words.collect::<Vec<_>>().join(" ")
}

/// The failure that a status other than success means. `reason`: what the response gives as such.
pub fn status_failure(status: StatusCode, headers: &HeaderMap, what: String) -> Failure {
    let mut failure = match status {
        StatusCode::REQUEST_TIMEOUT
        | StatusCode::TOO_MANY_REQUESTS
        | StatusCode::SERVICE_UNAVAILABLE => {
            Failure::transient(ErrorKind::Other, what).with_repeat(Repeat::Time)
        }
        _ if status.is_server_error() => Failure::transient(ErrorKind::Other, what),
        StatusCode::NOT_FOUND | StatusCode::GONE => Failure::permanent(ErrorKind::NotFound, what),
        StatusCode::UNAUTHORIZED | StatusCode::FORBIDDEN => Failure::permanent(
            ErrorKind::PermissionDenied,
            what + "; check the credentials and that the address has not expired",
        ),
        StatusCode::PROXY_AUTHENTICATION_REQUIRED => Failure::permanent(
            ErrorKind::PermissionDenied,
            what + "; check the proxy's credentials",
        ),
        _ => {
            let to = headers.get(LOCATION).filter(|_| status.is_redirection());
            let to = to.map(|to| String::from_utf8_lossy(to.as_bytes()).into_owned());
            // A password or a signature may be in it.
            let to = to.filter(|to| !to.contains('@')).map_or(String::new(), |to| {
                format!("; it redirects to `{}`", Shortened(show_text(&to)))
            });
            Failure::permanent(ErrorKind::InvalidInput, what + &to)
        }
    };
    let text = format!("{failure}{}", request_ids(headers));
    failure = failure.with_text(text);
    failure.retry_after = asked_pause(headers).filter(|_| failure.repeat != Repeat::Never);
    failure.status = Some(status.as_u16());
    failure
}

/// The ids that a server has given to a request, for the end of a message; empty if there are none.
pub fn request_ids(headers: &HeaderMap) -> String {
    let id = |name: &&str| Some(format!("{name}: {}", Shortened(header_text(headers, *name)?)));
    let ids: Vec<_> = REQUEST_IDS.iter().filter_map(id).collect();
    if ids.is_empty() { String::new() } else { format!(" ({})", ids.join(", ")) }
}

/// The pause that the server asks for: seconds, a fraction of them, or a date, which is compared
/// with the server's own; or the time after which its limit of requests allows more.
fn asked_pause(headers: &HeaderMap) -> Option<Duration> {
    let text = |name| header_text(headers, name).map(str::trim);
    if let Some(asked) = text(RETRY_AFTER) {
        if let Ok(seconds) = asked.parse() {
            return Duration::try_from_secs_f64(seconds).ok();
        }
        let until = httpdate::parse_http_date(asked).ok()?;
        let now = text(DATE).and_then(|date| httpdate::parse_http_date(date).ok());
        let now: SystemTime = now.unwrap_or_else(clock::date);
        return Some(until.duration_since(now).unwrap_or(Duration::ZERO));
    }
    let parts = text(RATE_LIMIT)?.split([';', ',']);
    let seconds = parts.filter_map(|part| part.trim().strip_prefix("t=")?.parse().ok());
    seconds.max().map(Duration::from_secs)
}

#[cfg(test)]
mod tests {
    use super::*;

    fn headers(fields: &[(&'static str, &str)]) -> HeaderMap {
        let name = HeaderName::from_static;
        fields.iter().map(|(field, value)| (name(field), value.parse().unwrap())).collect()
    }

    #[test]
    fn reasons_of_every_kind_of_document_are_quoted() {
        for (fields, body, quoted) in [
            (
                &[][..],
                "<?xml?><Error><Code>A</Code><Message>It\nis not.</Message></Error>",
                ": A: It",
            ),
            (&[], "<Code>", ""),
            (&[], "</Code><Code>", ""),
            (&[], "<html><title>no</title></html>", ""),
            (&[], "", ""),
            (&[], r#"{"error": "too large"}"#, ": too large"),
            (
                &[],
                r#"{"error": {"code": 403, "message": "no", "status": "DENIED"}}"#,
                ": DENIED: no",
            ),
            (&[], r#"{"errors": [{"status": 403, "message": "blocked"}]}"#, ": blocked"),
            (&[], r#"{"error": "invalid_grant", "error_description": "x"}"#, ": invalid_grant: x"),
            (&[], "{broken", ""),
            (&[], "Your IP is not on the allow list\nof it", ": Your IP is not on the allow list"),
            (&[], "see https://host/a?sig=secret now", ": see https://host/a?... now"),
            (&[("x-ms-error-code", "BlobArchived")], "", ": BlobArchived"),
            (&[("x-error-message", "gated"), ("x-error-code", "G")], "{}", ": G: gated"),
        ] {
            let found = ErrorDocument::read(&headers(fields), body.as_bytes());
            assert_eq!(found.to_string(), quoted, "{body}");
        }
    }

    #[test]
    fn secrets_of_the_request_are_left_out() {
        let reason = ErrorDocument::read(&HeaderMap::new(), b"no user hu5hw0rd here");
        assert_eq!(reason.without(&["hu5hw0rd".to_owned()]).to_string(), ": no user ... here");
    }

    #[test]
    fn busy_servers_are_asked_by_time_and_broken_ones_by_attempts() {
        let of = |status: u16| {
            let status = StatusCode::from_u16(status).unwrap();
            status_failure(status, &HeaderMap::new(), String::new()).repeat
        };
        for status in [408, 429, 503] {
            assert_eq!(of(status), Repeat::Time, "{status}");
        }
        for status in [500, 502, 504] {
            assert_eq!(of(status), Repeat::Attempts, "{status}");
        }
        for status in [301, 400, 401, 403, 404, 407, 410, 412, 416] {
            assert_eq!(of(status), Repeat::Never, "{status}");
        }
    }

    #[test]
    fn a_redirect_that_is_not_followed_names_its_address() {
        let to = headers(&[("location", "https://host/x?signature=hu5hw0rd")]);
        let of = |status, headers: &HeaderMap| {
            status_failure(status, headers, "X".to_owned()).to_string()
        };
        let moved = StatusCode::MOVED_PERMANENTLY;
        assert_eq!(of(moved, &to), "X; it redirects to `https://host/x`");
        assert_eq!(of(moved, &headers(&[])), "X");
        assert_eq!(of(StatusCode::BAD_REQUEST, &to), "X");
    }

    #[test]
    fn pauses_are_asked_for_in_several_ways() {
        let date = "Sat, 21 Nov 2026 10:00:00 GMT";
        for (fields, seconds) in [
            (&[("retry-after", "7")][..], Some(7.0)),
            (&[("retry-after", "0.25")], Some(0.25)),
            (&[("retry-after", "Sat, 21 Nov 2026 10:00:06 GMT"), ("date", date)], Some(6.0)),
            (&[("retry-after", "Sat, 21 Nov 2026 09:00:00 GMT"), ("date", date)], Some(0.0)),
            (&[("retry-after", "-1")], None),
            (&[("retry-after", "soon")], None),
            (&[("ratelimit", "\"resolvers\";r=0;t=6")], Some(6.0)),
            (&[("ratelimit", "\"api\";r=0;t=5, \"x\";r=1;t=9"), ("retry-after", "2")], Some(2.0)),
            (&[("ratelimit", "limit=10")], None),
            (&[], None),
        ] {
            let found = asked_pause(&headers(fields)).map(|pause| pause.as_secs_f64());
            assert_eq!(found, seconds, "{fields:?}");
        }
    }
}
