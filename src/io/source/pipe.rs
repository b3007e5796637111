//! A stream that can only be read front to back: a pipe, a socket, standard input.
// A broken invariant ends the call by a panic that its boundary catches.
#![allow(clippy::indexing_slicing)]

use std::fs::File;
use std::io::{self, Read};
use std::sync::{Arc, Mutex, MutexGuard};

use super::{ReadAt, Traits};
use crate::cancel::{self, Cancel, POLL};
use crate::error::{Error, Result};
use crate::mem::Buffers;
use crate::memory_limit::CONNECTION;
use crate::sys::process::Maker;

/// Bytes that pass through a buffer at a time.
const STEP: usize = 64 << 10;

/// See [`ReadAt::beside`].
pub type Opener = Arc<dyn Fn(&str, &dyn Cancel) -> Result<Option<Arc<dyn ReadAt>>> + Send + Sync>;

/// Bytes that come front to back.
pub trait Stream: Send {
    /// Reads some of the next bytes; 0 only at the end.
    fn read_next(&mut self, buffers: &mut Buffers<'_>, cancel: &dyn Cancel) -> io::Result<usize>;

    /// What opens files beside the stream's, where that is known.
    fn opener(&self) -> Option<Opener> {
        None
    }
}

impl<R: Read + Send> Stream for R {
    fn read_next(&mut self, buffers: &mut Buffers<'_>, cancel: &dyn Cancel) -> io::Result<usize> {
        // What is to be read into need not be initialised, and others' readers may look at it.
        let mut bytes = vec![0; buffers.left().min(STEP)];
        loop {
            cancel.check().map_err(io::Error::other)?;
            match self.read(&mut bytes) {
                // A signal that the caller may have handled.
                Err(e) if e.kind() == io::ErrorKind::Interrupted => {}
                other => return other.map(|read| buffers.put(bytes.get(..read).unwrap_or(&[]))),
            }
        }
    }
}

/// A pipe, a socket or a terminal, on which a read may wait for ever.
pub struct Pipe(pub File);

impl Stream for Pipe {
    fn read_next(&mut self, buffers: &mut Buffers<'_>, cancel: &dyn Cancel) -> io::Result<usize> {
        loop {
            cancel.check().map_err(io::Error::other)?;
            if !crate::sys::wait_readable(&self.0, POLL)? {
                continue;
            }
            match crate::sys::read_vectored(&self.0, buffers) {
                // Somebody else has taken the bytes, or a signal came that the caller may have handled.
                Err(e)
                    if matches!(
                        e.kind(),
                        io::ErrorKind::WouldBlock | io::ErrorKind::Interrupted
                    ) => {}
                other => return other,
            }
        }
    }
}

/// Serves reads at rising positions; bytes in between are read and dropped.
pub struct PipeSource<S> {
    stream: Mutex<(S, u64)>,
    maker: Maker,
    uri: String,
}

impl<S: Stream> PipeSource<S> {
    /// `uri` is what messages call it. Position 0 is the stream's next byte.
    pub fn new(stream: S, uri: impl Into<String>) -> Self {
        Self::new_at(stream, uri, 0)
    }

    /// The same for a stream whose next byte is at another position.
    pub fn new_at(stream: S, uri: impl Into<String>, position: u64) -> Self {
        PipeSource { stream: Mutex::new((stream, position)), maker: Maker::this(), uri: uri.into() }
    }

    /// The stream, once nobody else reads it.
    fn turn(&self, cancel: &dyn Cancel) -> Result<MutexGuard<'_, (S, u64)>> {
        if self.maker.is_here() {
            return cancel::lock(&self.stream, cancel);
        }
        self.stream.try_lock().map_err(|_| {
            Error::Closed(format!(
                "`{}` was being read by a thread of the process that this one was forked off",
                self.uri
            ))
        })
    }

    fn failed(&self, error: io::Error) -> Error {
        // What ended the call passed through the stream's errors.
        match error.downcast::<Error>() {
            Ok(error) => error,
            Err(error) => Error::io("reading", &self.uri, error),
        }
    }
}

impl<S: Stream> ReadAt for PipeSource<S> {
    fn uri(&self) -> &str {
        &self.uri
    }

    fn traits(&self) -> Traits {
        Traits {
            len: None,
            max_readers: 1,
            first_readers: 1,
            most_readers: 1,
            request_len: 8 << 20,
            merge_gap: 0,
            reader_memory: CONNECTION,
        }
    }

    fn read_at(
        &self,
        offset: u64,
        buffers: &mut Buffers<'_>,
        cancel: &dyn Cancel,
    ) -> Result<usize> {
        let mut guard = self.turn(cancel)?;
        let (stream, position) = &mut *guard;
        let mut gap = offset.checked_sub(*position).ok_or_else(|| {
            Error::Unsupported(format!(
                "`{}` can only be read front to back: byte {offset} was passed at byte {position}",
                self.uri
            ))
        })?;
        let mut unwanted = vec![0; STEP.min(usize::try_from(gap).unwrap_or(STEP))];
        while gap > 0 {
            let len = unwanted.len().min(usize::try_from(gap).unwrap_or(STEP));
            let step = &mut unwanted[..len];
            let read = stream.read_next(&mut Buffers::of(step), cancel);
            match read.map_err(|e| self.failed(e))? {
                0 => return Ok(0),
                read => (gap, *position) = (gap - read as u64, *position + read as u64),
            }
        }
        let read = stream.read_next(buffers, cancel).map_err(|e| self.failed(e))?;
        *position += read as u64;
        Ok(read)
    }

    fn beside(&self, name: &str, cancel: &dyn Cancel) -> Result<Option<Arc<dyn ReadAt>>> {
        // Opening takes its time, and several may be opened at once.
        let opener = self.turn(cancel)?.0.opener();
        opener.map_or(Ok(None), |open| open(name, cancel))
    }
}

#[cfg(test)]
#[allow(clippy::unwrap_used)]
mod tests {
    use std::sync::mpsc::{Receiver, Sender, channel};

    use super::*;

    /// Says that it is read, and gives nothing until it is told to.
    struct Silent(Sender<()>, Receiver<()>);

    impl Stream for Silent {
        fn read_next(&mut self, _: &mut Buffers<'_>, _: &dyn Cancel) -> io::Result<usize> {
            self.0.send(()).unwrap();
            self.1.recv().unwrap();
            Ok(0)
        }
    }

    struct Cancelled;

    impl Cancel for Cancelled {
        fn check(&self) -> Result<()> {
            Err(Error::Closed("cancelled".to_owned()))
        }
    }

    #[test]
    fn who_waits_for_another_reader_can_be_cancelled() {
        let (begun, begins) = channel();
        let (end, ends) = channel();
        let source = PipeSource::new(Silent(begun, ends), "pipe");
        std::thread::scope(|scope| {
            let read =
                |cancel: &dyn Cancel| source.read_at(0, &mut Buffers::of(&mut [0; 4]), cancel);
            let other = scope.spawn(move || read(&crate::cancel::Never));
            begins.recv().unwrap();
            assert!(read(&Cancelled).unwrap_err().to_string().contains("cancelled"));
            end.send(()).unwrap();
            assert_eq!(other.join().unwrap().unwrap(), 0);
        });
    }
}
