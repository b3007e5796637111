//! The way of one reader to the files of a load.

use super::target::Target;
use crate::error::{Error, Result};
use crate::io::ReadAt;

/// How one reader gets to the files.
pub struct Way<'r, T> {
    target: &'r T,
    files: &'r [&'r dyn ReadAt],
    alone: bool,
    /// That to the file that was read last, if there is one.
    open: Option<(usize, Option<Box<dyn ReadAt>>)>,
}

impl<'r, T: Target> Way<'r, T> {
    /// `alone`: whether to look for ways of its own, where they are faster.
    pub fn new(target: &'r T, files: &'r [&'r dyn ReadAt], alone: bool) -> Self {
        Way { target, files, alone, open: None }
    }

    /// The way to a file.
    pub fn to(&mut self, file: usize) -> Result<&dyn ReadAt> {
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
