//! Replies of HTTP servers: a reply that is accepted has exactly the range that was requested.
use crate::input::Input;
use reqwest::{Response, StatusCode};
use tensorizer::fuzzing::is_accepted;

const NAMES: [&str; 8] = [
    "content-range",
    "content-length",
    "etag",
    "last-modified",
    "content-encoding",
    "retry-after",
    "accept-ranges",
    "x-other",
];
const VALUES: [&str; 20] = [
    "bytes 0-99/1000",
    "bytes 10-19/1000",
    "bytes 0-9/*",
    "bytes */1000",
    "bytes 0-0/1",
    "bytes",
    "bytes 0-18446744073709551615/18446744073709551615",
    "bytes 9-3/10",
    "items 0-99/1000",
    "100",
    "\"a\"",
    "W/\"a\"",
    "gzip",
    "identity",
    "-1",
    "18446744073709551616",
    "",
    "bytes 0-99/50",
    "bytes -1-5/9",
    "Mon, 01 Jan 2024 00:00:00 GMT",
];

/// Tries an input.
pub fn run(bytes: &[u8]) {
    let mut input = Input::new(bytes);
    let start = *input.one_of(&[0, 10, u64::MAX - 1]);
    let end = *input.one_of(&[100, 20, u64::MAX, 1]);
    let (first, second) = (answer(&mut input), answer(&mut input));
    let end = end.max(start);
    if is_accepted(&first, &second, (start, end)) {
        assert_eq!(second.status(), StatusCode::PARTIAL_CONTENT);
        let field = second.headers()["content-range"].to_str().unwrap();
        let (range, _) = field.strip_prefix("bytes ").unwrap().split_once('/').unwrap();
        let (from, last) = range.split_once('-').unwrap();
        let number = |text: &str| text.trim().parse::<u64>().unwrap();
        assert_eq!((number(from), number(last) + 1), (start, end));
        // An etag that the first reply lacks, or that is no text, is not compared with later ones.
        let tag = first.headers().get("etag").filter(|tag| tag.to_str().is_ok());
        assert!(tag.is_none_or(|tag| second.headers().get("etag") == Some(tag)));
    }
}

fn answer(input: &mut Input<'_>) -> Response {
    let status = *input.one_of(&[206, 200, 416, 404, 403, 429, 503, 301, 412, 100, 204, 407]);
    let mut response = http::Response::builder().status(status);
    for _ in 0..input.below(6) {
        let name = *input.one_of(&NAMES);
        let value = match input.below(4) {
            0 => input.take(12).to_vec(),
            1 => format!("bytes {}-{}/{}", input.u8(), input.u64(), input.u64()).into_bytes(),
            _ => input.one_of(&VALUES).as_bytes().to_vec(),
        };
        if let Ok(value) = http::HeaderValue::from_bytes(&value) {
            response = response.header(name, value);
        }
    }
    response.body(Vec::new()).unwrap().into()
}
