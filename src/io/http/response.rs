//! Responses, and their checks against the request.

use std::io::ErrorKind;

use reqwest::header::{
    ACCEPT_RANGES, CONTENT_ENCODING, CONTENT_LENGTH, CONTENT_RANGE, ETAG, HeaderMap, HeaderName,
    HeaderValue, LAST_MODIFIED,
};
use reqwest::{Response, StatusCode, Version};

use crate::error::Error;
use crate::io::CachedHead;
use crate::io::transport::{Failure, status_failure};

/// Bytes from `start` up to `end`, which is excluded.
#[derive(Debug, Clone, Copy)]
pub struct ByteRange {
    pub start: u64,
    pub end: u64,
}

impl ByteRange {
    /// The value of the `ByteRange` field.
    pub fn header_value(self) -> String {
        format!("bytes={}-{}", self.start, self.end.saturating_sub(1))
    }
}

/// Size, `ETag` and date of a file, which show if it changes between requests.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Validators {
    /// Bytes of the file, where that is known.
    pub len: Option<u64>,
    pub tag: Option<String>,
    pub modified: Option<String>,
}

/// The response to the first request.
pub struct FirstResponse {
    /// True if the server has sent the requested range.
    pub has_ranges: bool,
    /// True if the cached copy is current, so there is no body.
    pub not_modified: bool,
    /// Length of its body, if the response states it.
    pub len: Option<u64>,
    pub validators: Validators,
    pub headers: Vec<(String, String)>,
    /// True if the server sends ahead by HTTP/2; None without a request.
    pub sends_ahead: Option<bool>,
}

impl FirstResponse {
    /// The first response, rebuilt from a cached head. A head that contradicts itself is an error.
    pub fn cached(head: &CachedHead) -> crate::error::Result<Self> {
        let found = head.first.len() as u64;
        if found > head.len {
            return Err(Error::InvalidArgument(format!(
                "the cached header of `{}` is invalid: expected at most the {} bytes of the file, \
                 found {found}",
                head.uri, head.len
            )));
        }
        let (tag, modified) = (head.tag.clone(), head.modified.clone());
        let validators = Validators { len: Some(head.len), tag, modified };
        Ok(FirstResponse {
            has_ranges: true,
            not_modified: false,
            len: Some(found),
            validators,
            headers: head.headers.clone(),
            sends_ahead: None,
        })
    }
}

impl FirstResponse {
    /// Completes the response 304, which states that a cached copy of this size and `ETag` is
    /// current. Another `ETag` is a failure, after which the request is repeated without the
    /// condition.
    pub fn confirm_copy(&mut self, copy: Option<(u64, &str)>) -> Result<(), Failure> {
        let Some((len, tag)) = copy else {
            let what = "the server answered 304 Not Modified to a request without If-None-Match";
            return Err(Failure::permanent(ErrorKind::InvalidData, what));
        };
        if self.validators.tag.as_deref().is_some_and(|found| found != tag) {
            let what = "the server answered 304 Not Modified with another ETag than that of \
                        If-None-Match";
            return Err(Failure::transient(ErrorKind::InvalidData, what).if_renewable(true));
        }
        self.validators.len = Some(len);
        self.validators.tag = Some(tag.to_owned());
        // Headers of the file that such a response leaves out.
        let fields = [
            (ETAG, tag.to_owned()),
            (CONTENT_LENGTH, len.to_string()),
            (ACCEPT_RANGES, "bytes".to_owned()),
        ];
        for (name, value) in fields {
            if !self.headers.iter().any(|(found, _)| *found == name.as_str()) {
                self.headers.push((name.as_str().to_owned(), value));
            }
        }
        Ok(())
    }
}

fn header_text(headers: &HeaderMap, name: &HeaderName) -> Option<String> {
    headers.get(name).and_then(|value| value.to_str().ok()).map(str::to_owned)
}

/// The text of an `ETag`. Other bytes than those of ASCII are allowed in it, and tell versions apart.
fn tag_text(value: &HeaderValue) -> String {
    value.as_bytes().iter().map(|&byte| char::from(byte)).collect()
}

/// `(start, end, total)` of a `Content-ByteRange` field.
fn content_range(headers: &HeaderMap) -> Option<(u64, u64, Option<u64>)> {
    let field = header_text(headers, &CONTENT_RANGE)?;
    let (range, total) = field.strip_prefix("bytes ")?.split_once('/')?;
    let (first, last) = range.split_once('-')?;
    let end = last.trim().parse::<u64>().ok()?.checked_add(1)?;
    Some((first.trim().parse().ok()?, end, total.trim().parse().ok()))
}

