//! The measured speed of a server. It decides if unwanted bytes between two ranges are read or skipped.

use std::sync::atomic::{AtomicU64, Ordering};
use std::time::Duration;

/// The largest gap to read before anything was measured.
pub const DEFAULT_GAP: u64 = 512 << 10;
/// Bounds of the gap. Planning a request costs more than reading a shorter one; a longer one would take
/// too much memory.
const LEAST_GAP: u64 = 16 << 10;
const MOST_GAP: u64 = 1 << 20;
/// Minimum bytes of a body whose rate counts. Shorter bodies arrive together with their headers.
const LONG: u64 = 64 << 10;

/// Measurements of the requests to one server; 0 for none.
#[derive(Default)]
pub struct Pace {
    /// Minimum nanoseconds from request to response.
    latency: AtomicU64,
    /// Maximum bytes per second of one body.
    rate: AtomicU64,
}

impl Pace {
    /// Records the time to a response. The first includes a new connection, which takes a round trip of
    /// its own.
    pub fn answered(&self, after: Duration) {
        let found = u64::try_from(after.as_nanos()).unwrap_or(u64::MAX).max(1);
        let known = self.latency.load(Ordering::Relaxed);
        let least = if known == 0 { found.div_ceil(2) } else { known.min(found) };
        self.latency.store(least, Ordering::Relaxed);
    }

    /// Records a body that has arrived completely.
    pub fn sent(&self, bytes: u64, within: Duration) {
        if bytes >= LONG {
            let rate = u128::from(bytes) * 1_000_000_000 / within.as_nanos().max(1);
            self.rate.fetch_max(u64::try_from(rate).unwrap_or(u64::MAX), Ordering::Relaxed);
        }
    }

    /// The largest gap of unwanted bytes that is cheaper to read than another request. That is the
    /// share of one of `connections` in the bytes that the server sends during the latency of a
    /// request.
    pub fn gap(&self, connections: usize) -> u64 {
        let (latency, rate) =
            (self.latency.load(Ordering::Relaxed), self.rate.load(Ordering::Relaxed));
        if latency == 0 || rate == 0 {
            return DEFAULT_GAP;
        }
        let waited = u128::from(latency) * u128::from(rate) / 1_000_000_000;
        let share = waited / (connections.max(1) as u128);
        u64::try_from(share).unwrap_or(u64::MAX).clamp(LEAST_GAP, MOST_GAP)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_gap_is_what_comes_while_a_request_waits() {
        let pace = Pace::default();
        assert_eq!(pace.gap(4), DEFAULT_GAP);
        pace.answered(Duration::from_millis(2));
        assert_eq!(pace.gap(4), DEFAULT_GAP);
        pace.sent(LONG - 1, Duration::from_nanos(1));
        assert_eq!(pace.gap(4), DEFAULT_GAP);
        // A connection and a request of 1 ms each, 100 MB/s.
        pace.sent(1_000_000, Duration::from_millis(10));
        assert_eq!(pace.gap(4), 25_000);
        assert_eq!(pace.gap(1), 100_000);
        pace.answered(Duration::from_millis(3));
        assert_eq!(pace.gap(4), 25_000);
    }

    #[test]
    fn gaps_have_bounds() {
        let near = Pace::default();
        near.answered(Duration::from_micros(100));
        near.sent(1 << 20, Duration::from_millis(100));
        assert_eq!(near.gap(4), LEAST_GAP);
        let far = Pace::default();
        far.answered(Duration::from_secs(1));
        far.sent(1 << 30, Duration::from_nanos(1));
        assert_eq!(far.gap(4), MOST_GAP);
        far.answered(Duration::MAX);
        assert_eq!(far.gap(0), MOST_GAP);
    }
}
