//! The retry loop: decides which failures are retried, after which pause, and for how long in
//! total.

use std::cell::{Cell, RefCell};
use std::io;
use std::sync::Arc;
use std::sync::atomic::{AtomicU64, Ordering};
use std::time::{Duration, Instant};

use super::failure::Repeat;
use super::{Failure, TransportOptions};
use crate::cancel::{self, Cancel};
use crate::error::{Error, Result};
use crate::sys::clock;
use crate::traffic::RepeatedRequest;

/// The first pause. Each further one is twice as long, up to [`LONGEST_PAUSE`], less a random part
/// of at most a half.
const FIRST_PAUSE: Duration = Duration::from_millis(100);
const LONGEST_PAUSE: Duration = Duration::from_secs(10);
/// Time for which a refused connection is repeated at the opening of a file, and the longest pause
/// meanwhile: the server, or a proxy beside the program, may just be starting.
const START_TIME: Duration = Duration::from_secs(3);
const START_PAUSE: Duration = Duration::from_millis(300);
/// Each time that this many bytes have moved, a request gets another second, so that slow transfers
/// do not count as stalled. An attempt that moved fewer has made no progress.
const BYTES_A_SECOND: u64 = 64 << 10;

/// The time that all attempts of one request may take, and what they have moved so far.
pub struct RetryBudget<'o> {
    action: &'static str,
    display_address: &'o str,
    pub options: &'o TransportOptions,
    cancel: &'o dyn Cancel,
    begun: Instant,
    /// Time for which the request has waited for its turn.
    waited: Cell<Duration>,
    bytes_moved: Cell<u64>,
    /// The counter of the body that is being sent, and its value when this attempt began.
    sending: RefCell<(Arc<AtomicU64>, u64)>,
    /// The next byte wanted: the progress of the request.
    pub position: Cell<u64>,
    opening: bool,
}

impl<'o> RetryBudget<'o> {
    /// A budget that begins now. Errors say that `action` (a gerund) of `display_address` (an
    /// address) failed.
    pub fn new(
        action: &'static str,
        display_address: &'o str,
        options: &'o TransportOptions,
        cancel: &'o dyn Cancel,
    ) -> Self {
        RetryBudget {
            action,
            display_address,
            options,
            cancel,
            begun: clock::now(),
            waited: Cell::default(),
            bytes_moved: Cell::default(),
            sending: RefCell::default(),
            position: Cell::default(),
            opening: false,
        }
    }

    /// The budget of the first request to a server. A refused connection is repeated for 3 s only.
    pub fn opening(self) -> Self {
        RetryBudget { opening: true, ..self }
    }

    /// The budget of a request that has taken `spent` and moved some bytes before.
    pub fn resumed(self, spent: Duration, moved: u64) -> Self {
        let begun = self.begun.checked_sub(spent).unwrap_or(self.begun);
        RetryBudget { begun, bytes_moved: Cell::new(moved), position: Cell::new(moved), ..self }
    }

    /// Counts bytes that have arrived.
    pub fn received(&self, bytes: u64) {
        self.bytes_moved.set(self.bytes_moved.get() + bytes);
        self.options.traffic.bytes(bytes);
    }

    /// The pause after some bytes, if the call may not move more per second. It does not count.
    pub fn pace(&self, bytes: u64) -> Option<Duration> {
        let pause = self.options.traffic.pause_after(bytes)?;
        self.waited.set(self.waited.get().saturating_add(pause));
        Some(pause)
    }

    /// Counts the bytes that the next attempt sends, by the counter of their body.
    pub fn track_upload(&self, sent: &Arc<AtomicU64>) {
        self.received(self.sent());
        self.sending.replace((Arc::clone(sent), sent.load(Ordering::Relaxed)));
    }

    fn sent(&self) -> u64 {
        let sending = self.sending.borrow();
        sending.0.load(Ordering::Relaxed).saturating_sub(sending.1)
    }

    /// Counts the bytes that an attempt has sent, and pauses if that was too fast.
    pub fn sent_all(&self, sent: &Arc<AtomicU64>) -> Result<(), Failure> {
        let pause = self.pace(self.sent());
        self.track_upload(sent);
        pause.map_or(Ok(()), |pause| cancel::sleep(pause, self.cancel).map_err(Failure::ended))
    }

    /// Sleeps, unless the caller ends the call. The time does not count.
    pub fn wait(&self, time: Duration) -> Result<(), Failure> {
        let begun = clock::now();
        let slept = cancel::sleep(time, self.cancel).map_err(Failure::ended);
        self.waited.set(self.waited.get().saturating_add(clock::since(begun)));
        slept
    }

