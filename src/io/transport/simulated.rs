//! Simulated servers for tests. A cloud issues credentials that expire, and its server on loopback
//! refuses them then. A server in memory gets the requests to its host, and fails as a test says. See
//! `src/sys/clock.rs`.
#![allow(clippy::unwrap_used, clippy::indexing_slicing)]

use std::io::{self, BufRead as _, BufReader, Read as _, Write as _};
use std::net::{TcpListener, TcpStream};
use std::pin::Pin;
use std::sync::atomic::{AtomicU64, Ordering};
use std::sync::{Arc, Mutex, Weak};
use std::task::{Context, Poll};
use std::thread;
use std::time::Duration;

use bytes::Bytes;
use http_body::{Body, Frame};
use reqwest::{Request, Response, Url};

use super::TransportOptions;
use crate::sys::clock;
use crate::sys::fork_safe_mutex::ForkSafeMutex;

/// The beginning of the names of credentials.
pub const NAME: &str = "simulated-";
/// Bytes of the server's object.
pub const OBJECT_LEN: u64 = 64 << 20;

/// Issues credentials, and checks them.
#[derive(Debug)]
pub struct SimulatedCloud {
    lifetime: u64,
    /// Seconds of each seven minutes during which no credentials are issued.
    outage: u64,
    /// Seconds since the beginning, as the test says.
    now: AtomicU64,
    /// When each credential expires.
    issued: Mutex<Vec<u64>>,
    /// Requests that were served, and those that were refused.
    pub served: AtomicU64,
    pub refused: AtomicU64,
}

impl SimulatedCloud {
    /// Credentials are valid for `lifetime` seconds. From now on time passes for this thread by
    /// [`SimulatedCloud::advance`].
    pub fn new(lifetime: u64, outage: u64) -> Arc<Self> {
        clock::simulate();
        Arc::new(SimulatedCloud {
            lifetime,
            outage,
            now: AtomicU64::new(0),
            issued: Mutex::default(),
            served: AtomicU64::new(0),
            refused: AtomicU64::new(0),
        })
    }

    pub fn advance(&self, seconds: u64) {
        clock::advance(Duration::from_secs(seconds));
        self.now.fetch_add(seconds, Ordering::Relaxed);
    }

    /// Seconds since it began.
    pub fn now(&self) -> u64 {
        self.now.load(Ordering::Relaxed)
    }

    /// Issues credentials: their name, and how long they are valid. None while none are issued.
    pub fn issue(&self) -> Option<(String, Duration)> {
        if self.now() % 420 >= 420 - self.outage {
            return None;
        }
        let mut issued = self.issued.lock().unwrap();
        issued.push(self.now() + self.lifetime);
        Some((format!("{NAME}{}", issued.len() - 1), Duration::from_secs(self.lifetime)))
    }

    /// The number that was issued.
    pub fn issued(&self) -> usize {
        self.issued.lock().unwrap().len()
    }

    /// Expires all credentials at once.
    pub fn revoke_all(&self) {
        self.issued.lock().unwrap().fill(0);
    }

    fn accepts(&self, head: &str) -> bool {
        let name = head.split_once(NAME).map_or("", |(_, rest)| rest);
        let number: String = name.chars().take_while(char::is_ascii_digit).collect();
        let issued = self.issued.lock().unwrap();
        issued[number.parse::<usize>().unwrap()] > self.now()
    }

    /// Serves requests for objects; returns the address. It ends with the process.
    pub fn serve(self: &Arc<Self>) -> String {
        let listener = TcpListener::bind("127.0.0.1:0").unwrap();
        let address = format!("http://{}", listener.local_addr().unwrap());
        let simulated_cloud = Arc::clone(self);
        thread::spawn(move || {
            for connection in listener.incoming().map_while(Result::ok) {
                let simulated_cloud = Arc::clone(&simulated_cloud);
                thread::spawn(move || while simulated_cloud.respond(&connection).is_some() {});
            }
        });
        address
    }

    /// Responds to one request. None once there are no more.
    fn respond(&self, mut connection: &TcpStream) -> Option<()> {
        let (mut reader, mut head) = (BufReader::new(connection), String::new());
        while !head.ends_with("\r\n\r\n") {
            reader.read_line(&mut head).ok().filter(|&len| len > 0)?;
        }
        let lower = head.to_ascii_lowercase();
        let field = |name: &str| lower.split_once(&format!("{name}: "))?.1.split("\r\n").next();
        let len: u64 = field("content-length").map_or(0, |len| len.parse().unwrap());
        io::copy(&mut reader.by_ref().take(len), &mut io::sink()).ok()?;
        let good = self.accepts(&head);
        let counter = if good { &self.served } else { &self.refused };
        counter.fetch_add(1, Ordering::Relaxed);
        let (status, fields, body) = match field("range").filter(|_| good) {
            _ if !good => {
                let document = "<Error><Code>ExpiredToken</Code></Error>";
                ("403 Forbidden", String::new(), document.as_bytes().to_vec())
            }
            Some(range) => {
                let (from, to) = range.trim_start_matches("bytes=").split_once('-')?;
                let from: u64 = from.parse().ok()?;
                let to = to.parse::<u64>().map_or(OBJECT_LEN - 1, |to| to.min(OBJECT_LEN - 1));
                let fields = format!("content-range: bytes {from}-{to}/{OBJECT_LEN}\r\n");
                let body = vec![7; usize::try_from(to + 1 - from).unwrap()];
                ("206 Partial Content", fields, body)
            }
            None => ("200 OK", String::new(), Vec::new()),
        };
        let len = body.len();
        let head =
            format!("HTTP/1.1 {status}\r\netag: \"e\"\r\n{fields}content-length: {len}\r\n\r\n");
        connection.write_all(&[head.as_bytes(), &body].concat()).ok()
    }
}

/// The options of requests to the simulated cloud.
pub fn options() -> TransportOptions {
    TransportOptions::from_environment().unwrap()
}

/// The servers, which their hosts name by their number.
static SERVERS: ForkSafeMutex<Vec<Weak<RamServer>>> = ForkSafeMutex::new(Vec::new());

/// Bytes of a body that come at once.
const PIECE: usize = 10_000;

/// A fault of a response.
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

/// The fault of the response to the request of a number, to a path.
pub type FaultOf = Box<dyn Fn(usize, &str) -> Fault + Send + Sync>;

/// A server of one file.
pub struct RamServer {
    pub bytes: Vec<u8>,
    /// Its faults.
    pub fault: FaultOf,
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
        let (server, mut servers) = (Arc::new(self), SERVERS.lock());
        servers.push(Arc::downgrade(&server));
        (server, format!("http://ram-{}.invalid/file", servers.len() - 1))
    }

    /// The server of a URL, if it is one in memory.
    pub fn find(url: &Url) -> Option<Arc<Self>> {
        let number = url.host_str()?.strip_prefix("ram-")?.strip_suffix(".invalid")?;
        SERVERS.lock().get(number.parse::<usize>().ok()?)?.upgrade()
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
