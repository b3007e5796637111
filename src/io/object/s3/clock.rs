//! The clock of a server, by which requests are signed.

use std::sync::Arc;
use std::sync::atomic::{AtomicI64, Ordering};
use std::time::SystemTime;

use aws_sdk_s3::primitives::DateTime;
use aws_sdk_s3::primitives::DateTimeFormat::HttpDate;
use aws_smithy_async::time::TimeSource;
use reqwest::header::{DATE, HeaderMap};

use crate::sys::clock;

/// Codes with which servers refuse the time of a signature.
const REFUSED_TIMES: [&str; 2] = ["RequestTimeTooSkewed", "RequestInTheFuture"];
/// Seconds that clocks may differ by: less than what servers accept.
const TOLERANCE: u64 = 60;

/// The time of this machine, corrected by that of a server that has refused it.
#[derive(Debug, Clone, Default)]
pub struct ServerClock(Arc<AtomicI64>);

impl ServerClock {
    /// Sets the clock by the date of a refusal; true if that changes it.
    pub fn follow(&self, code: Option<&str>, headers: &HeaderMap) -> bool {
        let Some(date) = headers
            .get(DATE)
            .filter(|_| code.is_some_and(|code| REFUSED_TIMES.contains(&code)))
            .and_then(|date| DateTime::from_str(date.to_str().ok()?, HttpDate).ok())
        else {
            return false;
        };
        let ahead = date.secs() - DateTime::from(clock::date()).secs();
        let before = self.0.swap(ahead, Ordering::Relaxed);
        before.abs_diff(ahead) > TOLERANCE
    }
}

impl TimeSource for ServerClock {
    fn now(&self) -> SystemTime {
        let (now, ahead) = (clock::date(), self.0.load(Ordering::Relaxed));
        let corrected = DateTime::from_secs(DateTime::from(now).secs().saturating_add(ahead));
        corrected.try_into().unwrap_or(now)
    }
}

#[cfg(test)]
mod tests {
    use std::time::Duration;

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
