//! Pipes, sockets and terminals.

use std::fs::File;
use std::io::{self, ErrorKind};

use crate::cancel::{Cancel, POLL};
use crate::io::Stream;
use crate::mem::Buffers;

/// A pipe, a socket or a terminal. A read of it may wait for ever, but ends when the call is
/// cancelled.
pub struct Pipe(pub File);

impl Stream for Pipe {
    fn read_next(&mut self, buffers: &mut Buffers<'_>, cancel: &dyn Cancel) -> io::Result<usize> {
        loop {
            cancel.check().map_err(io::Error::other)?;
            if !crate::sys::wait_readable(&self.0, POLL)? {
                continue;
            }
            match crate::sys::read_vectored(&self.0, buffers) {
                // Another process has read the bytes, or the caller has handled a signal.
                Err(e) if matches!(e.kind(), ErrorKind::WouldBlock | ErrorKind::Interrupted) => {}
                other => return other,
            }
        }
    }
}
