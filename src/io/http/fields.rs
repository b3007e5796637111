//! The fields of requests and responses that say which bytes are meant.

use std::io::ErrorKind;

use reqwest::header::{CONTENT_ENCODING, CONTENT_LENGTH, CONTENT_RANGE, HeaderMap};
use reqwest::{Response, StatusCode};

use crate::error::Escaped;
use crate::io::transport::{Failure, header_text};

/// The failure of a response 304 that was not asked for.
pub const UNASKED: &str = "the server answered 304 Not Modified to a request without If-None-Match";

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

/// A `Content-Range` field: start, and end that is excluded, None for `*`, where there is no range; and
/// the bytes of the file, None if the field does not say.
type ContentRange = (Option<(u64, u64)>, Option<u64>);

pub fn content_range(headers: &HeaderMap) -> Option<ContentRange> {
    let field = header_text(headers, CONTENT_RANGE)?;
    let (range, len) = field.strip_prefix("bytes ")?.split_once('/')?;
    let len = len.trim().parse().ok();
    if range.trim() == "*" {
        return Some((None, len));
    }
    let (first, last) = range.split_once('-')?;
    let end = last.trim().parse::<u64>().ok()?.checked_add(1)?;
    Some((Some((first.trim().parse().ok()?, end)), len))
}

pub fn content_length(headers: &HeaderMap) -> Option<u64> {
    header_text(headers, CONTENT_LENGTH)?.trim().parse().ok()
}

/// Codings of a body that leave its bytes as they are. `aws-chunked` is that of an upload, which
/// some stores keep with the object.
const PLAIN_CODINGS: [&str; 3] = ["", "identity", "aws-chunked"];

/// Fails for a body that is not plain bytes.
pub fn check_coding(response: &Response) -> Result<(), Failure> {
    let fields = response.headers().get_all(CONTENT_ENCODING).iter();
    let text = fields.filter_map(|field| field.to_str().ok()).collect::<Vec<_>>().join(", ");
    let is_plain =
        |coding: &str| PLAIN_CODINGS.iter().any(|plain| coding.trim().eq_ignore_ascii_case(plain));
    if text.split(',').all(is_plain) {
        return Ok(());
    }
    let what = format!(
        "the server sent the file with Content-Encoding {}, expected none (identity)",
        Escaped(&text)
    );
    Err(Failure::permanent(ErrorKind::InvalidData, what))
}

/// True if a server refuses a range, or the `ETag` of a request: it may have another file, or not
/// know conditions.
pub fn is_of_range(status: StatusCode) -> bool {
    matches!(status, StatusCode::PRECONDITION_FAILED | StatusCode::RANGE_NOT_SATISFIABLE)
}
