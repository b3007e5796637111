//! Where bytes are written to. Every sink can be written at a position.

mod file;

use std::io::IoSlice;

pub use file::FileSink;

use crate::error::{Error, Result};

/// Random-access writing.
pub trait WriteAt: Send + Sync {
    /// The path or address, for messages.
    fn uri(&self) -> &str;

    /// The most threads that may write at once.
    fn max_writers(&self) -> usize;

    /// Writes some of the buffers, in order, at `offset`.
    fn write_at(&self, offset: u64, buffers: &[IoSlice<'_>]) -> Result<usize>;

    /// Reads bytes back that were written before.
    fn read_back(&self, offset: u64, buffer: &mut [u8]) -> Result<()>;

    /// Announces that the file will be `len` bytes long, so that a full disk shows early.
    fn reserve(&self, _len: u64) -> Result<()> {
        Ok(())
    }

    /// Ends the file at `len` bytes and makes it visible under its name.
    fn publish(&mut self, len: u64) -> Result<()>;
}

/// Writes all of the buffers.
pub fn write_all_at(
    sink: &dyn WriteAt,
    offset: u64,
    mut buffers: &mut [IoSlice<'_>],
) -> Result<()> {
    let mut at = offset;
    IoSlice::advance_slices(&mut buffers, 0);
    while !buffers.is_empty() {
        let window = buffers.len().min(crate::sys::MAX_VECTORS);
        let written = sink.write_at(at, buffers.get(..window).unwrap_or_default())?;
        if written == 0 {
            let error = std::io::Error::from(std::io::ErrorKind::WriteZero);
            return Err(Error::io("writing", sink.uri(), error));
        }
        at += written as u64;
        IoSlice::advance_slices(&mut buffers, written);
    }
    Ok(())
}