    fn time_allowed(&self) -> Duration {
        let moved = self.bytes_moved.get().saturating_add(self.sent());
        let for_bytes = Duration::from_secs(moved / BYTES_A_SECOND);
        self.options.total.saturating_add(for_bytes).saturating_add(self.waited.get())
    }

    /// Fails if the request that is under way may not go on.
    pub fn check(&self) -> Result<(), Failure> {
        self.cancel.check().map_err(Failure::ended)?;
        if clock::since(self.begun) <= self.time_allowed() {
            return Ok(());
        }
        let what = format!(
            "the request took more than the {} s that TENSORIZER_TOTAL_SECONDS allows",
            self.options.total.as_secs_f64()
        );
        Err(Failure::permanent(io::ErrorKind::TimedOut, what))
    }

    /// The error of a request without further attempts.
    pub fn error(&self, failure: Failure) -> Error {
        let io = |error| Error::io(self.action, self.display_address, error);
        failure.ended.unwrap_or_else(|| io(failure.error))
    }

    /// Reports that the request is repeated: for some time, or for some attempts.
    fn report(&self, failure: &Failure, tries: &Tries, time: Option<Duration>) {
        let (attempt, limit) = match time {
            None => (tries.counted, self.options.attempts.to_string()),
            Some(time) => (tries.all, format!("those in {} s", time.as_secs_f64())),
        };
        self.options.traffic.repeated(RepeatedRequest {
            uri: self.display_address.to_owned(),
            error: failure.error.to_string(),
            attempt: attempt + 1,
            limit,
            byte: self.position.get(),
        });
    }

    /// Pauses before the next attempt; the error if there is to be none.
    fn pause(&self, failure: Failure, tries: &mut Tries) -> Result<()> {
        if failure.is_ended() {
            return Err(self.error(failure));
        }
        let kind = failure.error.kind();
        let is_refused = self.opening && kind == io::ErrorKind::ConnectionRefused;
        let is_counted = failure.repeat == Repeat::Attempts && !is_refused;
        tries.count(is_counted, self.position.get());
        let asked = failure.retry_after;
        let backoff = || backoff(tries.without_progress);
        let pause = asked.map_or_else(backoff, |asked| asked.max(FIRST_PAUSE));
        let pause = if is_refused { pause.min(START_PAUSE) } else { pause };
        let out_of_time = clock::since(self.begun).saturating_add(pause) > self.time_allowed();
        let advice = match failure.repeat {
            Repeat::Never => None,
            _ if is_refused && clock::since(self.begun) >= START_TIME => None,
            Repeat::Attempts if !is_refused && tries.counted >= self.options.attempts => {
                Some(format!("TENSORIZER_ATTEMPTS ({})", self.options.attempts))
            }
            _ if !out_of_time => {
                let time = if is_refused { START_TIME } else { self.options.total };
                self.report(&failure, tries, (!is_counted).then_some(time));
                return cancel::sleep(pause, self.cancel);
            }
            _ => Some(format!("TENSORIZER_TOTAL_SECONDS ({})", self.options.total.as_secs_f64())),
        };
        if tries.all == 1 && asked.is_none() {
            return Err(self.error(failure));
        }
        let mut what = format!(
            "{} (at byte {}, after {} tries in {:.1} s",
            failure.error,
            self.position.get(),
            tries.all,
            clock::since(self.begun).as_secs_f32()
        );
        if let Some(asked) = asked {
            what += &format!("; it asks for a pause of {:.0} s", asked.as_secs_f64());
        }
        what += &advice.map_or(")".to_owned(), |setting| format!("; more with {setting})"));
        Err(Error::io(self.action, self.display_address, io::Error::new(kind, what)))
    }
}

/// The failed attempts of one request.
#[derive(Default)]
struct Tries {
    all: u32,
    /// Those since the last progress, at least one.
    without_progress: u32,
    /// Those of them that count for TENSORIZER_ATTEMPTS.
    counted: u32,
    /// The byte that the last one had reached.
    position: u64,
}

impl Tries {
    fn count(&mut self, is_counted: bool, position: u64) {
        let has_progress = position.saturating_sub(self.position) >= BYTES_A_SECOND;
        self.position = position;
        self.all += 1;
        if has_progress {
            (self.without_progress, self.counted) = (1, 0);
        } else {
            self.without_progress += 1;
            self.counted += u32::from(is_counted);
        }
    }
}

/// Repeats a request until it succeeds, fails permanently, or the budget is spent. If a new
/// signature may help, the request is repeated once, which does not count as a retry.
pub fn run<T>(
    budget: &RetryBudget<'_>,
    mut attempt: impl FnMut() -> Result<T, Failure>,
) -> Result<T> {
    let position = budget.position.get();
    let (mut tries, mut renewed) = (Tries { position, ..Tries::default() }, false);
    loop {
        match attempt() {
            Ok(done) => return Ok(done),
            Err(failure) if failure.renewable && !std::mem::replace(&mut renewed, true) => {}
            Err(failure) => budget.pause(failure, &mut tries)?,
        }
    }
}