fn content_length(headers: &HeaderMap) -> Option<u64> {
    header_text(headers, &CONTENT_LENGTH)?.trim().parse().ok()
}

/// Fails for a status other than success.
pub fn check_status(response: &Response) -> Result<(), Failure> {
    let status = response.status();
    if status.is_success() {
        let headers = response.headers();
        return match header_text(headers, &CONTENT_ENCODING).filter(|coding| coding != "identity") {
            Some(coding) => Err(Failure::permanent(
                ErrorKind::InvalidData,
                format!(
                    "the server sent the file with Content-Encoding {coding}, expected none \
                     (identity)"
                ),
            )),
            None => Ok(()),
        };
    }
    Err(status_failure(status, response.headers(), format!("the server answered {status}")))
}

/// True if a server refuses a range, or the `ETag` of a request, so it may have another file.
pub fn may_be_another_file(response: &Response) -> bool {
    let status = response.status();
    matches!(status, StatusCode::PRECONDITION_FAILED | StatusCode::RANGE_NOT_SATISFIABLE)
}

impl Validators {
    fn of(headers: &HeaderMap, len: Option<u64>) -> Self {
        Validators {
            len,
            tag: headers.get(ETAG).map(tag_text),
            modified: header_text(headers, &LAST_MODIFIED),
        }
    }

    /// The `ETag` for conditional requests: a strong one, which identifies the bytes, and which a
    /// request can hold. Dates are not sent, because the machines of a server may have different ones.
    pub fn strong_tag(&self) -> Option<&str> {
        self.tag.as_deref().filter(|tag| !tag.starts_with("W/") && tag.is_ascii())
    }

    /// Checks that a response holds exactly the range, of the file that was opened.
    pub fn check(&self, response: &Response, wanted: ByteRange) -> Result<(), Failure> {
        self.check_status(response)?;
        let headers = response.headers();
        if response.status() != StatusCode::PARTIAL_CONTENT {
            // The page of a proxy, or a server that no longer supports ranges.
            let what = format!(
                "expected 206 Partial Content with bytes {} to {}, the server answered {} without \
                 a range",
                wanted.start,
                wanted.end,
                response.status()
            );
            return Err(Failure::transient(ErrorKind::InvalidData, what));
        }
        let Some((start, end, len)) = content_range(headers) else {
            return Err(Failure::transient(
                ErrorKind::InvalidData,
                "the server's 206 response has no valid Content-Range header",
            ));
        };
        self.check_same(&Validators::of(headers, len.or(self.len)))?;
        let stated = content_length(headers).unwrap_or(end.saturating_sub(start));
        if (start, end) != (wanted.start, wanted.end) || stated != end - start {
            let what = format!(
                "expected bytes {} to {}, the server sent {start} to {end} in a body of {stated} \
                 bytes",
                wanted.start, wanted.end
            );
            return Err(Failure::transient(ErrorKind::InvalidData, what));
        }
        Ok(())
    }

    /// Checks a whole file's response against the first one.
    pub fn check_whole(&self, response: &Response) -> Result<(), Failure> {
        self.check_status(response)?;
        let len = content_length(response.headers()).or(self.len);
        self.check_same(&Validators::of(response.headers(), len))
    }

    fn check_status(&self, response: &Response) -> Result<(), Failure> {
        if let Some(tag) = self.strong_tag()
            && response.status() == StatusCode::PRECONDITION_FAILED
        {
            let what = format!("the file changed since it was opened: its ETag was {tag}");
            return Err(Failure::permanent(ErrorKind::InvalidData, what));
        }
        check_status(response)
    }

    /// Fails if the first response of another request is about another file, and says what differs.
    pub fn check_first(&self, response: &Response, wanted: ByteRange) -> Result<(), Failure> {
        self.check_same(&parse_first(response, wanted)?.validators)
    }

    fn check_same(&self, found: &Validators) -> Result<(), Failure> {
        let bytes = |len: Option<u64>| len.map(|len| format!("{len} bytes"));
        let facts = [
            ("ETag", self.tag.clone(), found.tag.clone()),
            ("Last-Modified", self.modified.clone(), found.modified.clone()),
            ("size", bytes(self.len), bytes(found.len)),
        ];
        let same =
            |before: &Option<String>, now: &Option<String>| before.is_some() && before == now;
        let proven = same(&self.tag, &found.tag) || same(&self.modified, &found.modified);
        let mut differences = Vec::new();
        for (what, before, now) in &facts {
            match (before, now) {
                (Some(before), Some(now)) if before != now => {
                    differences.push(format!("its {what} was {before}, is {now}"));
                }
                (None, Some(now)) if *what != "size" && !proven => {
                    differences.push(format!("it had no {what}, has {now}"));
                }
                // Another machine of the server may send this header again.
                (Some(before), None) if differences.is_empty() => {
                    let what = format!(
                        "the file may have changed since it was opened: the first response had the \
                         {what} {before}, a later one has none"
                    );
                    return Err(Failure::transient(ErrorKind::InvalidData, what));
                }
                _ => {}
            }
        }
        if differences.is_empty() {
            return Ok(());
        }
        let what = format!("the file changed since it was opened: {}", differences.join("; "));
        Err(Failure::permanent(ErrorKind::InvalidData, what))
    }
}

