//! The file handles of one reader.

use super::target::Target;
use crate::error::{Error, Result};
use crate::io::ReadAt;

/// Handles of a reader to the files of a load: its own where those are faster, otherwise the shared
/// ones.
pub struct FileHandles<'r, T> {
    target: &'r T,
    files: &'r [&'r dyn ReadAt],
    /// True if the reader opens handles of its own.
    alone: bool,
    /// The file that was read last, and the reader's own handle to it, if there is one.
    open: Option<(usize, Option<Box<dyn ReadAt>>)>,
}

impl<'r, T: Target> FileHandles<'r, T> {
    /// None are open yet.
    pub fn new(target: &'r T, files: &'r [&'r dyn ReadAt], alone: bool) -> Self {
        FileHandles { target, files, alone, open: None }
    }

    /// The handle to a file.
    pub fn of(&mut self, file: usize) -> Result<&dyn ReadAt> {
        let shared = self.files.get(file).copied();
        let shared = shared.ok_or_else(|| Error::Bug(format!("no file {file}")))?;
        if !self.alone {
            return Ok(shared);
        }
        if self.open.as_ref().is_none_or(|(open, _)| *open != file) {
            self.open = Some((file, self.target.reader(shared)));
        }
        let own = self.open.as_ref().and_then(|(_, own)| own.as_deref());
        Ok(own.unwrap_or(shared))
    }
}
