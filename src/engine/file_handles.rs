//! The file handles of one reader.

use std::sync::Arc;

use super::page_cache::DirectReads;
use crate::error::{Error, Result};
use crate::io::ReadAt;
use crate::io::local::{DirectMemory, OwnHandle};
use crate::sys::sync::Mutex;

/// The kind of file handles that a reader uses.
#[derive(Clone, Copy)]
pub enum HandleKind<'r> {
    /// Handles that all readers share.
    Shared,
    /// Handles of the reader's own, where those are faster.
    Own,
    /// Handles of the reader's own, for direct reads where the file system supports them.
    Direct(&'r DirectReads<'r>),
}

/// Handles of a reader to the files of a load.
pub struct FileHandles<'r> {
    files: &'r [&'r dyn ReadAt],
    handle_kind: HandleKind<'r>,
    /// The file that was read last, and the reader's own handle to it, if there is one.
    open: Option<(usize, Option<Box<dyn ReadAt + 'r>>)>,
    /// The memory of the reader's direct reads.
    direct: Option<Arc<Mutex<DirectMemory>>>,
}

impl Drop for FileHandles<'_> {
    fn drop(&mut self) {
        if let (HandleKind::Direct(reads), Some(direct)) = (self.handle_kind, &self.direct) {
            reads.ended(direct);
        }
    }
}

impl<'r> FileHandles<'r> {
    /// Creates the handles; a file is opened when it is first read.
    pub fn new(files: &'r [&'r dyn ReadAt], handle_kind: HandleKind<'r>) -> Self {
        FileHandles { files, handle_kind, open: None, direct: None }
    }

    /// Returns the handle to a file.
    pub fn handle(&mut self, file: usize) -> Result<&dyn ReadAt> {
        let shared = self.files.get(file).copied();
        let shared = shared.ok_or_else(|| Error::Bug(format!("no file {file}")))?;
        if self.open.as_ref().is_none_or(|(open, _)| *open != file) {
            let own = || OwnHandle::open(shared).map(|own| Box::new(own) as Box<dyn ReadAt>);
            let own = match self.handle_kind {
                HandleKind::Shared => return Ok(shared),
                HandleKind::Own => own(),
                HandleKind::Direct(reads) => {
                    if self.direct.is_none() {
                        self.direct = DirectMemory::new().map(|new| Arc::new(Mutex::new(new)));
                    }
                    let direct = self.direct.as_ref();
                    direct.and_then(|memory| reads.open(shared, memory)).or_else(own)
                }
            };
            self.open = Some((file, own));
        }
        let own = self.open.as_ref().and_then(|(_, own)| own.as_deref());
        Ok(own.unwrap_or(shared))
    }
}