/// Reads the response to the first request.
pub fn parse_first(response: &Response, wanted: ByteRange) -> Result<FirstResponse, Failure> {
    let headers = response.headers();
    let found = |has_ranges: bool, body: Option<u64>, size: Option<u64>| FirstResponse {
        has_ranges,
        not_modified: response.status() == StatusCode::NOT_MODIFIED,
        len: body,
        validators: Validators::of(headers, size),
        headers: headers
            .iter()
            .filter_map(|(name, value)| Some((name.to_string(), value.to_str().ok()?.to_owned())))
            .collect(),
        sends_ahead: Some(response.version() == Version::HTTP_2),
    };
    match response.status() {
        // The response has no size; that of the cached copy is used.
        StatusCode::NOT_MODIFIED => return Ok(found(true, Some(0), None)),
        // Only an empty file has no first byte.
        StatusCode::RANGE_NOT_SATISFIABLE => return Ok(found(true, Some(0), Some(0))),
        _ => check_status(response)?,
    }
    if response.status() != StatusCode::PARTIAL_CONTENT {
        let len = content_length(headers);
        return Ok(found(false, len, len));
    }
    let what = match content_range(headers) {
        Some((0, end, Some(len))) if end == wanted.end.min(len) => {
            return Ok(found(true, Some(end), Some(len)));
        }
        // A range without a total length, or another range than the requested one.
        Some(_) => format!(
            "the request was for {}, but the server's Content-Range is {:?}",
            wanted.header_value(),
            header_text(headers, &CONTENT_RANGE)
        ),
        None => "the server's 206 response has no valid Content-Range header".to_owned(),
    };
    Err(Failure::transient(ErrorKind::InvalidData, what))
}

#[cfg(test)]
#[allow(clippy::unwrap_used)]
mod tests {
    use super::*;

    fn not_modified_response(tag: Option<&str>) -> FirstResponse {
        let validators = Validators {
            len: None,
            tag: tag.map(str::to_owned),
            modified: Some("then".to_owned()),
        };
        FirstResponse {
            has_ranges: true,
            not_modified: true,
            len: Some(0),
            validators,
            headers: vec![("etag".to_owned(), "\"x\"".to_owned())],
            sends_ahead: None,
        }
    }

    #[test]
    fn validators_of_another_kind_mean_another_version() {
        let validators = |tag: Option<&str>, modified: Option<&str>| Validators {
            len: Some(7),
            tag: tag.map(str::to_owned),
            modified: modified.map(str::to_owned),
        };
        let (none, tagged) = (validators(None, None), validators(Some("x"), None));
        let (dated, both) = (validators(None, Some("then")), validators(Some("x"), Some("then")));
        for (first, later) in [(&none, &tagged), (&none, &dated), (&none, &both), (&dated, &tagged)]
        {
            let failure = format!("{:?}", first.check_same(later).unwrap_err());
            assert!(
                failure.contains("the file changed since it was opened: it had no"),
                "{failure}"
            );
        }
        for (first, later) in [(&none, &none), (&dated, &both), (&tagged, &both), (&both, &both)] {
            first.check_same(later).unwrap();
        }
        let unsized_file = Validators { len: None, ..none.clone() };
        unsized_file.check_same(&none).unwrap();
    }

    #[test]
    fn cached_copy_is_confirmed_by_its_own_etag_only() {
        for tag in [None, Some("\"x\"")] {
            let mut first = not_modified_response(tag);
            first.confirm_copy(Some((7, "\"x\""))).unwrap();
            assert_eq!(
                (first.validators.len, first.validators.tag.as_deref()),
                (Some(7), Some("\"x\""))
            );
            assert_eq!(first.headers.iter().filter(|(name, _)| name == "etag").count(), 1);
            assert!(first.headers.contains(&("content-length".to_owned(), "7".to_owned())));
        }
        for tag in ["W/\"x\"", "\"y\""] {
            let failure =
                not_modified_response(Some(tag)).confirm_copy(Some((7, "\"x\""))).unwrap_err();
            assert!(format!("{failure:?}").contains("renewable: true"), "{failure:?}");
        }
        assert!(not_modified_response(None).confirm_copy(None).is_err());
    }
}
