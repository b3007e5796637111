//! Request bodies that count the sent bytes, so that slow uploads do not count as stalled.

use std::pin::Pin;
use std::sync::Arc;
use std::sync::atomic::{AtomicU64, Ordering};
use std::task::{Context, Poll};

use bytes::Bytes;
use http_body::{Frame, SizeHint};

/// Bytes handed to a connection at a time. hyper copies them, and buffers up to 400 KiB.
const STEP: usize = 64 << 10;

/// A body that counts the bytes that the connection has accepted.
pub struct UploadBody<B> {
    body: B,
    unsent: Bytes,
    sent: Arc<AtomicU64>,
}

impl<B> UploadBody<B> {
    pub fn new(body: B, sent: Arc<AtomicU64>) -> Self {
        UploadBody { body, unsent: Bytes::new(), sent }
    }
}

impl<B: http_body::Body<Data = Bytes> + Unpin> http_body::Body for UploadBody<B> {
    type Data = Bytes;
    type Error = B::Error;

    fn poll_frame(
        mut self: Pin<&mut Self>,
        context: &mut Context<'_>,
    ) -> Poll<Option<Result<Frame<Bytes>, B::Error>>> {
        if self.unsent.is_empty() {
            match Pin::new(&mut self.body).poll_frame(context) {
                Poll::Ready(Some(Ok(frame))) => match frame.into_data() {
                    Ok(bytes) => self.unsent = bytes,
                    Err(other) => return Poll::Ready(Some(Ok(other))),
                },
                other => return other,
            }
        }
        let len = self.unsent.len().min(STEP);
        let now = self.unsent.split_to(len);
        self.sent.fetch_add(len as u64, Ordering::Relaxed);
        Poll::Ready(Some(Ok(Frame::data(now))))
    }

    fn is_end_stream(&self) -> bool {
        self.unsent.is_empty() && self.body.is_end_stream()
    }

    fn size_hint(&self) -> SizeHint {
        let (len, unsent) = (self.body.size_hint().exact(), self.unsent.len() as u64);
        len.map_or_else(SizeHint::new, |len| SizeHint::with_exact(len + unsent))
    }
}
