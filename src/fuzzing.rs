//! A door for the fuzzer to what is private: see `tests/fuzz`.

use reqwest::Response;

use crate::io::http::response::{Range, first};

/// Reads a first answer to a request for bytes `start` to `end`, and says whether another is taken
/// for the same range of the same file.
pub fn is_taken(one: &Response, other: &Response, (start, end): (u64, u64)) -> bool {
    let wanted = Range { start, end };
    first(one, wanted).is_ok_and(|first| first.validators.check(other, wanted).is_ok())
}
