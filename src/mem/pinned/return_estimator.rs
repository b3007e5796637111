//! The time at which the next buffer returns from its copies, estimated from earlier ones.

use std::time::Duration;

use crate::sys::sync::Instant;

/// The shortest sleep of a thread that waits for copies.
pub const POLL: Duration = Duration::from_micros(20);
/// The longest sleep of a thread that waits for copies. Longer sleeps would gain nothing, and delay
/// the discovery that a bus has become faster. In a model, only sleeps of at most `POLL` time out.
const LONGEST: Duration =
    if cfg!(all(test, feature = "models")) { POLL } else { Duration::from_millis(10) };

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
    pub fn note(&mut self, buffers: usize, busy: bool) {
        if let Some(last) = self.last {
            let count = u32::try_from(buffers).unwrap_or(u32::MAX).max(1);
            // Longer intervals are pauses between loads.
            let found = (last.elapsed() / count).min(LONGEST);
            self.interval = if self.interval.is_zero() {
                found
            } else {
                (self.interval * 7 + found.min(self.interval * 4)) / 8
            };
        }
        self.last = busy.then(Instant::now);
    }

    /// True if a buffer has just returned and the next is not due yet. It stays true for half of
    /// [`LONGEST`] at most.
    pub fn is_early(&self) -> bool {
        self.last.is_some_and(|last| last.elapsed() < self.interval.min(LONGEST) / 2)
    }

    /// Returns the time to sleep before the next check for returned buffers.
    pub fn rest(&self) -> Duration {
        let Some(last) = self.last else { return POLL };
        let expected = (self.interval * 17 / 16).saturating_sub(last.elapsed());
        // A late buffer is checked for more often.
        expected.max(self.interval / 4).clamp(POLL, LONGEST)
    }
}

#[cfg(all(test, not(feature = "models")))]
mod tests {
    use super::*;

    #[test]
    fn a_pause_between_loads_is_not_taken_for_a_slow_bus() {
        let mut returns = ReturnEstimator::default();
        returns.note(1, true);
        std::thread::sleep(20 * LONGEST);
        returns.note(16, true);
        std::thread::sleep(LONGEST);
        assert!(!returns.is_early());
        assert!(returns.rest() <= LONGEST);
        assert!(returns.interval <= LONGEST);
    }

    #[test]
    fn sleeps_are_as_long_as_buffers_take_and_bounded() {
        let mut returns = ReturnEstimator::default();
        assert_eq!(returns.rest(), POLL);
        for _ in 0..5 {
            returns.note(1, true);
            std::thread::sleep(Duration::from_millis(1));
        }
        returns.note(1, true);
        let rest = returns.rest();
        assert!(rest > POLL && rest <= LONGEST, "{rest:?}");
        assert!(returns.is_early());
        std::thread::sleep(LONGEST);
        assert!(!returns.is_early());
        returns.note(1, false);
        assert_eq!(returns.rest(), POLL);
    }
}
