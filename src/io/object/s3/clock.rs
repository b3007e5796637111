//! The clock of a server, by which requests are signed.

use std::sync::Arc;
use std::sync::atomic::{AtomicI64, Ordering};
use std::time::{Duration, SystemTime};

use aws_smithy_async::time::TimeSource;
use reqwest::header::{DATE, HeaderMap};

use crate::sys::clock;

/// Codes with which servers refuse the time of a signature.
const REFUSED_TIMES: [&str; 2] = ["RequestTimeTooSkewed", "RequestInTheFuture"];
/// Seconds that clocks may differ by: less than what servers accept.
const TOLERANCE: i64 = 60;

/// The time of this machine, corrected by that of a server that has refused it.
#[derive(Debug, Clone, Default)]
pub struct ServerClock(Arc<AtomicI64>);

impl ServerClock {
    /// Sets the clock by the date of a refusal; true if that changes it.
    pub fn follow(&self, code: Option<&str>, headers: &HeaderMap) -> bool {
        if !code.is_some_and(|code| REFUSED_TIMES.contains(&code)) {
            return false;
        }
        let date = headers.get(DATE).and_then(|date| date.to_str().ok());
        let Some(date) = date.and_then(|date| httpdate::parse_http_date(date).ok()) else {
            return false;
        };
        let seconds = |time: Duration| i64::try_from(time.as_secs()).unwrap_or(i64::MAX);
        let ahead = match date.duration_since(clock::date()) {
            Ok(ahead) => seconds(ahead),
            Err(behind) => -seconds(behind.duration()),
        };
        let before = self.0.swap(ahead, Ordering::Relaxed);
        before.abs_diff(ahead) > TOLERANCE.unsigned_abs()
    }
}

impl TimeSource for ServerClock {
    fn now(&self) -> SystemTime {
        let (now, ahead) = (clock::date(), self.0.load(Ordering::Relaxed));
        let by = Duration::from_secs(ahead.unsigned_abs());
        let corrected = if ahead < 0 { now.checked_sub(by) } else { now.checked_add(by) };
        corrected.unwrap_or(now)
    }
}

#[cfg(test)]
#[allow(clippy::unwrap_used)]
mod tests {
    use super::*;

    #[test]
    fn the_date_of_a_refusal_corrects_the_clock_once() {
        let day = Duration::from_secs(24 * 3600);
        for later in [false, true] {
            let (server, now) = (ServerClock::default(), clock::date());
            let date = if later { now + day } else { now - day };
            let headers =
                HeaderMap::from_iter([(DATE, httpdate::fmt_http_date(date).parse().unwrap())]);
            assert!(!server.follow(Some("AccessDenied"), &headers));
            assert!(!server.follow(Some(REFUSED_TIMES[0]), &HeaderMap::new()));
            assert!(server.follow(Some(REFUSED_TIMES[0]), &headers));
            assert!(!server.follow(Some(REFUSED_TIMES[0]), &headers), "it did not help");
            let found = server.now();
            let off = found.duration_since(date).unwrap_or_else(|e| e.duration());
            assert!(off < Duration::from_secs(10));
        }
    }
}
