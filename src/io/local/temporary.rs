//! A file that is being written and does not have its final name yet.

use std::fs::{self, File, OpenOptions};
use std::io;
use std::os::unix::fs::{MetadataExt as _, OpenOptionsExt as _};
use std::path::{Path, PathBuf};

use super::copy_metadata::FileMetadata;
use super::file::is_at;
use super::held_folder::Place;
use super::temporary_name::TemporaryNames;
use crate::sys;
use crate::sys::process::OwnerProcess;

/// A file that holds the bytes until they are published. If it is dropped before, it is removed,
/// or left empty if it has the target's name already.
pub(super) struct TemporaryFile {
    /// The only process that may publish the file, or remove it.
    pub(super) owner: OwnerProcess,
    pub(super) target: Place,
    hidden_names: TemporaryNames,
    /// None for a file without a name, which ends with the last process that has it open.
    path: Option<PathBuf>,
    /// A copy with a hidden name, kept open to hold its lock.
    copy: Option<File>,
    /// The file itself, if it is the one at the target.
    in_place: Option<File>,
}

impl TemporaryFile {
    fn new(target: Place) -> Self {
        TemporaryFile {
            owner: OwnerProcess::current(),
            hidden_names: TemporaryNames::of(&target.folder.path, &target.name),
            target,
            path: None,
            copy: None,
            in_place: None,
        }
    }

    /// Begins a file in the target's folder, and removes those of killed writers. If `private` is
    /// true, only its owner can open it for now.
    pub(super) fn create(target: Place, private: bool) -> io::Result<(File, Self)> {
        let mode = if private { 0o600 } else { 0o666 };
        let mut made = Self::new(target);
        made.hidden_names.remove_stale();
        if let Some(file) = create_unnamed(&made.target.folder.path, mode) {
            return Ok((file, made));
        }
        let (file, path) = made.hidden_names.create(mode)?;
        made.path = Some(path);
        Ok((file, made))
    }

    /// Begins to write into the file at the target, which has become empty.
    pub(super) fn in_place(target: Place, file: &File) -> io::Result<Self> {
        let mut made = Self::new(target);
        file.set_len(0)?;
        made.in_place = Some(file.try_clone()?);
        Ok(made)
    }

    /// Gives the file its name, in place of any file there.
    pub(super) fn publish(&mut self, file: &File) -> io::Result<()> {
        let target = self.target.path();
        if !self.is_in_place() && (self.path.is_some() || sys::link(file, &target).is_err()) {
            fs::rename(self.ensure_hidden_name(file)?, &target)?;
        }
        self.keep();
        Ok(())
    }

    /// Gives the file its name, if that is free, and returns None. Otherwise gives it the name
    /// `<name>.unclosed`, in place of any file there, and returns its path.
    pub(super) fn publish_unclosed(&mut self, file: &File) -> io::Result<Option<PathBuf>> {
        let target = self.target.path();
        let taken = if self.is_in_place() { Ok(()) } else { self.take_free_name(file, &target) };
        match taken {
            Err(e) if e.kind() == io::ErrorKind::AlreadyExists => {
                self.target.name.push(".unclosed");
                self.publish(file)?;
                Ok(Some(self.target.folder.shown.join(&self.target.name)))
            }
            taken => {
                taken?;
                self.keep();
                Ok(None)
            }
        }
    }

    /// Leaves the file as it is from now on.
    fn keep(&mut self) {
        (self.path, self.in_place) = (None, None);
    }

    /// True if the file is the one at the target, and no other file has replaced it.
    fn is_in_place(&self) -> bool {
        let file = self.in_place.as_ref();
        file.is_some_and(|file| self.target.is_open_file || is_at(file, &self.target.path()))
    }

    fn take_free_name(&mut self, file: &File, name: &Path) -> io::Result<()> {
        if self.path.is_none() {
            match sys::link(file, name) {
                Err(e) if e.kind() != io::ErrorKind::AlreadyExists => {}
                done => return done,
            }
        }
        sys::rename_to_free_name(&self.ensure_hidden_name(file)?, name)
    }

    /// Ensures that the file has a hidden name, and returns the name.
    fn ensure_hidden_name(&mut self, file: &File) -> io::Result<PathBuf> {
        let named = self.path.take().map_or_else(|| self.hidden_names.link(file), Ok);
        // A link may fail although the trial had succeeded. The file is copied, so that its bytes
        // are not lost.
        let path = named.or_else(|_| self.copy(file))?;
        Ok(self.path.insert(path).clone())
    }

    /// Copies what was written into a file with a hidden name.
    fn copy(&mut self, file: &File) -> io::Result<PathBuf> {
        let (copy, path) = self.hidden_names.create(0o600)?;
        // From here on, the file is removed on every path.
        self.path = Some(path.clone());
        io::Seek::rewind(&mut &*file)?;
        io::copy(&mut &*file, &mut &copy)?;
        FileMetadata::of(file)?.give(&copy)?;
        copy.sync_all()?;
        self.copy = Some(copy);
        Ok(path)
    }
}

impl Drop for TemporaryFile {
    fn drop(&mut self) {
        if !self.owner.is_current() {
            return;
        }
        // Nothing more can be done if these fail.
        if let Some(path) = &self.path {
            let _ = fs::remove_file(path);
        }
        if let Some(file) = &self.in_place {
            let _ = file.set_len(0);
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
