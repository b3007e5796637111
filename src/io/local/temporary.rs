//! A file that is being written and does not have its final name yet.

use std::fs::{self, File, OpenOptions};
use std::io;
use std::os::unix::fs::{MetadataExt as _, OpenOptionsExt as _};
use std::path::{Path, PathBuf};

use super::copy_metadata;
use super::temporary_name::TemporaryNames;
use crate::error::Result;
use crate::sys;
use crate::sys::process::OwnerProcess;

/// A file that holds the bytes until they are published. It is removed when this is dropped.
pub(super) struct TemporaryFile {
    /// The only process that may publish the file, or remove it.
    owner: OwnerProcess,
    target: PathBuf,
    hidden_names: TemporaryNames,
    /// None for a file without a name, which ends with the last process that has it open.
    path: Option<PathBuf>,
    /// A copy with a hidden name, kept open to hold its lock.
    copy: Option<File>,
}

impl TemporaryFile {
    /// Begins a file in the target's folder. If `private` is true, only its owner can open it for
    /// now.
    pub(super) fn create(
        target: PathBuf,
        hidden_names: TemporaryNames,
        private: bool,
    ) -> io::Result<(File, Self)> {
        let mode = if private { 0o600 } else { 0o666 };
        let (file, path) = match create_unnamed(hidden_names.folder(), mode) {
            Some(file) => (file, None),
            None => {
                let (file, path) = hidden_names.create(mode)?;
                (file, Some(path))
            }
        };
        Ok((
            file,
            TemporaryFile {
                owner: OwnerProcess::current(),
                target,
                hidden_names,
                path,
                copy: None,
            },
        ))
    }

    /// Returns an error in a process other than the one that began the file.
    pub(super) fn check_owner(&self, uri: &str) -> Result<()> {
        self.owner.check(uri)
    }

    /// Gives the file its name, in place of any file there, and returns the name.
    pub(super) fn publish(mut self, file: &File) -> io::Result<PathBuf> {
        if self.path.is_none() && sys::link(file, &self.target).is_ok() {
            return Ok(self.target.clone());
        }
        fs::rename(self.ensure_hidden_name(file)?, &self.target)?;
        self.path = None;
        Ok(self.target.clone())
    }

    /// Gives the file its name, if that is free. Otherwise gives it that of [`unclosed_name`], in
    /// place of any file there. Returns true in the first case, and the name.
    pub(super) fn publish_unclosed(mut self, file: &File) -> io::Result<(bool, PathBuf)> {
        let target = self.target.clone();
        match self.take_free_name(file, &target) {
            Err(e) if e.kind() == io::ErrorKind::AlreadyExists => {
                self.target = unclosed_name(&target);
                self.publish(file).map(|name| (false, name))
            }
            result => result.map(|()| (true, target)),
        }
    }

    fn take_free_name(&mut self, file: &File, name: &Path) -> io::Result<()> {
        if self.path.is_none() {
            match sys::link(file, name) {
                Err(e) if e.kind() != io::ErrorKind::AlreadyExists => {}
                done => return done,
            }
        }
        sys::rename_to_free_name(&self.ensure_hidden_name(file)?, name)?;
        self.path = None;
        Ok(())
    }

    /// Ensures that the file has a hidden name, and returns the name.
    fn ensure_hidden_name(&mut self, file: &File) -> io::Result<PathBuf> {
        let path = match self.path.take() {
            Some(path) => path,
            None => match self.hidden_names.link(file) {
                Ok(path) => path,
                // The link failed although the trial had succeeded. The file is copied, so that its
                // bytes are not lost.
                Err(_) => self.copy(file)?,
            },
        };
        Ok(self.path.insert(path).clone())
    }

    /// Copies what was written into a file with a hidden name.
    fn copy(&mut self, file: &File) -> io::Result<PathBuf> {
        let (copy, path) = self.hidden_names.create(0o600)?;
        // From here on, the file is removed on every path.
        self.path = Some(path.clone());
        io::Seek::rewind(&mut &*file)?;
        io::copy(&mut &*file, &mut &copy)?;
        copy_metadata::copy(&copy, file)?;
        copy.sync_all()?;
        self.copy = Some(copy);
        Ok(path)
    }
}

impl Drop for TemporaryFile {
    fn drop(&mut self) {
        if let Some(path) = &self.path
            && self.owner.is_current()
        {
            // Nothing more can be done if the file cannot be removed.
            let _ = fs::remove_file(path);
        }
    }
}

/// A file without a name in a folder, if it can be given one later.
fn create_unnamed(folder: &Path, mode: u32) -> Option<File> {
    let mut options = OpenOptions::new();
    options.read(true).write(true).custom_flags(libc::O_TMPFILE).mode(mode);
    let file = options.open(folder).ok()?;
    // Linux before 6.1 may pass over the umask here, but not for files with a name.
    if file.metadata().ok()?.mode() & 0o777 == 0o666 {
        return None;
    }
    // A trial. The name `.` exists, but the kernel says so only after all other checks of the link
    // succeeded.
    let trial = sys::link(&file, &folder.join("."));
    trial.is_err_and(|e| e.kind() == io::ErrorKind::AlreadyExists).then_some(file)
}

/// `name.unclosed`: the name of a file that its writer never finished, if another file has its own
/// name.
fn unclosed_name(target: &Path) -> PathBuf {
    let mut name = target.as_os_str().to_owned();
    name.push(".unclosed");
    name.into()
}
