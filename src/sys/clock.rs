//! The current time, which a test can simulate: hours may pass at once.

#[cfg(feature = "http")]
use std::time::SystemTime;
use std::time::{Duration, Instant};

/// The current time on the monotonic clock.
pub fn now() -> Instant {
    let now = Instant::now();
    now.checked_add(lead()).unwrap_or(now)
}

/// The current date and time.
#[cfg(feature = "http")]
pub fn date() -> SystemTime {
    let now = SystemTime::now();
    now.checked_add(lead()).unwrap_or(now)
}

/// The time that has passed since a moment.
pub fn since(then: Instant) -> Duration {
    now().saturating_duration_since(then)
}

#[cfg(not(test))]
fn lead() -> Duration {
    Duration::ZERO
}

#[cfg(not(test))]
pub use std::thread::sleep;

#[cfg(all(test, any(feature = "clouds", feature = "s3")))]
pub use simulated::{advance, simulate};
#[cfg(test)]
pub use simulated::{lead, sleep};

#[cfg(test)]
mod simulated {
    use std::cell::Cell;
    use std::time::Duration;

    thread_local! {
        /// The lead of this thread's clock over the real one, if its time is simulated.
        static LEAD: Cell<Option<Duration>> = const { Cell::new(None) };
    }

    pub fn lead() -> Duration {
        LEAD.get().unwrap_or(Duration::ZERO)
    }

    /// Simulates the time of this thread: from now on [`advance`] and [`sleep`] advance its clock
    /// at once.
    #[cfg(any(feature = "clouds", feature = "s3"))]
    pub fn simulate() {
        LEAD.set(Some(lead()));
    }

    pub fn advance(time: Duration) {
        LEAD.set(LEAD.get().map(|lead| lead + time));
    }

    pub fn sleep(time: Duration) {
        match LEAD.get() {
            Some(_) => advance(time),
            None => std::thread::sleep(time),
        }
    }
}
