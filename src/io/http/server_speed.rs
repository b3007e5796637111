//! The measured speed of a server. It decides if unwanted bytes between two ranges are read or
//! skipped.

use std::sync::atomic::{AtomicU64, Ordering};
use std::time::Duration;

/// The largest gap to read before anything was measured.
pub const DEFAULT_GAP: u64 = 512 << 10;
/// Bounds of the gap. Planning a request costs more than reading a shorter one; a longer one would
/// take too much memory.
const MIN_GAP: u64 = 16 << 10;
const MAX_GAP: u64 = 1 << 20;
/// Minimum bytes of a body whose rate counts. Shorter bodies arrive together with their headers.
const MIN_MEASURED_BODY: u64 = 64 << 10;

/// Measurements of the requests to one server; 0 for none.
#[derive(Default)]
pub struct ServerSpeed {
    /// Minimum nanoseconds from request to response.
    latency: AtomicU64,
    /// Maximum bytes per second of one body.
    rate: AtomicU64,
}

impl ServerSpeed {
    /// Records the time to a response. The first includes a new connection, which takes a round
    /// trip of its own.
    pub fn record_latency(&self, after: Duration) {
        let measured = u64::try_from(after.as_nanos()).unwrap_or(u64::MAX).max(1);
        let previous = self.latency.load(Ordering::Relaxed);
        let shortest = if previous == 0 { measured.div_ceil(2) } else { previous.min(measured) };
        self.latency.store(shortest, Ordering::Relaxed);
    }

    /// Records a body that has arrived completely.
    pub fn record_body(&self, bytes: u64, within: Duration) {
        if bytes >= MIN_MEASURED_BODY {
            let rate = u128::from(bytes) * 1_000_000_000 / within.as_nanos().max(1);
            self.rate.fetch_max(u64::try_from(rate).unwrap_or(u64::MAX), Ordering::Relaxed);
        }
    }

    /// The largest gap of unwanted bytes that is cheaper to read than another request. That is the
    /// share of one of `connections` in the bytes that the server sends during the latency of a
    /// request.
    pub fn merge_gap(&self, connections: usize) -> u64 {
        let (latency, rate) =
            (self.latency.load(Ordering::Relaxed), self.rate.load(Ordering::Relaxed));
        if latency == 0 || rate == 0 {
            return DEFAULT_GAP;
        }
        let bytes_per_latency = u128::from(latency) * u128::from(rate) / 1_000_000_000;
        let share = bytes_per_latency / (connections.max(1) as u128);
        u64::try_from(share).unwrap_or(u64::MAX).clamp(MIN_GAP, MAX_GAP)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn merge_gap_is_the_bytes_that_arrive_during_one_latency() {
        let speed = ServerSpeed::default();
        assert_eq!(speed.merge_gap(4), DEFAULT_GAP);
        speed.record_latency(Duration::from_millis(2));
        assert_eq!(speed.merge_gap(4), DEFAULT_GAP);
        speed.record_body(MIN_MEASURED_BODY - 1, Duration::from_nanos(1));
        assert_eq!(speed.merge_gap(4), DEFAULT_GAP);
        // A connection and a request of 1 ms each, 100 MB/s.
        speed.record_body(1_000_000, Duration::from_millis(10));
        assert_eq!(speed.merge_gap(4), 25_000);
        assert_eq!(speed.merge_gap(1), 100_000);
        speed.record_latency(Duration::from_millis(3));
        assert_eq!(speed.merge_gap(4), 25_000);
    }

    #[test]
    fn merge_gap_stays_within_its_bounds() {
        let near = ServerSpeed::default();
        near.record_latency(Duration::from_micros(100));
        near.record_body(1 << 20, Duration::from_millis(100));
        assert_eq!(near.merge_gap(4), MIN_GAP);
        let far = ServerSpeed::default();
        far.record_latency(Duration::from_secs(1));
        far.record_body(1 << 30, Duration::from_nanos(1));
        assert_eq!(far.merge_gap(4), MAX_GAP);
        far.record_latency(Duration::MAX);
        assert_eq!(far.merge_gap(0), MAX_GAP);
    }
}
