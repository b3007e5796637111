//! Access to private code for the fuzzer: see `tests/fuzz`.

use reqwest::Response;

use crate::io::http::fields::ByteRange;
use crate::io::http::response::parse_first;

/// Parses the first response to a request for bytes `start` to `end`. True if another response is
/// accepted for the same range of the same file.
pub fn is_accepted(one: &Response, other: &Response, (start, end): (u64, u64)) -> bool {
    let wanted = ByteRange { start, end };
    let first = parse_first(one, Some(wanted));
    matches!(first, Ok(Ok(first)) if first.validators.check(other, wanted).is_ok())
}
