//! The first response of a server.

use std::io::ErrorKind;

use reqwest::header::{ACCEPT_RANGES, CONTENT_LENGTH, CONTENT_RANGE, ETAG, HeaderValue};
use reqwest::{Response, StatusCode, Version};

use super::fields::{ByteRange, UNASKED, check_coding, content_length, content_range};
use super::validators::Validators;
use crate::io::transport::{Failure, header_text};

/// The response to the first request.
pub struct FirstResponse {
    /// True if the server has sent the requested range.
    pub has_ranges: bool,
    pub validators: Validators,
    pub headers: Vec<(String, String)>,
    /// True if the server sends ahead by HTTP/2; None without a request.
    pub sends_ahead: Option<bool>,
}

impl FirstResponse {
    /// Completes the response 304, which states that a cached copy of this size and `ETag` is
    /// current. Another `ETag` is a failure, after which the request is repeated without the
    /// condition.
    pub fn confirm_copy(&mut self, copy: Option<(u64, &str)>) -> Result<(), Failure> {
        let Some((len, tag)) = copy else {
            return Err(Failure::permanent(ErrorKind::InvalidData, UNASKED));
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

/// The first response or, if the server's responses to ranges are not as they have to be, how.
type First = Result<FirstResponse, String>;

/// Reads the response to the first request, for a range or, if that is None, for the whole file.
pub fn parse_first(response: &Response, wanted: Option<ByteRange>) -> Result<First, Failure> {
    let (status, headers) = (response.status(), response.headers());
    let found = |has_ranges: bool, size: Option<u64>| {
        let text = |value: &HeaderValue| value.to_str().ok().map(str::to_owned);
        let fields = headers.iter();
        Ok(Ok(FirstResponse {
            has_ranges,
            validators: Validators::of(headers, size),
            headers: fields.filter_map(|(name, of)| Some((name.to_string(), text(of)?))).collect(),
            sends_ahead: Some(response.version() == Version::HTTP_2),
        }))
    };
    if !matches!(status, StatusCode::NOT_MODIFIED | StatusCode::RANGE_NOT_SATISFIABLE) {
        check_coding(response)?;
    }
    match (status, content_range(headers), wanted) {
        // The response has no size; that of the cached copy is used.
        (StatusCode::NOT_MODIFIED, ..) => found(true, None),
        // Only an empty file has no first byte.
        (StatusCode::RANGE_NOT_SATISFIABLE, Some((None, Some(0))), _) => found(true, Some(0)),
        (StatusCode::RANGE_NOT_SATISFIABLE, Some((_, Some(len))), Some(range))
            if range.start < len =>
        {
            let what = format!("the server answered {status} though the file has {len} bytes");
            Err(Failure::transient(ErrorKind::InvalidData, what))
        }
        (StatusCode::PARTIAL_CONTENT, Some((Some((0, end)), Some(len))), Some(wanted))
            if end == wanted.end.min(len) =>
        {
            found(true, Some(len))
        }
        // No range, one without a total length, another one than that of the request, or a part of
        // the file as if it were the whole.
        (StatusCode::RANGE_NOT_SATISFIABLE | StatusCode::PARTIAL_CONTENT, ..) | (_, Some(_), _) => {
            Ok(Err(match header_text(headers, CONTENT_RANGE) {
                Some(field) => format!("{status} with the Content-Range {field:?}"),
                None => format!("{status} without a valid Content-Range"),
            }))
        }
        _ => found(false, content_length(headers)),
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn not_modified_response(tag: Option<&str>) -> FirstResponse {
        let validators = Validators {
            len: None,
            tag: tag.map(str::to_owned),
            modified: Some("then".to_owned()),
            is_immutable: false,
        };
        FirstResponse {
            has_ranges: true,
            validators,
            headers: vec![("etag".to_owned(), "\"x\"".to_owned())],
            sends_ahead: None,
        }
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
