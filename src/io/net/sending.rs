//! Bodies that are sent show how far they have come: slow is not silent.

use std::pin::Pin;
use std::sync::Arc;
use std::sync::atomic::{AtomicU64, Ordering};
use std::task::{Context, Poll};
use std::time::Duration;

use bytes::Bytes;
use http_body::{Frame, SizeHint};

use super::timer;

/// Bytes that are handed to a connection at a time.
const STEP: usize = 256 << 10;

/// A body that counts what was taken from it.
pub struct Counted<B> {
    body: B,
    next: Bytes,
    sent: Arc<AtomicU64>,
}

impl<B> Counted<B> {
    pub fn new(body: B, sent: Arc<AtomicU64>) -> Self {
        Counted { body, next: Bytes::new(), sent }
    }
}

impl<B: http_body::Body<Data = Bytes> + Unpin> http_body::Body for Counted<B> {
    type Data = Bytes;
    type Error = B::Error;

    fn poll_frame(
        mut self: Pin<&mut Self>,
        context: &mut Context<'_>,
    ) -> Poll<Option<Result<Frame<Bytes>, B::Error>>> {
        if self.next.is_empty() {
            match Pin::new(&mut self.body).poll_frame(context) {
                Poll::Ready(Some(Ok(frame))) => match frame.into_data() {
                    Ok(bytes) => self.next = bytes,
                    Err(other) => return Poll::Ready(Some(Ok(other))),
                },
                other => return other,
            }
        }
        let len = self.next.len().min(STEP);
        let now = self.next.split_to(len);
        self.sent.fetch_add(len as u64, Ordering::Relaxed);
        Poll::Ready(Some(Ok(Frame::data(now))))
    }

    fn is_end_stream(&self) -> bool {
        self.next.is_empty() && self.body.is_end_stream()
    }

    fn size_hint(&self) -> SizeHint {
        match (self.body.size_hint().exact(), self.next.len() as u64) {
            (Some(len), next) => SizeHint::with_exact(len + next),
            (None, _) => SizeHint::new(),
        }
    }
}

/// What a request gives; None where its server has neither taken bytes nor answered for so long.
pub async fn unless_silent<T>(
    stall: Duration,
    sent: &AtomicU64,
    request: impl Future<Output = T>,
) -> Option<T> {
    let mut request = std::pin::pin!(request);
    loop {
        let before = sent.load(Ordering::Relaxed);
        if let Ok(answer) = timer::timeout(stall, &mut request).await {
            return Some(answer);
        }
        if sent.load(Ordering::Relaxed) == before {
            return None;
        }
    }
}

#[cfg(test)]
#[allow(clippy::unwrap_used)]
mod tests {
    use super::*;
    use crate::io::net::timer::{elapsed, pause, sleep};

    const STALL: Duration = Duration::from_secs(60);

    /// Time passes whenever all that could run waits for it.
    fn run<T>(work: impl Future<Output = T>) -> T {
        pause();
        tokio::runtime::Builder::new_current_thread().build().unwrap().block_on(work)
    }

    #[test]
    fn slow_for_a_day_is_not_silent() {
        let sent = AtomicU64::new(0);
        let (answer, took) = run(async {
            let request = async {
                for _ in 0..24 * 60 {
                    sleep(STALL - Duration::from_millis(1)).await;
                    sent.fetch_add(1, Ordering::Relaxed);
                }
                "done"
            };
            (unless_silent(STALL, &sent, request).await, elapsed())
        });
        assert_eq!((answer, took.as_secs() / 3600), (Some("done"), 23));
    }

    #[test]
    fn silent_is_silent_after_so_long() {
        let sent = AtomicU64::new(0);
        let (answer, took) = run(async {
            let request = async {
                sleep(STALL / 2).await;
                sent.fetch_add(1, Ordering::Relaxed);
                std::future::pending::<()>().await
            };
            (unless_silent(STALL, &sent, request).await, elapsed())
        });
        assert_eq!((answer, took.as_secs()), (None, 120));
    }
}
