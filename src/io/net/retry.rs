//! Which failures are worth another try, how long to wait before it, and how long all tries may take.

use std::io;
use std::sync::Arc;
use std::sync::atomic::{AtomicU64, Ordering};
use std::time::{Duration, Instant};

use super::NetOptions;
use crate::cancel::{self, Cancel};
use crate::error::{Error, Result};
use crate::sys::clock;

/// The first pause; each further one is twice as long, up to [`LONGEST`], less up to a half.
const FIRST: Duration = Duration::from_millis(100);
const LONGEST: Duration = Duration::from_secs(10);
/// A request may take a second more for each so many bytes that it has moved: slow is not silent.
const SLOWEST: u64 = 64 << 10;

/// Why a request failed.
#[derive(Debug)]
pub struct Failure {
    pub error: io::Error,
    again: bool,
    /// A new signature may cure it, once: credentials or a signed address have expired, or the bucket
    /// is in another region.
    renewable: bool,
    /// What the server asked to wait.
    after: Option<Duration>,
    /// The call is to end, with this.
    given_up: Option<Error>,
}

impl Failure {
    /// One that another try would not cure.
    pub fn lasting(kind: io::ErrorKind, what: impl Into<String>) -> Self {
        let error = io::Error::new(kind, what.into());
        Failure { error, again: false, renewable: false, after: None, given_up: None }
    }

    /// One that another try may cure.
    pub fn passing(kind: io::ErrorKind, what: impl Into<String>) -> Self {
        Failure { again: true, ..Self::lasting(kind, what) }
    }

    /// The same, with what the server asked to wait before the next try.
    pub fn not_before(self, after: Option<Duration>) -> Self {
        Failure { after, ..self }
    }

    /// The same, where a new signature may cure it.
    pub fn if_renewable(self, renewable: bool) -> Self {
        Failure { renewable, ..self }
    }

    /// The same, and another try may cure a refusal too.
    pub fn or_again(self, elsewhere: bool) -> Self {
        use io::ErrorKind::{NotFound, Other, PermissionDenied};
        let refused = matches!(self.error.kind(), NotFound | PermissionDenied | Other);
        Failure { again: self.again || (elsewhere && refused), ..self }
    }

    /// Whether another try may cure it.
    #[cfg(feature = "hf")]
    pub fn is_passing(&self) -> bool {
        self.again
    }

    /// Whether the call is to end.
    pub fn is_given_up(&self) -> bool {
        self.given_up.is_some()
    }

    /// The call is to end.
    pub fn given_up(error: Error) -> Self {
        let given_up = Some(error);
        Failure { given_up, ..Self::lasting(io::ErrorKind::Interrupted, "given up") }
    }
}

/// The tries of one request, and the time that they may take together.
pub struct Tries<'o> {
    action: &'static str,
    options: &'o NetOptions,
    cancel: &'o dyn Cancel,
    begun: Instant,
    moved: AtomicU64,
    /// Counts what is being sent, and began at the second number.
    sending: (Arc<AtomicU64>, u64),
    failed: u32,
    /// It was signed anew.
    renewed: bool,
    /// No byte has been read yet: a server that is not there is not waited for.
    opening: bool,
}

impl<'o> Tries<'o> {
    /// `action` is what is being done, as a gerund.
    pub fn new(action: &'static str, options: &'o NetOptions, cancel: &'o dyn Cancel) -> Self {
        Tries {
            action,
            options,
            cancel,
            begun: clock::now(),
            moved: AtomicU64::new(0),
            sending: (Arc::default(), 0),
            failed: 0,
            renewed: false,
            opening: false,
        }
    }

    /// The same for a first request.
    pub fn opening(self) -> Self {
        Tries { opening: true, ..self }
    }

    /// The same for a request that went on before for some time, and moved some bytes.
    pub fn resumed(self, spent: Duration, moved: u64) -> Self {
        let begun = self.begun.checked_sub(spent).unwrap_or(self.begun);
        Tries { begun, moved: AtomicU64::new(moved), ..self }
    }

    /// Counts bytes that have arrived, or were sent.
    pub fn moved(&self, bytes: u64) {
        self.moved.fetch_add(bytes, Ordering::Relaxed);
        self.cancel.moved(bytes);
    }

    /// Watches what counts the bytes that the next try sends.
    pub fn watch(&mut self, sent: &Arc<AtomicU64>) {
        self.moved.fetch_add(self.sent(), Ordering::Relaxed);
        self.sending = (Arc::clone(sent), sent.load(Ordering::Relaxed));
    }

    fn sent(&self) -> u64 {
        let (sent, begun_at) = &self.sending;
        sent.load(Ordering::Relaxed).saturating_sub(*begun_at)
    }

    fn allowed(&self) -> Duration {
        let moved = self.moved.load(Ordering::Relaxed).saturating_add(self.sent());
        let more = Duration::from_secs(moved / SLOWEST);
        self.options.total.saturating_add(more)
    }

