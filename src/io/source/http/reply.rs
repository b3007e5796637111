//! What a response says about itself, checked against what was asked for.

use std::io::ErrorKind;
use std::time::Duration;

use reqwest::header::{
    CONTENT_ENCODING, CONTENT_LENGTH, CONTENT_RANGE, ETAG, HeaderMap, HeaderName, LAST_MODIFIED,
    RETRY_AFTER,
};
use reqwest::{Response, StatusCode, Version};

use crate::error::Error;
use crate::io::net::Failure;
use crate::io::source::KnownHead;

/// What S3, Azure and their like say of credentials and addresses that have expired.
const EXPIRED: [&str; 7] = [
    "ExpiredToken",
    "RequestExpired",
    "TokenRefreshRequired",
    "Request has expired",
    "token has expired",
    "Signature not valid in the specified time frame",
    "Lifetime validation failed",
];

/// Bytes `start` to `end`, the latter not included.
#[derive(Debug, Clone, Copy)]
pub struct Range {
    pub start: u64,
    pub end: u64,
}

impl Range {
    /// The value of the `Range` field.
    pub fn field(self) -> String {
        format!("bytes={}-{}", self.start, self.end.saturating_sub(1))
    }
}

/// What must stay the same from request to request.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Identity {
    /// Bytes of the file, where that is known.
    pub len: Option<u64>,
    pub tag: Option<String>,
    pub modified: Option<String>,
}

/// The first response.
pub struct First {
    /// Whether the server answered with the range asked for.
    pub ranges: bool,
    /// How many bytes its body has, where it says so.
    pub len: Option<u64>,
    pub identity: Identity,
    pub headers: Vec<(String, String)>,
    /// Whether the server sends ahead by HTTP/2; None where it was not asked.
    pub ahead: Option<bool>,
}

impl First {
    /// The response that another opening got. A head that cannot be of its file is the error.
    pub fn known(head: &KnownHead) -> crate::error::Result<Self> {
        let found = head.first.len() as u64;
        if found > head.len {
            return Err(Error::InvalidArgument(format!(
                "the known head of `{}`: expected at most the {} bytes of the file, found {found}",
                head.uri, head.len
            )));
        }
        let (tag, modified) = (head.tag.clone(), head.modified.clone());
        let identity = Identity { len: Some(head.len), tag, modified };
        Ok(First {
            ranges: true,
            len: Some(found),
            identity,
            headers: head.headers.clone(),
            ahead: None,
        })
    }
}

fn text(headers: &HeaderMap, name: &HeaderName) -> Option<String> {
    headers.get(name).and_then(|value| value.to_str().ok()).map(str::to_owned)
}

/// `(start, end, total)` of a `Content-Range` field.
fn content_range(headers: &HeaderMap) -> Option<(u64, u64, Option<u64>)> {
    let field = text(headers, &CONTENT_RANGE)?;
    let (range, total) = field.strip_prefix("bytes ")?.split_once('/')?;
    let (first, last) = range.split_once('-')?;
    let end = last.trim().parse::<u64>().ok()?.checked_add(1)?;
    Some((first.trim().parse().ok()?, end, total.trim().parse().ok()))
}

fn length(headers: &HeaderMap) -> Option<u64> {
    text(headers, &CONTENT_LENGTH)?.trim().parse().ok()
}

/// Refuses what is not a success.
pub fn check_status(response: &Response) -> Result<(), Failure> {
    let status = response.status();
    if status.is_success() {
        let headers = response.headers();
        return match text(headers, &CONTENT_ENCODING).filter(|coding| coding != "identity") {
            Some(coding) => Err(Failure::lasting(
                ErrorKind::InvalidData,
                format!("the server compressed the file ({coding}), although it was asked not to"),
            )),
            None => Ok(()),
        };
    }
    Err(refusal(status, response.headers(), format!("the server answered {status}")))
}

/// Whether a refusal of S3 means that credentials, or the signature of an address, have expired.
pub fn says_expired(said: &[u8]) -> bool {
    let said = String::from_utf8_lossy(said);
    EXPIRED.iter().any(|text| said.contains(text))
}

/// Whether a server refuses a range, or the tag that was sent along, as of another file than it has.
pub fn is_of_another(response: &Response) -> bool {
    let status = response.status();
    matches!(status, StatusCode::PRECONDITION_FAILED | StatusCode::RANGE_NOT_SATISFIABLE)
}

/// What a status that is no success means.
pub fn refusal(status: StatusCode, headers: &HeaderMap, what: String) -> Failure {
    match status {
        StatusCode::NOT_FOUND | StatusCode::GONE => Failure::lasting(ErrorKind::NotFound, what),
        StatusCode::UNAUTHORIZED | StatusCode::FORBIDDEN => Failure::lasting(
            ErrorKind::PermissionDenied,
            what + "; check the credentials and that the address has not expired",
        ),
        StatusCode::PROXY_AUTHENTICATION_REQUIRED => {
            Failure::lasting(ErrorKind::PermissionDenied, what + "; check the proxy's credentials")
        }
        StatusCode::REQUEST_TIMEOUT | StatusCode::TOO_MANY_REQUESTS => {
            Failure::passing(ErrorKind::Other, what).not_before(retry_after(headers))
        }
        _ if status.is_server_error() => {
            Failure::passing(ErrorKind::Other, what).not_before(retry_after(headers))
        }
        _ => Failure::lasting(ErrorKind::Other, what),
    }
}

