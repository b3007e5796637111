//! A simulated cloud for tests: credentials that expire, and a server on loopback that refuses them
//! then. See `src/sys/clock.rs`.
#![allow(clippy::unwrap_used, clippy::indexing_slicing)]

use std::io::{BufRead as _, BufReader, Read as _, Write as _};
use std::net::{TcpListener, TcpStream};
use std::sync::atomic::{AtomicU64, Ordering};
use std::sync::{Arc, Mutex};
use std::thread;
use std::time::Duration;

use super::TransportOptions;
use crate::sys::clock;

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
        std::io::copy(&mut reader.by_ref().take(len), &mut std::io::sink()).ok()?;
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
