//! Sinks: files that are written at positions.
// A broken invariant ends the call by a panic that its boundary catches.
#![allow(clippy::indexing_slicing)]

use std::io::IoSlice;
use std::path::PathBuf;

use crate::cancel::Cancel;
use crate::error::{Error, Result};
use crate::sys::to_usize;

/// Bytes moved at a time to make room.
const MOVE_STEP: u64 = 8 << 20;

/// Random-access writing.
pub trait WriteAt: Send + Sync {
    /// The path or address, for messages.
    fn uri(&self) -> &str;

    /// Maximum number of threads that may write at once.
    fn max_writers(&self) -> usize;

    /// Default number of writing threads.
    fn default_writers(&self) -> usize {
        crate::sys::cpu_count().min(self.max_writers())
    }

    /// Maximum number of positions at which writes may continue alternately; writes at each of them
    /// are in order.
    fn max_positions(&self) -> usize {
        usize::MAX
    }

    /// True if other processes see written bytes before the file is published.
    fn is_visible_early(&self) -> bool;

    /// Bytes of memory that are retained until the end, and bytes of each part that is retained
    /// until it is sent.
    fn retained_memory(&self) -> (u64, u64) {
        (0, 0)
    }

    /// Limits the bytes of retained parts.
    fn limit_retained_parts(&self, _bytes: u64) {}

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

    /// Announces that the file will have at least `len` bytes, so that a full disk is detected
    /// early, and that its first `head` bytes are written last.
    fn reserve(&self, _head: u64, _len: u64) -> Result<()> {
        Ok(())
    }

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

    /// Ends the file at `len` bytes and makes it visible under its name, unless a later save of
    /// this process to the same name is complete: see [`WriteAt::overtaken`].
    fn publish(&mut self, len: u64, cancel: &dyn Cancel) -> Result<()>;

    /// True if `publish` has dropped the file, because a later save to its name is complete.
    fn overtaken(&self) -> bool {
        false
    }

    /// Ends a file that its writer never finished, and which may be incomplete. A file that has the
    /// name already stays.
    fn publish_unclosed(&mut self, len: u64, cancel: &dyn Cancel) -> Result<UnclosedOutcome> {
        self.publish(len, cancel).map(|()| UnclosedOutcome::InPlace)
    }
}

/// The outcome of a file that its writer never finished.
#[derive(Debug, Clone, PartialEq, Eq)]
pub enum UnclosedOutcome {
    /// The file has its own name, or is the caller's open file.
    InPlace,
    /// Another file has its name and stays; the new file has this name instead.
    OtherName(PathBuf),
    /// The upload was aborted: an object cannot be read before it is complete.
    Aborted,
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
        let window = buffers.len().min(crate::sys::MAX_VECTORS);
        let written = sink.write_at(at, &buffers[..window], cancel)?;
        if written == 0 {
            let error = std::io::Error::from(std::io::ErrorKind::WriteZero);
            return Err(Error::io("writing", sink.uri(), error));
        }
        at += written as u64;
        IoSlice::advance_slices(&mut buffers, written);
    }
    Ok(())
}
