//! Time limits of requests, on tokio's clock or on one that a test drives.

#[cfg(not(test))]
pub use tokio::time::{sleep, timeout};

#[cfg(test)]
pub use paused::{elapsed, pause, sleep, timeout};

#[cfg(test)]
mod paused {
    use std::cell::{Cell, RefCell};
    use std::collections::BTreeSet;
    use std::pin::{Pin, pin};
    use std::task::{Context, Poll};
    use std::time::Duration;

    thread_local! {
        /// The time of this thread's clock once it is driven by its waits.
        static NOW: Cell<Option<Duration>> = const { Cell::new(None) };
        /// The ends of all waits, the earliest first.
        static WAITS: RefCell<BTreeSet<(Duration, u64)>> = const { RefCell::new(BTreeSet::new()) };
        static LAST: Cell<u64> = const { Cell::new(0) };
    }

    /// Stops this thread's clock: from now on it jumps to the next end whenever all work waits.
    pub fn pause() {
        NOW.set(Some(Duration::ZERO));
    }

    /// Time since the clock was stopped.
    pub fn elapsed() -> Duration {
        NOW.get().unwrap_or(Duration::ZERO)
    }

    /// The result of a future, unless it takes longer.
    pub async fn timeout<F: Future>(limit: Duration, work: F) -> Result<F::Output, ()> {
        if NOW.get().is_none() {
            return tokio::time::timeout(limit, work).await.map_err(|_| ());
        }
        let (mut work, mut wait) = (pin!(work), Wait::new(limit));
        std::future::poll_fn(|context| {
            if let Poll::Ready(result) = work.as_mut().poll(context) {
                return Poll::Ready(Ok(result));
            }
            Pin::new(&mut wait).poll(context).map(Err)
        })
        .await
    }

    /// Waits, on a clock that was stopped.
    pub async fn sleep(time: Duration) {
        Wait::new(time).await;
    }

    struct Wait {
        end: Duration,
        number: u64,
        /// True once it has let the other waits be polled.
        waited: bool,
    }

    impl Wait {
        fn new(time: Duration) -> Self {
            LAST.set(LAST.get() + 1);
            let (end, number) = (elapsed() + time, LAST.get());
            WAITS.with_borrow_mut(|waits| waits.insert((end, number)));
            Wait { end, number, waited: false }
        }
    }

    impl Future for Wait {
        type Output = ();

        fn poll(mut self: Pin<&mut Self>, context: &mut Context<'_>) -> Poll<()> {
            let next = WAITS.with_borrow(|waits| waits.first() == Some(&(self.end, self.number)));
            if elapsed() < self.end && !(next && self.waited) {
                self.waited = true;
                context.waker().wake_by_ref();
                return Poll::Pending;
            }
            NOW.set(Some(elapsed().max(self.end)));
            Poll::Ready(())
        }
    }

    impl Drop for Wait {
        fn drop(&mut self) {
            WAITS.with_borrow_mut(|waits| waits.remove(&(self.end, self.number)));
        }
    }
}
