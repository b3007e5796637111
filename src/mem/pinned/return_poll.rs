//! The time at which a thread looks for buffers whose copies have ended. Each look is a call of the
//! driver.

use std::time::Duration;

use crate::sys::sync::Instant;

/// The shortest sleep of a thread that waits for copies.
pub const MIN_SLEEP: Duration = Duration::from_micros(20);
/// The longest sleep of a thread that waits for copies. Longer sleeps would gain nothing, and delay
/// the discovery that a bus has become faster. In a model, only sleeps of at most `MIN_SLEEP` time
/// out.
const MAX_SLEEP: Duration =
    if cfg!(all(test, feature = "models")) { MIN_SLEEP } else { Duration::from_millis(10) };

/// The time between two looks. It adapts so that each finds between an eighth and a half of the
/// buffers in flight: the bus always has more to do.
#[derive(Default)]
pub struct ReturnPoll {
    last: Option<Instant>,
    interval: Duration,
}

impl ReturnPoll {
    /// Notes how many buffers a look has found, and how many are still in flight.
    pub fn record(&mut self, returned: usize, in_flight: usize) {
        let few = returned * 8 < returned + in_flight;
        // A look before the time tells little; some threads look without waiting.
        if few && !self.wait().is_zero() {
            return;
        }
        let interval = if in_flight == 0 {
            MIN_SLEEP
        } else if few {
            self.interval * 2
        } else if returned > in_flight {
            self.interval / 2
        } else {
            self.interval
        };
        self.interval = interval.clamp(MIN_SLEEP, MAX_SLEEP);
        self.last = Some(Instant::now());
    }

    /// Returns the time until the next look; zero if it is due.
    pub fn wait(&self) -> Duration {
        self.last.map_or(Duration::ZERO, |last| self.interval.saturating_sub(last.elapsed()))
    }
}

#[cfg(all(test, not(feature = "models")))]
mod tests {
    use super::*;

    #[test]
    fn looks_are_as_far_apart_as_a_few_buffers_take() {
        let mut poll = ReturnPoll::default();
        assert_eq!(poll.wait(), Duration::ZERO);
        poll.record(0, 16);
        poll.record(0, 16);
        assert_eq!(poll.interval, MIN_SLEEP, "a look before it is due does not count");
        for _ in 0..20 {
            std::thread::sleep(poll.wait());
            poll.record(0, 16);
        }
        assert_eq!(poll.interval, MAX_SLEEP);
        assert!(poll.wait() > MIN_SLEEP);
        poll.record(4, 12);
        assert_eq!(poll.interval, MAX_SLEEP);
        poll.record(9, 7);
        assert_eq!(poll.interval, MAX_SLEEP / 2);
        poll.record(16, 0);
        assert_eq!(poll.interval, MIN_SLEEP, "the bus has run dry");
    }
}
