//! A stream that can only be read front to back: a pipe, a socket, standard input.

use std::io::{IoSliceMut, Read};
use std::sync::{Mutex, PoisonError};

use super::{ReadAt, Traits};
use crate::error::{Error, Result};

/// Serves reads at rising positions; bytes in between are read and dropped.
pub struct PipeSource<R> {
    stream: Mutex<(R, u64)>,
    uri: String,
}

impl<R: Read + Send> PipeSource<R> {
    /// `uri` is what messages call it. Position 0 is the stream's next byte.
    pub fn new(stream: R, uri: impl Into<String>) -> Self {
        Self::new_at(stream, uri, 0)
    }

    /// The same for a stream whose next byte is at another position.
    pub fn new_at(stream: R, uri: impl Into<String>, position: u64) -> Self {
        PipeSource { stream: Mutex::new((stream, position)), uri: uri.into() }
    }
}

impl<R: Read + Send> ReadAt for PipeSource<R> {
    fn uri(&self) -> &str {
        &self.uri
    }

    fn traits(&self) -> Traits {
        Traits { len: None, max_readers: 1, default_readers: 1, request_len: 8 << 20, merge_gap: 0 }
    }

    fn read_at(&self, offset: u64, buffers: &mut [IoSliceMut<'_>]) -> Result<usize> {
        let mut guard = self.stream.lock().unwrap_or_else(PoisonError::into_inner);
        let (stream, position) = &mut *guard;
        let gap = offset.checked_sub(*position).ok_or_else(|| {
            Error::Unsupported(format!(
                "`{}` can only be read front to back: byte {offset} was passed at byte {position}",
                self.uri
            ))
        })?;
        let fail = |e| Error::io("reading", &self.uri, e);
        *position += std::io::copy(&mut stream.take(gap), &mut std::io::sink()).map_err(fail)?;
        if *position < offset {
            return Ok(0);
        }
        let read = stream.read_vectored(buffers).map_err(fail)?;
        *position += read as u64;
        Ok(read)
    }
}
