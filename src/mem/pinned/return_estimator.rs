//! The time at which the next buffer returns from its copies, estimated from earlier ones.

use std::time::Duration;

use crate::sys::sync::Instant;

/// The shortest sleep of a thread that waits for copies.
pub const MIN_SLEEP: Duration = Duration::from_micros(20);
/// The longest sleep of a thread that waits for copies. Longer sleeps would gain nothing, and delay
/// the discovery that a bus has become faster. In a model, only sleeps of at most `MIN_SLEEP` time
/// out.
const MAX_SLEEP: Duration =
    if cfg!(all(test, feature = "models")) { MIN_SLEEP } else { Duration::from_millis(10) };

/// The times at which buffers return from a device.
#[derive(Default)]
pub struct ReturnEstimator {
    last: Option<Instant>,
    /// Time between two returns, smoothed; zero before it is known.
    interval: Duration,
}

impl ReturnEstimator {
    /// Notes that buffers have returned. `busy`: others are still in flight, so that the time to
    /// the next return measures the bus.
    pub fn record(&mut self, buffers: usize, busy: bool) {
        if let Some(last) = self.last {
            let count = u32::try_from(buffers).unwrap_or(u32::MAX).max(1);
            // Longer intervals are pauses between loads.
            let measured = (last.elapsed() / count).min(MAX_SLEEP);
            self.interval = if self.interval.is_zero() {
                measured
            } else {
                (self.interval * 7 + measured.min(self.interval * 4)) / 8
            };
        }
        self.last = busy.then(Instant::now);
    }

    /// True if a buffer has just returned and the next is not due yet. It stays true for half of
    /// [`MAX_SLEEP`] at most.
    pub fn is_early(&self) -> bool {
        self.last.is_some_and(|last| last.elapsed() < self.interval.min(MAX_SLEEP) / 2)
    }

    /// Returns the time to sleep before the next check for returned buffers.
    pub fn poll_delay(&self) -> Duration {
        let Some(last) = self.last else { return MIN_SLEEP };
        let expected = (self.interval * 17 / 16).saturating_sub(last.elapsed());
        // A late buffer is checked for more often.
        expected.max(self.interval / 4).clamp(MIN_SLEEP, MAX_SLEEP)
    }
}

#[cfg(all(test, not(feature = "models")))]
mod tests {
    use super::*;

    #[test]
    fn a_pause_between_loads_does_not_count_as_a_slow_bus() {
        let mut return_estimator = ReturnEstimator::default();
        return_estimator.record(1, true);
        std::thread::sleep(20 * MAX_SLEEP);
        return_estimator.record(16, true);
        std::thread::sleep(MAX_SLEEP);
        assert!(!return_estimator.is_early());
        assert!(return_estimator.poll_delay() <= MAX_SLEEP);
        assert!(return_estimator.interval <= MAX_SLEEP);
    }

    #[test]
    fn sleeps_are_as_long_as_buffers_take_and_bounded() {
        let mut return_estimator = ReturnEstimator::default();
        assert_eq!(return_estimator.poll_delay(), MIN_SLEEP);
        for _ in 0..5 {
            return_estimator.record(1, true);
            std::thread::sleep(Duration::from_millis(1));
        }
        return_estimator.record(1, true);
        let delay = return_estimator.poll_delay();
        assert!(delay > MIN_SLEEP && delay <= MAX_SLEEP, "{delay:?}");
        assert!(return_estimator.is_early());
        std::thread::sleep(MAX_SLEEP);
        assert!(!return_estimator.is_early());
        return_estimator.record(1, false);
        assert_eq!(return_estimator.poll_delay(), MIN_SLEEP);
    }
}
