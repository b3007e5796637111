//! A server in memory for tests: requests to its host need no connection, and fail as a test says.
#![allow(clippy::unwrap_used, clippy::indexing_slicing)]

use std::io;
use std::pin::Pin;
use std::sync::{Arc, Mutex, Weak};
use std::task::{Context, Poll};

use bytes::Bytes;
use http_body::{Body, Frame};
use reqwest::{Request, Response, Url};

/// The servers, which their hosts name by their number.
static SERVERS: Mutex<Vec<Weak<RamServer>>> = Mutex::new(Vec::new());

/// Bytes of a body that come at once.
const PIECE: usize = 10_000;

/// What is wrong with a response.
#[derive(Debug, Clone, Copy)]
pub enum Fault {
    None,
    /// The connection breaks after so many bytes of the body.
    Broken(usize),
    /// The body ends after so many bytes.
    Short(usize),
    /// No more bytes come after so many.
    Stalled(usize),
    /// A status without the file.
    Status(u16),
    /// The status 503, with the wish for a pause of so many seconds.
    Busy(u64),
    /// A page instead of the file.
    Page,
    /// Another range than the requested one.
    OtherRange,
    /// A redirect to this path.
    Moved(&'static str),
}

/// The fields of a response.
pub type Fields = &'static [(&'static str, &'static str)];

/// A server of one file.
pub struct RamServer {
    pub bytes: Vec<u8>,
    /// What is wrong with the response to the request of a number, to a path.
    pub fault: Box<dyn Fn(usize, &str) -> Fault + Send + Sync>,
    /// The fields of the response to the request of a number.
    pub fields: Box<dyn Fn(usize) -> Fields + Send + Sync>,
    /// True if it sends ranges.
    pub has_ranges: bool,
    /// True if it refuses requests for another `ETag`.
    pub heeds_conditions: bool,
    /// The requests that have come.
    pub requests: Mutex<Vec<RamRequest>>,
}

/// A request that has come.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct RamRequest {
    pub path: String,
    /// The first byte, and the one after the last.
    pub range: Option<(usize, usize)>,
    /// The names of its conditions, and `If-Match`.
    pub conditions: Vec<String>,
    pub if_match: Option<String>,
}

impl RamServer {
    pub fn new(bytes: Vec<u8>) -> Self {
        RamServer {
            bytes,
            fault: Box::new(|_, _| Fault::None),
            fields: Box::new(|_| &[("etag", "\"one\"")]),
            has_ranges: true,
            heeds_conditions: false,
            requests: Mutex::default(),
        }
    }

    /// Takes requests from now on; returns the address of the file, too.
    pub fn start(self) -> (Arc<Self>, String) {
        let (server, mut servers) = (Arc::new(self), SERVERS.lock().unwrap());
        servers.push(Arc::downgrade(&server));
        (server, format!("http://ram-{}.invalid/file", servers.len() - 1))
    }

    /// The server of a URL, if it is one in memory.
    pub fn find(url: &Url) -> Option<Arc<Self>> {
        let number = url.host_str()?.strip_prefix("ram-")?.strip_suffix(".invalid")?;
        SERVERS.lock().unwrap().get(number.parse::<usize>().ok()?)?.upgrade()
    }

    /// The requests so far.
    pub fn requests(&self) -> Vec<RamRequest> {
        self.requests.lock().unwrap().clone()
    }

    pub fn respond(&self, request: &Request) -> Response {
        let request = RamRequest::of(request);
        let number = {
            let mut requests = self.requests.lock().unwrap();
            requests.push(request.clone());
            requests.len() - 1
        };
        let (fields, len) = ((self.fields)(number), self.bytes.len());
        let mut response = http::Response::builder();
        for (name, value) in fields {
            response = response.header(*name, value.as_bytes());
        }
        let has = |tag: &String| fields.contains(&("etag", tag));
        let fault = match &request.if_match {
            Some(tag) if self.heeds_conditions && !has(tag) => Fault::Status(412),
            _ => (self.fault)(number, &request.path),
        };
        let range = request.range.filter(|_| self.has_ranges);
        let (start, end) = range.map_or((0, len), |(start, end)| (start, end.min(len)));
        let (mut status, mut body) = (if range.is_some() { 206 } else { 200 }, None);
        match fault {
            Fault::Status(other) => (status, body) = (other, Some(&b"no"[..])),
            Fault::Busy(seconds) => {
                (status, body) = (503, Some(&b"busy"[..]));
                response = response.header("retry-after", seconds);
            }
            Fault::Page => (status, body) = (200, Some(&b"a proxy's page"[..])),
            Fault::Moved(path) => {
                (status, body) = (302, Some(&b""[..]));
                response = response.header("location", path);
            }
            _ => {}
        }
        if status == 206 {
            let start = if matches!(fault, Fault::OtherRange) { start + 7 } else { start };
            response = response.header("content-range", format!("bytes {start}-{}/{len}", end - 1));
        }
        let body = body.unwrap_or(&self.bytes[start..end]);
        let response = response.status(status).header("content-length", body.len());
        let body = RamBody { bytes: Bytes::copy_from_slice(body), sent: 0, fault };
        response.body(reqwest::Body::wrap(body)).unwrap().into()
    }
}

impl RamRequest {
    fn of(request: &Request) -> Self {
        let text = |name: &str| Some(request.headers().get(name)?.to_str().unwrap().to_owned());
        let range = text("range").map(|range| {
            let (first, last) = range.strip_prefix("bytes=").unwrap().split_once('-').unwrap();
            (first.parse().unwrap(), last.parse::<usize>().unwrap() + 1)
        });
        let names = request.headers().keys().map(|name| name.as_str().to_owned());
        let path = request.url().path().to_owned();
        let conditions = names.filter(|name| name.starts_with("if-")).collect();
        RamRequest { path, range, conditions, if_match: text("if-match") }
    }
}

/// The body of a response.
struct RamBody {
    bytes: Bytes,
    sent: usize,
    fault: Fault,
}

impl Body for RamBody {
    type Data = Bytes;
    type Error = io::Error;

    fn poll_frame(
        mut self: Pin<&mut Self>,
        _: &mut Context<'_>,
    ) -> Poll<Option<Result<Frame<Bytes>, io::Error>>> {
        let end = match self.fault {
            Fault::Broken(end) | Fault::Short(end) | Fault::Stalled(end) => end,
            _ => usize::MAX,
        };
        let len = PIECE.min(end - self.sent).min(self.bytes.len());
        if len > 0 {
            self.sent += len;
            return Poll::Ready(Some(Ok(Frame::data(self.bytes.split_to(len)))));
        }
        match self.fault {
            Fault::Broken(_) => {
                Poll::Ready(Some(Err(io::Error::from(io::ErrorKind::ConnectionReset))))
            }
            // The clock of the test goes on.
            Fault::Stalled(_) => Poll::Pending,
            _ => Poll::Ready(None),
        }
    }
}
