//! Turns of requests to a server that serves fewer at a time than there are readers. Once it has
//! refused one reader while it served others, only so many run at a time, and the rest wait.

use std::cell::Cell;

use crate::cancel;
use crate::io::transport::{Failure, RetryBudget};
use crate::sys::fork_safe_mutex::ForkSafeMutex;
use crate::sys::process::PerProcess;

/// Requests that are served for each one that may run, until one more is tried.
const SERVED_UNTIL_MORE: usize = 8;

/// The requests that run, and how many may. A forked child has turns of its own.
#[derive(Default)]
pub struct Turns(PerProcess<ForkSafeMutex<State>>);

#[derive(Default)]
struct State {
    running: usize,
    /// Those that have got a response.
    served: usize,
    /// None while the server has refused no request.
    allowed: Option<usize>,
    /// Requests that were served since `allowed` changed.
    served_since: usize,
}

/// A request that runs. Its end is that of this value.
pub struct Turn<'t> {
    turns: &'t Turns,
    is_served: Cell<bool>,
}

impl Turns {
    /// Waits until a request may run. The time does not count for its budget.
    pub fn take(&self, budget: &RetryBudget<'_>) -> Result<Turn<'_>, Failure> {
        while !self.begin() {
            budget.wait(cancel::POLL)?;
        }
        Ok(Turn { turns: self, is_served: Cell::new(false) })
    }

    fn begin(&self) -> bool {
        let mut state = self.0.get().lock();
        let may_run = state.allowed.is_none_or(|allowed| state.running < allowed);
        state.running += usize::from(may_run);
        may_run
    }
}

impl Turn<'_> {
    /// The server has sent the head of a response with what was requested.
    pub fn served(&self) {
        if !self.is_served.replace(true) {
            let mut state = self.turns.0.get().lock();
            state.served += 1;
            state.served_since += 1;
            let more = state.allowed.filter(|of| state.served_since > of * SERVED_UNTIL_MORE);
            if let Some(allowed) = more {
                (state.allowed, state.served_since) = (Some(allowed + 1), 0);
            }
        }
    }

    /// The server has refused it, or not answered. Returns how many may run from now on, if others
    /// are served.
    pub fn refused(&self) -> Option<usize> {
        let mut state = self.turns.0.get().lock();
        let others = state.served;
        if self.is_served.get() || others == 0 {
            return None;
        }
        (state.allowed, state.served_since) = (Some(others), 0);
        Some(others)
    }
}

impl Drop for Turn<'_> {
    fn drop(&mut self) {
        let mut state = self.turns.0.get().lock();
        state.running = state.running.saturating_sub(1);
        state.served -= usize::from(self.is_served.get()).min(state.served);
    }
}

#[cfg(test)]
#[cfg(any(feature = "clouds", feature = "s3"))]
#[allow(clippy::unwrap_used)]
mod tests {
    use super::*;
    use crate::cancel::Never;
    use crate::io::transport::TransportOptions;

    #[test]
    fn as_many_run_as_were_served_when_one_was_refused() {
        let options = TransportOptions::from_environment().unwrap();
        let budget = RetryBudget::new("reading", "file", &options, &Never);
        let turns = Turns::default();
        let take = || turns.take(&budget).unwrap();
        let [one, two, three, four] = [take(), take(), take(), take()];
        assert_eq!(three.refused(), None, "nobody is served");
        one.served();
        two.served();
        assert_eq!((three.refused(), four.refused()), (Some(2), Some(2)));
        drop((three, four));
        assert!(!turns.begin());
        drop(one);
        let other = take();
        assert!(!turns.begin());
        drop((two, other));
        // One more is tried after some requests.
        let (before, now) = (take(), take());
        assert!(!turns.begin());
        drop((before, now));
        for _ in 0..=2 * SERVED_UNTIL_MORE {
            take().served();
        }
        let three = [take(), take(), take()];
        assert!(!turns.begin());
        drop(three);
    }
}