    /// Whether the request that is under way may go on.
    pub fn check(&self) -> Result<(), Failure> {
        self.cancel.check().map_err(Failure::given_up)?;
        if clock::since(self.begun) <= self.allowed() {
            return Ok(());
        }
        let what = format!(
            "the request took more than the {} s that TENSORIZER_TOTAL_SECONDS allows",
            self.options.total.as_secs_f64()
        );
        Err(Failure::lasting(io::ErrorKind::TimedOut, what))
    }

    /// True if the request is to be signed anew, and tried at once: only once.
    pub fn renews(&mut self, failure: &Failure) -> bool {
        failure.renewable && !std::mem::replace(&mut self.renewed, true)
    }

    /// Waits before the next try, or says why there is none. `position` is the next byte wanted.
    pub fn wait(&mut self, failure: Failure, position: u64, shown: &str) -> Result<()> {
        if let Some(error) = failure.given_up {
            return Err(error);
        }
        self.failed += 1;
        let kind = failure.error.kind();
        let again = failure.again && !(self.opening && kind == io::ErrorKind::ConnectionRefused);
        let pause = failure.after.unwrap_or_else(|| self.pause()).min(self.options.total);
        let over = clock::since(self.begun).saturating_add(pause) > self.allowed();
        if !again || self.failed >= self.options.attempts || over {
            let mut what = failure.error.to_string();
            if self.failed > 1 {
                let seconds = clock::since(self.begun).as_secs_f32();
                what += &format!(
                    " (at byte {position}, after {} tries in {seconds:.1} s)",
                    self.failed
                );
            }
            return Err(Error::io(self.action, shown, io::Error::new(kind, what)));
        }
        cancel::sleep(pause, self.cancel)
    }

    /// The error of a request that is not tried again.
    pub fn last(&self, failure: Failure, shown: &str) -> Error {
        let named = |error| Error::io(self.action, shown, error);
        failure.given_up.unwrap_or_else(|| named(failure.error))
    }

    fn pause(&self) -> Duration {
        let longest = FIRST.saturating_mul(1 << (self.failed - 1).min(10)).min(LONGEST);
        // Any source of disorder will do: the hasher of the standard library is seeded randomly.
        use std::hash::{BuildHasher as _, RandomState};
        let random = RandomState::new().hash_one(self.failed) % 1000;
        longest.mul_f64(0.5 + f64::from(u32::try_from(random).unwrap_or(0)) / 2000.0)
    }
}

#[cfg(test)]
#[cfg(any(feature = "clouds", feature = "s3"))]
#[allow(clippy::unwrap_used)]
mod tests {
    use super::*;
    use crate::cancel::Never;

    const HOUR: Duration = Duration::from_secs(3600);

    /// Hours pass at once, and so do waits.
    fn options() -> NetOptions {
        clock::simulate();
        let options = NetOptions::from_environment().unwrap();
        NetOptions { total: 24 * HOUR, attempts: 100, ..options }
    }

    fn busy() -> Failure {
        Failure::passing(io::ErrorKind::ConnectionRefused, "busy").not_before(Some(2 * HOUR))
    }

    #[test]
    fn a_server_that_asks_for_hours_is_waited_for_as_long_as_all_tries_may_take() {
        let options = options();
        let (begun, mut tries) = (clock::now(), Tries::new("reading", &options, &Never));
        let waited = (0..).take_while(|_| tries.wait(busy(), 7, "file").is_ok()).count();
        assert_eq!(waited, 11);
        assert_eq!(clock::since(begun).as_secs() / 3600, 22);
        let error = tries.wait(busy(), 7, "file").unwrap_err().to_string();
        assert!(error.contains("busy (at byte 7, after 13 tries in 79200."), "{error}");
    }

    #[test]
    fn a_slow_request_goes_on_for_a_day_and_a_silent_one_for_as_long_as_is_allowed() {
        let options = NetOptions { total: HOUR, ..options() };
        let tries = Tries::new("reading", &options, &Never);
        for _ in 0..24 * 360 {
            tries.moved(10 * SLOWEST);
            clock::sleep(Duration::from_secs(10));
            assert!(tries.check().is_ok());
        }
        clock::sleep(HOUR / 2);
        assert!(tries.check().is_ok());
        clock::sleep(HOUR);
        let failure = tries.check().unwrap_err();
        assert_eq!(failure.error.kind(), io::ErrorKind::TimedOut);
        assert!(!failure.again);
    }

    #[test]
    fn who_gives_up_waits_no_longer() {
        let (options, asked) = (options(), AtomicU64::new(0));
        let begun = clock::now();
        let cancel = || match asked.fetch_add(1, Ordering::Relaxed) {
            0..1000 => Ok(()),
            _ => Err(Error::Cancelled),
        };
        let outcome = Tries::new("reading", &options, &cancel).wait(busy(), 0, "file");
        assert!(matches!(outcome, Err(Error::Cancelled)));
        assert!((40..60).contains(&clock::since(begun).as_secs()), "asked every 50 ms");
    }
}