/// Seconds only: servers that name a date are retried by our own clock.
fn retry_after(headers: &HeaderMap) -> Option<Duration> {
    text(headers, &RETRY_AFTER)?.trim().parse().ok().map(Duration::from_secs)
}

impl Identity {
    fn of(headers: &HeaderMap, len: Option<u64>) -> Self {
        Identity { len, tag: text(headers, &ETAG), modified: text(headers, &LAST_MODIFIED) }
    }

    /// The tag that says that a file is the same byte for byte, to be sent along. Weak ones must
    /// not be, and dates are not: a server may send another date from each of its machines.
    pub fn strong_tag(&self) -> Option<&str> {
        self.tag.as_deref().filter(|tag| !tag.starts_with("W/"))
    }

    /// Checks that a response holds exactly the range, of the file that was opened.
    pub fn check(&self, response: &Response, wanted: Range) -> Result<(), Failure> {
        self.check_status(response)?;
        let headers = response.headers();
        if response.status() != StatusCode::PARTIAL_CONTENT {
            // A proxy's page, or a server that has lost its ranges: its body is not what we want.
            let what = format!(
                "expected bytes {} to {}, the server answered {} without a range",
                wanted.start,
                wanted.end,
                response.status()
            );
            return Err(Failure::passing(ErrorKind::InvalidData, what));
        }
        let Some((start, end, len)) = content_range(headers) else {
            return Err(Failure::passing(
                ErrorKind::InvalidData,
                "the server's answer does not say which range it holds",
            ));
        };
        self.check_same(&Identity::of(headers, len.or(self.len)))?;
        let stated = length(headers).unwrap_or(end.saturating_sub(start));
        if (start, end) != (wanted.start, wanted.end) || stated != end - start {
            let what = format!(
                "expected bytes {} to {}, the server sent {start} to {end} in a body of {stated}",
                wanted.start, wanted.end
            );
            return Err(Failure::passing(ErrorKind::InvalidData, what));
        }
        Ok(())
    }

    /// Checks a whole file's response against the first one.
    pub fn check_whole(&self, response: &Response) -> Result<(), Failure> {
        self.check_status(response)?;
        let len = length(response.headers()).or(self.len);
        self.check_same(&Identity::of(response.headers(), len))
    }

    fn check_status(&self, response: &Response) -> Result<(), Failure> {
        if let Some(tag) = self.strong_tag()
            && response.status() == StatusCode::PRECONDITION_FAILED
        {
            let what = format!("the file changed since it was opened: its ETag was {tag}");
            return Err(Failure::lasting(ErrorKind::InvalidData, what));
        }
        check_status(response)
    }

    /// What differs from the file that the server has, as its answer to a first request says.
    pub fn check_first(&self, response: &Response, wanted: Range) -> Result<(), Failure> {
        self.check_same(&first(response, wanted)?.identity)
    }

    fn check_same(&self, found: &Identity) -> Result<(), Failure> {
        let bytes = |len: Option<u64>| len.map(|len| format!("{len} bytes"));
        let facts = [
            ("ETag", self.tag.clone(), found.tag.clone()),
            ("Last-Modified", self.modified.clone(), found.modified.clone()),
            ("size", bytes(self.len), bytes(found.len)),
        ];
        let mut others = Vec::new();
        for (what, before, now) in &facts {
            match (before, now) {
                (Some(before), Some(now)) if before != now => {
                    others.push(format!("its {what} was {before}, is {now}"));
                }
                // Nobody knows which file it is. Another machine of the server may say it.
                (Some(before), None) if others.is_empty() => {
                    let what = format!(
                        "the file may have changed since it was opened: the first answer had the \
                         {what} {before}, and another has none"
                    );
                    return Err(Failure::passing(ErrorKind::InvalidData, what));
                }
                _ => {}
            }
        }
        if others.is_empty() {
            return Ok(());
        }
        let what = format!("the file changed since it was opened: {}", others.join("; "));
        Err(Failure::lasting(ErrorKind::InvalidData, what))
    }
}

/// Reads what the response to the first request says.
pub fn first(response: &Response, wanted: Range) -> Result<First, Failure> {
    let headers = response.headers();
    let ahead = Some(response.version() == Version::HTTP_2);
    let all = headers
        .iter()
        .filter_map(|(name, value)| Some((name.to_string(), value.to_str().ok()?.to_owned())))
        .collect();
    if response.status() == StatusCode::RANGE_NOT_SATISFIABLE {
        // Only an empty file has no first byte.
        let identity = Identity::of(headers, Some(0));
        return Ok(First { ranges: true, len: Some(0), identity, headers: all, ahead });
    }
    check_status(response)?;
    let ranged = response.status() == StatusCode::PARTIAL_CONTENT;
    match content_range(headers).filter(|_| ranged) {
        Some((0, end, Some(len))) if end == wanted.end.min(len) => {
            let identity = Identity::of(headers, Some(len));
            Ok(First { ranges: true, len: Some(end), identity, headers: all, ahead })
        }
        // A range without a total, or another range than was asked for.
        Some(_) => Err(Failure::passing(
            ErrorKind::InvalidData,
            format!(
                "asked for {}, the server's Content-Range is {:?}",
                wanted.field(),
                text(headers, &CONTENT_RANGE)
            ),
        )),
        None if ranged => Err(Failure::passing(
            ErrorKind::InvalidData,
            "the server's answer does not say which range it holds",
        )),
        None => {
            let identity = Identity::of(headers, length(headers));
            Ok(First { ranges: false, len: identity.len, identity, headers: all, ahead })
        }
    }
}
