//! The limit of the direct reads that all readers of one load have under way together.

use std::sync::{Condvar, Mutex, MutexGuard};
use std::time::Instant;

use crate::sys::sync::unpoisoned;

/// Counts reads under way, up to a maximum. While a reader waits for the last reads of a batch, or
/// processes bytes, other readers can use its share. So the disk is always given the maximum number
/// of reads.
#[derive(Debug)]
pub struct InFlightLimit {
    max_reads: usize,
    state: Mutex<InFlightState>,
    ended: Condvar,
}

#[derive(Debug, Default)]
struct InFlightState {
    under_way: usize,
    /// Readers that wait.
    waiting: usize,
    /// The time of the first read, and of the last change.
    first_begin: Option<Instant>,
    last_change: Option<Instant>,
    /// The sum of reads under way, each times the nanoseconds that it took, until the last change.
    read_nanos: u128,
}

impl InFlightState {
    fn set_under_way(&mut self, now: usize) {
        let time = Instant::now();
        self.first_begin.get_or_insert(time);
        if let Some(before) = self.last_change.replace(time) {
            self.read_nanos += self.under_way as u128 * time.duration_since(before).as_nanos();
        }
        self.under_way = now;
    }
}

impl InFlightLimit {
    /// Allows `max_reads` reads at once, or one if that is 0.
    pub fn new(max_reads: usize) -> Self {
        let (state, ended) = (Mutex::default(), Condvar::new());
        InFlightLimit { max_reads: max_reads.max(1), state, ended }
    }

    fn state(&self) -> MutexGuard<'_, InFlightState> {
        unpoisoned(self.state.lock())
    }

    /// Counts one more read. If the maximum is reached, it waits if `wait` is true, else it returns
    /// false. A reader may wait only while it has no reads under way itself: those of others then
    /// end.
    pub fn acquire(&self, wait: bool) -> bool {
        let mut state = self.state();
        while state.under_way >= self.max_reads {
            if !wait {
                return false;
            }
            state.waiting += 1;
            state = unpoisoned(self.ended.wait(state));
            state.waiting -= 1;
        }
        let more = state.under_way + 1;
        state.set_under_way(more);
        true
    }

    /// Counts reads that have ended.
    pub fn release(&self, reads: usize) {
        if reads == 0 {
            return;
        }
        let mut state = self.state();
        let fewer = state.under_way.saturating_sub(reads);
        state.set_under_way(fewer);
        (0..reads.min(state.waiting)).for_each(|_| self.ended.notify_one());
    }

    /// The average number of reads under way from the first to the last, in thousandths, and the
    /// maximum. The average is None if there were no reads.
    pub fn mean_and_limit(&self) -> (Option<u64>, usize) {
        let state = self.state();
        let time = state.first_begin.zip(state.last_change);
        let nanos = time.map_or(0, |(first_begin, last_change)| {
            last_change.duration_since(first_begin).as_nanos()
        });
        let mean = (state.read_nanos * 1000).checked_div(nanos);
        (mean.and_then(|mean| u64::try_from(mean).ok()), self.max_reads)
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use std::sync::atomic::{AtomicUsize, Ordering};
    use std::thread;

    #[test]
    fn reads_in_flight_are_limited_and_every_reader_proceeds() {
        let (in_flight, now, max_reads) =
            (InFlightLimit::new(3), AtomicUsize::new(0), AtomicUsize::new(0));
        assert_eq!(in_flight.mean_and_limit(), (None, 3));
        thread::scope(|scope| {
            for _ in 0..7 {
                scope.spawn(|| {
                    for _ in 0..200 {
                        let count =
                            1 + usize::from(in_flight.acquire(true) && in_flight.acquire(false));
                        max_reads.fetch_max(
                            now.fetch_add(count, Ordering::SeqCst) + count,
                            Ordering::SeqCst,
                        );
                        thread::yield_now();
                        now.fetch_sub(count, Ordering::SeqCst);
                        in_flight.release(count);
                    }
                });
            }
        });
        assert!(max_reads.into_inner() <= 3);
        let (mean, limit) = in_flight.mean_and_limit();
        assert!(mean.is_some_and(|mean| mean <= 3000) && limit == 3);
        assert!(in_flight.acquire(false) && in_flight.acquire(false) && in_flight.acquire(true));
        assert!(!in_flight.acquire(false));
    }
}
