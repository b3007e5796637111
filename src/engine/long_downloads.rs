//! Simulates a download of 140 GB from S3: requests, connections, memory, signatures. The plan, the
//! concurrency controller and the renewal times are those of a real load; the network is a line
//! that all connections share. No real time is measured.
#![allow(clippy::unwrap_used, clippy::cast_possible_truncation, clippy::cast_sign_loss)]
#![allow(clippy::cast_precision_loss)]

use std::time::{Duration, SystemTime};

use crate::engine::concurrency::{ConcurrencyController, Sample};
use crate::engine::destination::ReadFacts;
use crate::engine::destination::host::HostDestination;
use crate::engine::plan::{Extent, partition};
use crate::engine::workers::WorkerRange;
use crate::io::auth::renew_at;
use crate::io::http;
use crate::io::transport::{HTTP2_WINDOW, TransportOptions};
use crate::memory_limit::MemoryLimit;

const GB: u64 = 1_000_000_000;
const TICK: Duration = Duration::from_millis(5);
/// Time until a response begins.
const LATENCY: Duration = Duration::from_millis(30);
/// Bytes a second of one connection to S3.
const CONNECTION_RATE: f64 = 1e8;

/// The tensors of a model of 70 billion parameters: some of a GB, most between 16 MB and 500 MB,
/// and norms between them.
fn model() -> Vec<Extent> {
    let lens = [470, 16, 134, 16, 470, 470].map(|mb| mb * 1_000_000);
    let lens = [1_050 * 1_000_000; 2].into_iter().chain(lens.into_iter().cycle());
    let (mut end, mut extents) = (1 << 20, Vec::new());
    for (number, len) in lens.enumerate() {
        for data_len in if number % 6 == 5 { vec![16_384, len] } else { vec![len] } {
            let (header_offset, data_offset) = (end, end + 128);
            extents.push(Extent { file: 0, header_offset, data_offset, data_len });
            end = data_offset + data_len;
        }
        if end >= 140 * GB {
            return extents;
        }
    }
    extents
}

/// Counts requested credentials, which are renewed when they are due.
struct Signing {
    hold: Option<Duration>,
    /// The time until which the credentials are used, and their expiry.
    credentials: Option<(SystemTime, SystemTime)>,
    credential_requests: usize,
}

impl Signing {
    fn new(hold: Option<u64>) -> Self {
        Signing { hold: hold.map(Duration::from_secs), credentials: None, credential_requests: 0 }
    }

    /// Begins a request, at a time after the first one.
    fn request(&mut self, at: Duration) {
        let (now, Some(hold)) = (SystemTime::UNIX_EPOCH + at, self.hold) else { return };
        if self.credentials.is_none_or(|(until, _)| now >= until) {
            self.credential_requests += 1;
            self.credentials = Some((renew_at(now, now + hold), now + hold));
        }
        // A server would accept them for at least another minute.
        assert!(now + Duration::from_secs(60) <= self.credentials.unwrap().1, "{at:?}");
    }
}

/// Figures of a simulated download.
#[derive(Debug)]
struct DownloadFigures {
    seconds: f64,
    requests: usize,
    /// The maximum number of connections, and the number at most times.
    max: usize,
    usual: usize,
    /// Bytes of the longest request.
    longest: u64,
}

fn download(bandwidth: f64, signing: &mut Signing) -> DownloadFigures {
    let extents = model();
    let total = extents.iter().map(|extent| extent.end() - extent.header_offset).sum();
    let options =
        TransportOptions { connections: None, ..TransportOptions::from_environment().unwrap() };
    let capabilities = http::capabilities(&options);
    let range = WorkerRange::of(&capabilities, None);
    let (source, memory) = (&capabilities, MemoryLimit::of(None));
    let facts = ReadFacts { source, readers: range, total, unit: 1, gather_bytes: 0, memory };
    let batches = partition(&extents, &HostDestination::limits(&facts, u64::MAX));
    assert_eq!(batches.iter().map(|batch| batch.len()).sum::<u64>(), total);

    let mut controller = ConcurrencyController::new(range.initial, range.max, 16);
    let (mut now, mut bytes) = (Sample::default(), 0.0);
    let mut counts = vec![0usize; range.max + 1];
    let mut queue = batches.iter().map(|batch| batch.len());
    // For each connection, the time at which its response begins and the bytes that are left of it.
    let mut running: Vec<(Duration, f64)> = Vec::new();
    let mut requests = 0;
    loop {
        let wanted = controller.update(&now);
        running.retain(|&(_, remaining)| remaining > 0.0);
        while running.len() < wanted {
            let Some(len) = queue.next() else { break };
            signing.request(now.at);
            requests += 1;
            running.push((now.at + LATENCY, len as f64));
        }
        if running.is_empty() {
            break;
        }
        *counts.get_mut(running.len()).unwrap() += 1;
        now.at += TICK;
        let responding = running.iter().filter(|(from, _)| *from <= now.at).count();
        let share =
            (bandwidth / responding.max(1) as f64).min(CONNECTION_RATE) * TICK.as_secs_f64();
        for (_, remaining) in running.iter_mut().filter(|(from, _)| *from <= now.at) {
            bytes += remaining.min(share);
            *remaining -= share;
        }
        (now.bytes, now.running, now.receiving) = (bytes as u64, running.len(), responding);
        now.arrivals += 4 * responding as u64;
        now.cpu += TICK;
    }
    DownloadFigures {
        seconds: now.at.as_secs_f64(),
        requests,
        max: counts.iter().rposition(|&count| count > 0).unwrap(),
        usual: (0..counts.len()).max_by_key(|&at| counts.get(at)).unwrap(),
        longest: batches.iter().map(|batch| batch.len()).max().unwrap(),
    }
}

#[test]
fn download_of_140_gb_keeps_its_bounds() {
    // A line that one connection fills keeps the 16 connections that were opened before the first
    // response.
    for (bandwidth, usual) in [(1e8, 16), (3e9, 32)] {
        // Credentials of a role, for an hour; the shortest possible ones; permanent ones.
        for hold in [Some(3600), Some(900), None] {
            let mut signing = Signing::new(hold);
            let figures = download(bandwidth, &mut signing);
            let ideal = 140e9 / bandwidth;
            assert!(figures.seconds < 1.1 * ideal, "{figures:?}");
            assert_eq!(figures.usual, usual, "{figures:?}");
            assert!(figures.max <= 32, "{figures:?}");
            // Requests of 64 MiB, shorter at the end. Bytes go straight from a connection into
            // their tensors, so other memory is needed only for the HTTP/2 windows.
            assert!((2000..2400).contains(&figures.requests), "{figures:?}");
            assert!(figures.longest <= 66 << 20, "{figures:?}");
            assert!(figures.max as u64 * u64::from(HTTP2_WINDOW) <= 512 << 20);
            // The slow download takes 1400 s, longer than the shortest credentials (900 s).
            let renewed = usize::from(bandwidth < 1e9 && hold == Some(900));
            assert_eq!(signing.credential_requests, if hold.is_some() { 1 + renewed } else { 0 });
        }
    }
}

#[test]
fn expired_credentials_are_renewed_on_a_slow_connection() {
    // 1 MB/s takes 39 hours.
    for (hold, renewals) in [(Some(3600), 41), (Some(900), 160)] {
        let mut signing = Signing::new(hold);
        let seconds_each = (64u64 << 20) / 1_000_000;
        for number in 0..140 * GB / (64 << 20) {
            signing.request(Duration::from_secs(number * seconds_each));
        }
        assert_eq!(signing.credential_requests - 1, renewals, "{hold:?}");
    }
}
