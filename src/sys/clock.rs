//! What time it is. A test may have hours pass at once.

#[cfg(feature = "http")]
use std::time::SystemTime;
use std::time::{Duration, Instant};

/// This moment.
pub fn now() -> Instant {
    let now = Instant::now();
    now.checked_add(later()).unwrap_or(now)
}

/// The same as a date.
#[cfg(feature = "http")]
pub fn date() -> SystemTime {
    let now = SystemTime::now();
    now.checked_add(later()).unwrap_or(now)
}

/// How long ago something was.
pub fn since(then: Instant) -> Duration {
    now().saturating_duration_since(then)
}

#[cfg(not(test))]
fn later() -> Duration {
    Duration::ZERO
}

#[cfg(not(test))]
pub use std::thread::sleep;

#[cfg(test)]
pub use simulated::{later, sleep};
#[cfg(all(test, any(feature = "clouds", feature = "s3")))]
pub use simulated::{pass, simulate};

#[cfg(test)]
mod simulated {
    use std::cell::Cell;
    use std::time::Duration;

    thread_local! {
        /// How much later it is for this thread than in the world, if time passes as it says.
        static LATER: Cell<Option<Duration>> = const { Cell::new(None) };
    }

    pub fn later() -> Duration {
        LATER.get().unwrap_or(Duration::ZERO)
    }

    /// Has time pass by [`pass`] and [`sleep`] for this thread.
    #[cfg(any(feature = "clouds", feature = "s3"))]
    pub fn simulate() {
        LATER.set(Some(later()));
    }

    pub fn pass(time: Duration) {
        LATER.set(LATER.get().map(|later| later + time));
    }

    pub fn sleep(time: Duration) {
        match LATER.get() {
            Some(_) => pass(time),
            None => std::thread::sleep(time),
        }
    }
}
