//! Which failures are worth another try, and how long to wait before it.

use std::io;
use std::time::{Duration, Instant};

use super::NetOptions;
use crate::error::{Error, Result};

/// The first pause; each further one is twice as long, up to [`LONGEST`], less up to a half.
const FIRST: Duration = Duration::from_millis(100);
const LONGEST: Duration = Duration::from_secs(10);
/// How often a pause looks whether the call was given up.
const POLL: Duration = Duration::from_millis(50);

/// Why a request failed.
#[derive(Debug)]
pub struct Failure {
    pub error: io::Error,
    pub again: bool,
    /// What the server asked to wait.
    pub after: Option<Duration>,
}

impl Failure {
    /// One that another try would not cure.
    pub fn lasting(kind: io::ErrorKind, what: impl Into<String>) -> Self {
        Failure { error: io::Error::new(kind, what.into()), again: false, after: None }
    }

    /// One that another try may cure.
    pub fn passing(kind: io::ErrorKind, what: impl Into<String>) -> Self {
        Failure { error: io::Error::new(kind, what.into()), again: true, after: None }
    }
}

/// The tries of one request.
pub struct Retry<'o> {
    action: &'static str,
    options: &'o NetOptions,
    begun: Instant,
    failed: u32,
    /// No byte has been read yet: a server that is not there is not waited for.
    opening: bool,
}

impl<'o> Retry<'o> {
    pub fn new(action: &'static str, options: &'o NetOptions, opening: bool) -> Self {
        Retry { action, options, begun: Instant::now(), failed: 0, opening }
    }

    /// Waits before the next try, or says why there is none. `position` is the next byte wanted.
    pub fn wait(
        &mut self,
        failure: Failure,
        position: u64,
        shown: &str,
        go_on: &dyn Fn() -> bool,
    ) -> Result<()> {
        if !go_on() {
            return Err(Error::Cancelled);
        }
        self.failed += 1;
        let kind = failure.error.kind();
        let again = failure.again && !(self.opening && kind == io::ErrorKind::ConnectionRefused);
        let pause = failure.after.unwrap_or_else(|| self.pause()).min(self.options.total);
        let over = self.begun.elapsed() + pause > self.options.total;
        if !again || self.failed >= self.options.attempts || over {
            let mut what = failure.error.to_string();
            if self.failed > 1 {
                let seconds = self.begun.elapsed().as_secs_f32();
                what += &format!(
                    " (at byte {position}, after {} tries in {seconds:.1} s)",
                    self.failed
                );
            }
            return Err(Error::io(self.action, shown, io::Error::new(kind, what)));
        }
        let until = Instant::now() + pause;
        while let Some(left) = until.checked_duration_since(Instant::now()) {
            if !go_on() {
                return Err(Error::Cancelled);
            }
            std::thread::sleep(left.min(POLL));
        }
        Ok(())
    }

    fn pause(&self) -> Duration {
        let longest = FIRST.saturating_mul(1 << (self.failed - 1).min(10)).min(LONGEST);
        // Any source of disorder will do: the hasher of the standard library is seeded randomly.
        use std::hash::{BuildHasher as _, RandomState};
        let random = RandomState::new().hash_one(self.failed) % 1000;
        longest.mul_f64(0.5 + f64::from(u32::try_from(random).unwrap_or(0)) / 2000.0)
    }
}