/// The pause after a number of failed attempts.
fn backoff(failed: u32) -> Duration {
    use std::hash::{BuildHasher as _, RandomState};
    let longest = FIRST_PAUSE.saturating_mul(1 << (failed - 1).min(10)).min(LONGEST_PAUSE);
    // Keeps many clients from retrying at once: the hasher of the standard library is seeded
    // randomly.
    let random = RandomState::new().hash_one(failed) % 1000;
    longest.mul_f64(0.5 + f64::from(u32::try_from(random).unwrap_or(0)) / 2000.0)
}

#[cfg(test)]
#[cfg(any(feature = "clouds", feature = "s3"))]
#[allow(clippy::unwrap_used)]
mod tests {
    use super::*;
    use crate::cancel::Never;

    const HOUR: Duration = Duration::from_secs(3600);

    /// Options for tests on a simulated clock.
    fn options() -> TransportOptions {
        clock::simulate();
        let options = TransportOptions::from_environment().unwrap();
        TransportOptions { total: 24 * HOUR, attempts: 100, ..options }
    }

    fn busy() -> Failure {
        let mut failure = Failure::transient(io::ErrorKind::ConnectionRefused, "busy");
        failure.retry_after = Some(2 * HOUR);
        failure
    }

    #[test]
    fn retry_after_is_obeyed_within_the_total_time() {
        let options = options();
        let (begun, mut attempts) = (clock::now(), 0);
        let budget = RetryBudget::new("reading", "file", &options, &Never);
        budget.position.set(7);
        let outcome = run::<()>(&budget, || {
            attempts += 1;
            Err(busy())
        });
        assert_eq!((attempts, clock::since(begun).as_secs() / 3600), (12, 22));
        let error = outcome.unwrap_err().to_string();
        assert!(error.contains("busy (at byte 7, after 12 tries in 79200."), "{error}");
    }

    #[test]
    fn a_server_that_asks_for_no_pause_is_not_asked_without_one() {
        let options = TransportOptions { total: Duration::from_secs(10), ..options() };
        let budget = RetryBudget::new("reading", "file", &options, &Never);
        let mut attempts = 0;
        let outcome = run::<()>(&budget, || {
            attempts += 1;
            Err(Failure { retry_after: Some(Duration::ZERO), ..busy() }.with_repeat(Repeat::Time))
        });
        assert!(outcome.is_err());
        assert!((90..=101).contains(&attempts), "{attempts} in 10 s");
    }

    #[test]
    fn slow_requests_last_a_day_and_stalled_ones_the_total_time() {
        let options = TransportOptions { total: HOUR, ..options() };
        let budget = RetryBudget::new("reading", "file", &options, &Never);
        for _ in 0..24 * 360 {
            budget.received(10 * BYTES_A_SECOND);
            clock::sleep(Duration::from_secs(10));
            assert!(budget.check().is_ok());
        }
        clock::sleep(HOUR / 2);
        assert!(budget.check().is_ok());
        clock::sleep(HOUR);
        let failure = budget.check().unwrap_err();
        assert_eq!(failure.error.kind(), io::ErrorKind::TimedOut);
        assert_eq!(failure.repeat, Repeat::Never);
    }

    #[test]
    fn a_cancelled_call_ends_its_pause() {
        let (options, asked) = (options(), AtomicU64::new(0));
        let begun = clock::now();
        let cancel = || match asked.fetch_add(1, Ordering::Relaxed) {
            0..1000 => Ok(()),
            _ => Err(Error::Cancelled),
        };
        let budget = RetryBudget::new("reading", "file", &options, &cancel);
        let outcome = run::<()>(&budget, || Err(busy()));
        assert!(matches!(outcome, Err(Error::Cancelled)));
        assert!((40..60).contains(&clock::since(begun).as_secs()), "asked every 50 ms");
    }

    #[test]
    fn an_expired_signature_is_renewed_once() {
        let options = options();
        let budget = RetryBudget::new("reading", "file", &options, &Never);
        let expired = |attempts: &mut u32| {
            *attempts += 1;
            Failure::permanent(io::ErrorKind::PermissionDenied, "expired").if_renewable(true)
        };
        let mut attempts = 0;
        let outcome = run::<()>(&budget, || Err(expired(&mut attempts)));
        assert_eq!(attempts, 2);
        assert!(outcome.unwrap_err().to_string().ends_with("expired"));
    }
}
