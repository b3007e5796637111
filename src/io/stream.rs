//! Streams: bytes that can only be read front to back.
use std::io::{self, Read};
use std::sync::{Mutex, MutexGuard};

use super::{Capabilities, Facts, ReadAt};
use crate::cancel::{self, Cancel};
use crate::error::{Error, Result};
use crate::mem::Buffers;
use crate::memory_limit::CONNECTION;
use crate::sys::process::OwnerProcess;
use crate::sys::to_usize;

/// Bytes that pass through a buffer at a time.
const STEP: usize = 64 << 10;

/// Bytes that come front to back.
pub trait Stream: Send {
    /// Reads some of the next bytes; 0 only at the end.
    fn read_next(&mut self, buffers: &mut Buffers<'_>, cancel: &dyn Cancel) -> io::Result<usize>;
}

impl<R: Read + Send> Stream for R {
    fn read_next(&mut self, buffers: &mut Buffers<'_>, cancel: &dyn Cancel) -> io::Result<usize> {
        // The buffers need not be initialised, and `read` of another type may look at them.
        let mut bytes = vec![0; buffers.remaining().min(STEP)];
        let read = cancel::retry_interrupted(cancel, || self.read(&mut bytes))?;
        Ok(buffers.fill_from(bytes.get(..read).unwrap_or(&[])))
    }
}

/// Serves reads at rising positions; bytes in between are read and dropped.
pub struct StreamSource<S> {
    stream: Mutex<(S, u64)>,
    owner: OwnerProcess,
    facts: Facts,
}

impl<S: Stream> StreamSource<S> {
    /// `uri`: its name in messages. Position 0 is the stream's next byte.
    pub fn new(stream: S, uri: impl Into<String>) -> Self {
        Self::with_facts(stream, 0, Facts { uri: uri.into(), ..Facts::default() })
    }

    /// The same for a stream with these facts, whose next byte is at this position.
    pub fn with_facts(stream: S, position: u64, facts: Facts) -> Self {
        let owner = OwnerProcess::current();
        StreamSource { stream: Mutex::new((stream, position)), owner, facts }
    }

    /// Locks the stream. A forked child does not wait for a thread of its parent.
    fn lock(&self, cancel: &dyn Cancel) -> Result<MutexGuard<'_, (S, u64)>> {
        if self.owner.is_current() {
            return cancel::lock_mutex(&self.stream, cancel);
        }
        self.stream.try_lock().map_err(|_| {
            Error::Closed(format!(
                "`{}` cannot be read in this process: a thread of the parent process was reading \
                 it during fork(); open it again",
                self.facts.uri
            ))
        })
    }
}

impl<S: Stream> ReadAt for StreamSource<S> {
    fn facts(&self) -> &Facts {
        &self.facts
    }

    fn capabilities(&self) -> Capabilities {
        Capabilities { reader_memory: CONNECTION, ..Capabilities::SEQUENTIAL }
    }

    fn read_at(&self, offset: u64, into: &mut Buffers<'_>, cancel: &dyn Cancel) -> Result<usize> {
        // A cancelled call is passed through the stream as an error.
        let failed = |error| Error::of_io("reading", &self.facts.uri, error);
        let mut guard = self.lock(cancel)?;
        let (stream, position) = &mut *guard;
        if offset < *position {
            return Err(Error::Unsupported(format!(
                "`{}` can only be read front to back: byte {offset} was passed at byte {position}",
                self.facts.uri
            )));
        }
        let mut unwanted = vec![0; STEP.min(to_usize(offset.saturating_sub(*position)))];
        while *position < offset {
            unwanted.truncate(to_usize(offset - *position));
            let read = stream.read_next(&mut Buffers::from_slice(&mut unwanted), cancel);
            match read.map_err(failed)? {
                0 => return Ok(0),
                read => *position += read as u64,
            }
        }
        let read = stream.read_next(into, cancel).map_err(failed)?;
        *position += read as u64;
        Ok(read)
    }
}

#[cfg(test)]
mod tests {
    use std::sync::mpsc::{Receiver, Sender, channel};

    use super::*;

    /// A stream that reports each read, and ends it when it is told to.
    struct BlockingStream(Sender<()>, Receiver<()>);

    impl Stream for BlockingStream {
        fn read_next(&mut self, _: &mut Buffers<'_>, _: &dyn Cancel) -> io::Result<usize> {
            self.0.send(()).unwrap();
            self.1.recv().unwrap();
            Ok(0)
        }
    }

    struct AlwaysCancelled;

    impl Cancel for AlwaysCancelled {
        fn check(&self) -> Result<()> {
            Err(Error::Closed("cancelled".to_owned()))
        }
    }

    #[test]
    fn waiting_for_another_reader_can_be_cancelled() {
        let (begun, begins) = channel();
        let (end, ends) = channel();
        let source = StreamSource::new(BlockingStream(begun, ends), "pipe");
        std::thread::scope(|scope| {
            let read = |cancel: &dyn Cancel| {
                source.read_at(0, &mut Buffers::from_slice(&mut [0; 4]), cancel)
            };
            let other = scope.spawn(move || read(&crate::cancel::Never));
            begins.recv().unwrap();
            assert!(read(&AlwaysCancelled).unwrap_err().to_string().contains("cancelled"));
            end.send(()).unwrap();
            assert_eq!(other.join().unwrap().unwrap(), 0);
        });
    }
}
