//! Sinks: files that are written at positions.
use std::io::IoSlice;
use std::path::PathBuf;

use crate::cancel::Cancel;
use crate::error::{Error, Result};
use crate::sys::to_usize;

/// Bytes moved at a time to make room.
const MOVE_STEP: u64 = 8 << 20;

/// The facts of a sink, which may change as it is written.
#[derive(Debug, Clone, Copy)]
pub struct SinkFacts {
    /// Maximum number of threads that may write at once.
    pub max_writers: usize,
    /// Default number of writing threads.
    pub default_writers: usize,
    /// Maximum number of positions at which writes may continue alternately; writes at each of them
    /// are in order.
    pub max_positions: usize,
    /// True if other processes see written bytes before the file is published.
    pub is_visible_early: bool,
    /// Bytes that are retained in memory until the end.
    pub retained: u64,
    /// Bytes of each part that is retained until it is sent; 0 without parts.
    pub part_len: u64,
}

/// The properties of a file that are known before it is written.
#[derive(Debug, Clone, Copy, Default)]
pub struct Reservation {
    /// Its first bytes, which are written last.
    pub head: u64,
    /// Minimum length, so that a full disk is detected early.
    pub len: u64,
    /// Maximum number of parts that are retained in memory. An earlier, lower one remains in force.
    pub parts: Option<usize>,
}

/// The reason why a file ends.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Ending {
    /// It is complete.
    Finished,
    /// Its writer never finished it, and it may be incomplete.
    Unclosed,
}

/// The outcome of ending a file.
#[derive(Debug, Clone, PartialEq, Eq)]
pub enum Published {
    /// The file has its own name, or is the caller's open file.
    InPlace,
    /// A later save of this process to the same name was complete before, and the file was dropped.
    Overtaken,
    /// Another file has its name and stays; the new file, which was not finished, has this name.
    OtherName(PathBuf),
    /// The upload was not finished, and was aborted: an object cannot be read before it is
    /// complete.
    Aborted,
}

/// Random-access writing.
pub trait WriteAt: Send + Sync {
    /// The path or address, for messages.
    fn uri(&self) -> &str;

    /// Its facts.
    fn facts(&self) -> SinkFacts;

    /// Announces what is known of the file.
    fn reserve(&self, _expected: &Reservation) -> Result<()> {
        Ok(())
    }

    /// Writes some of the buffers, in order, at `offset`. Each byte is written once, except those
    /// of the file's head and, if the sink is visible early, of its end.
    fn write_at(&self, offset: u64, buffers: &[IoSlice<'_>], cancel: &dyn Cancel) -> Result<usize>;

    /// Runs slow work that writes have deferred. Threads call it while they hold no locks or
    /// buffers.
    fn finish_deferred_writes(&self, _cancel: &dyn Cancel) -> Result<()> {
        Ok(())
    }

    /// Reads bytes back that were written before.
    fn read_back(&self, offset: u64, buffer: &mut [u8]) -> Result<()>;

    /// Moves the bytes from `at` to `end` towards the end of the file, by at least `len` bytes.
    /// Returns the distance, which is a multiple of 2 MiB if `len` is one.
    fn insert(&self, at: u64, end: u64, len: u64, cancel: &dyn Cancel) -> Result<u64> {
        let mut end = end;
        let mut buffer = Vec::new();
        while end > at {
            let from = end.saturating_sub(MOVE_STEP).max(at);
            buffer.resize(to_usize(end - from), 0);
            self.read_back(from, &mut buffer)?;
            write_all_at(self, from + len, &mut [IoSlice::new(&buffer)], cancel)?;
            end = from;
        }
        Ok(len)
    }

    /// Ends the file at `len` bytes and makes it visible under its name. A file that was not
    /// finished replaces no other one.
    fn publish(&mut self, len: u64, ending: Ending, cancel: &dyn Cancel) -> Result<Published>;
}

/// Writes all of the buffers.
pub fn write_all_at<S: WriteAt + ?Sized>(
    sink: &S,
    offset: u64,
    mut buffers: &mut [IoSlice<'_>],
    cancel: &dyn Cancel,
) -> Result<()> {
    let mut at = offset;
    IoSlice::advance_slices(&mut buffers, 0);
    while !buffers.is_empty() {
        let window = buffers.chunks(crate::sys::MAX_VECTORS).next().unwrap_or(&[]);
        let written = sink.write_at(at, window, cancel)?;
        if written == 0 {
            let error = std::io::Error::from(std::io::ErrorKind::WriteZero);
            return Err(Error::io("writing", sink.uri(), error));
        }
        at += written as u64;
        IoSlice::advance_slices(&mut buffers, written);
    }
    Ok(())
}
