//! Local files. A file that is written under a path appears there complete or not at all.

use std::fs::{self, File, Metadata, OpenOptions};
use std::io::{self, IoSlice};
use std::os::unix::fs::{FileExt as _, MetadataExt as _, OpenOptionsExt as _};
use std::path::{Path, PathBuf};
use std::sync::atomic::{AtomicU64, Ordering};

use super::copy_metadata;
use super::temporary::TemporaryFile;
use super::temporary_name::TemporaryNames;
use crate::cancel::{Cancel, run_detached};
use crate::error::{Error, Result};
use crate::io::{UnclosedOutcome, WriteAt};
use crate::mem::mapped;

/// A local file.
pub struct FileSink {
    /// The unpublished file; None once it is published. This field is dropped before `file`, so
    /// that the hidden name is removed under the lock of the file.
    unpublished: Option<TemporaryFile>,
    file: File,
    uri: String,
    /// End of the disk space that was requested so far.
    reserved: AtomicU64,
}

impl FileSink {
    /// Begins a file that will be `path` once it is published. Until then, and if it never is, the
    /// present file at `path` stays. Missing parent directories are created.
    ///
    /// The bytes go to a file without a name in the same directory. If the system does not support
    /// that, the file has a hidden name, and is removed when the sink is dropped unpublished. Files
    /// that killed writers of the same path have left are removed here. Owner, permissions and
    /// attributes of a file that is replaced are copied; a symbolic link is followed.
    pub fn create(path: &Path) -> Result<Self> {
        let uri = path.display().to_string();
        let fail = |e| Error::io("creating", &uri, e);
        let target = match fs::canonicalize(path) {
            Ok(target) => target,
            Err(e) if e.kind() == io::ErrorKind::NotFound => resolve_links(path).map_err(fail)?,
            Err(e) => return Err(fail(e)),
        };
        let existing = fs::metadata(&target).ok();
        if let Some(metadata) = existing.as_ref().filter(|metadata| !metadata.is_file()) {
            if metadata.is_dir() {
                return Err(fail(io::Error::from(io::ErrorKind::IsADirectory)));
            }
            // A device cannot be replaced by a rename.
            let file = OpenOptions::new().read(true).write(true).open(&target).map_err(fail)?;
            return Ok(FileSink { unpublished: None, file, uri, reserved: AtomicU64::new(0) });
        }
        // Replacing a file must require the same permission as overwriting it.
        let writable = || OpenOptions::new().write(true).open(&target);
        let replaced = existing.map(|_| writable()).transpose().map_err(fail)?;
        let hidden_names = TemporaryNames::of(&target)
            .ok_or_else(|| fail(io::Error::from(io::ErrorKind::InvalidInput)))?;
        let folder = hidden_names.folder().to_owned();
        make_folders(&folder).map_err(fail)?;
        hidden_names.remove_stale();
        let refused = |error: io::Error| match error.raw_os_error() {
            Some(libc::EACCES | libc::EPERM | libc::EROFS) if replaced.is_some() => {
                Error::Irreplaceable { uri: uri.clone(), folder: folder.clone(), error }
            }
            _ => fail(error),
        };
        let (file, unpublished) =
            TemporaryFile::create(target.clone(), hidden_names, replaced.is_some())
                .map_err(refused)?;
        if let Some(old) = &replaced {
            let sticky = fs::metadata(&folder).and_then(|folder| {
                is_protected_by_sticky_bit(
                    &target,
                    &old.metadata()?,
                    &folder,
                    file.metadata()?.uid(),
                )
            });
            if sticky.map_err(fail)? {
                return Err(refused(io::Error::from_raw_os_error(libc::EPERM)));
            }
            copy_metadata::copy(&file, old).map_err(fail)?;
        }
        Ok(FileSink { unpublished: Some(unpublished), file, uri, reserved: AtomicU64::new(0) })
    }

    /// Another handle of the file.
    pub fn handle(&self) -> Result<File> {
        self.file.try_clone().map_err(|e| Error::io("opening", &self.uri, e))
    }

    /// Writes into a file that the caller has open for reading and writing. One that tensors of
    /// this process are mapped from is refused.
    pub fn from_file(file: File, uri: String) -> Result<Self> {
        if mapped::is_mapped(&file).map_err(|e| Error::io("examining", &uri, e))? {
            return Err(Error::InvalidArgument(format!(
                "cannot write into `{uri}`: this process has tensors that were loaded from it with \
                 mmap=True, and they would change; write another file and rename it"
            )));
        }
        Ok(FileSink { unpublished: None, file, uri, reserved: AtomicU64::new(0) })
    }

    /// Ends the file at `len` bytes, syncs it, and then gives it a name by `publish`, whose result
    /// it returns. None if the file is the caller's own.
    fn finish_with<T>(
        &mut self,
        len: u64,
        cancel: &dyn Cancel,
        publish: impl FnOnce(TemporaryFile, &File) -> io::Result<T>,
    ) -> Result<Option<T>> {
        let Some(unpublished) = &self.unpublished else { return Ok(None) };
        unpublished.check_owner(&self.uri)?;
        let file = self.handle()?;
        let synced =
            run_detached(cancel, move || file.set_len(len).and_then(|()| file.sync_all()))?;
        let published = synced.and_then(|()| {
            self.unpublished.take().map(|unpublished| publish(unpublished, &self.file)).transpose()
        });
        let published = published.map_err(|e| Error::io("finishing", &self.uri, e))?;
        crate::sys::release_flock(&self.file);
        Ok(published)
    }
}

/// Creates a folder and its missing ancestors. Their names are synced before anything is in them.
fn make_folders(folder: &Path) -> io::Result<()> {
    let missing: Vec<&Path> = folder.ancestors().take_while(|above| !above.exists()).collect();
    fs::create_dir_all(folder)?;
    missing.into_iter().try_for_each(|made| sync_folder(parent(made)))
}

/// True if the folder, like `/tmp`, lets only owners replace files, and another user owns this one.
fn is_protected_by_sticky_bit(
    target: &Path,
    old: &Metadata,
    folder: &Metadata,
    own_user: u32,
) -> io::Result<bool> {
    if folder.mode() & libc::S_ISVTX == 0 || folder.uid() == own_user || old.uid() == own_user {
        return Ok(false);
    }
    // Tests the privilege by an operation that needs it: only the owner, or a privileged process,
    // may do this.
    let opened = OpenOptions::new().write(true).custom_flags(libc::O_NOATIME).open(target);
    Ok(opened.is_err_and(|e| e.raw_os_error() == Some(libc::EPERM)))
}

/// The target of a path that does not exist yet. It is absolute, because the process may change its
/// working directory, and symbolic links are followed, as `open` would do.
fn resolve_links(path: &Path) -> io::Result<PathBuf> {
    // Maximum number of symbolic links, as in Linux.
    const MAX_LINKS: u32 = 40;
    let mut target = std::path::absolute(path)?;
    for _ in 0..MAX_LINKS {
        match fs::read_link(&target) {
            Ok(link) => target = target.parent().unwrap_or(Path::new("/")).join(link),
            Err(_) => return Ok(target),
        }
    }
    Err(io::Error::from_raw_os_error(libc::ELOOP))
}

impl WriteAt for FileSink {
    fn uri(&self) -> &str {
        &self.uri
    }

    fn max_writers(&self) -> usize {
        usize::MAX
    }

    fn write_at(&self, offset: u64, buffers: &[IoSlice<'_>], cancel: &dyn Cancel) -> Result<usize> {
        loop {
            cancel.check()?;
            match crate::sys::write_vectored_at(&self.file, offset, buffers) {
                Err(e) if e.kind() == io::ErrorKind::Interrupted => {}
                Err(e) => return Err(Error::io("writing", &self.uri, e)),
                Ok(written) => {
                    if self.unpublished.is_some() {
                        crate::sys::start_writeback(&self.file, offset, written as u64);
                    }
                    return Ok(written);
                }
            }
        }
    }

    fn read_back(&self, offset: u64, buffer: &mut [u8]) -> Result<()> {
        self.file.read_exact_at(buffer, offset).map_err(|e| Error::io("reading back", &self.uri, e))
    }

    fn is_visible_early(&self) -> bool {
        self.unpublished.is_none()
    }

    fn reserve(&self, _head: u64, len: u64) -> Result<()> {
        if self.unpublished.is_some() {
            // Repeated reservations are made once: file systems look through all
            // that they are asked for.
            let before = self.reserved.fetch_max(len, Ordering::Relaxed);
            crate::sys::reserve(&self.file, before..len)
                .map_err(|e| Error::io("reserving space for", &self.uri, e))?;
        }
        Ok(())
    }

    fn publish(&mut self, len: u64, cancel: &dyn Cancel) -> Result<()> {
        match self.finish_with(len, cancel, TemporaryFile::publish)? {
            Some(target) => sync_name(&target, &self.uri, cancel),
            None => Ok(()),
        }
    }

    fn publish_unclosed(&mut self, len: u64, cancel: &dyn Cancel) -> Result<UnclosedOutcome> {
        let Some((in_place, name)) =
            self.finish_with(len, cancel, TemporaryFile::publish_unclosed)?
        else {
            return Ok(UnclosedOutcome::InPlace);
        };
        sync_name(&name, &self.uri, cancel)?;
        Ok(if in_place { UnclosedOutcome::InPlace } else { UnclosedOutcome::OtherName(name) })
    }
}

/// Syncs the name of a file that is complete. A folder that cannot be synced is no failure. If the
/// disk fails, the error says that the file is there. On a busy disk this may take long; the file
/// stays if the call is interrupted.
fn sync_name(path: &Path, uri: &str, cancel: &dyn Cancel) -> Result<()> {
    let parent = parent(path).to_owned();
    let synced = run_detached(cancel, move || sync_folder(&parent))?;
    synced.map_err(|error| Error::Unsynced { uri: uri.to_owned(), error })
}

fn parent(path: &Path) -> &Path {
    path.parent().filter(|p| !p.as_os_str().is_empty()).unwrap_or(Path::new("."))
}

/// Syncs the names in a folder, if the system allows it.
fn sync_folder(folder: &Path) -> io::Result<()> {
    match File::open(folder).and_then(|folder| folder.sync_all()) {
        Err(e) if CANNOT_SYNC.contains(&e.raw_os_error().unwrap_or(0)) => Ok(()),
        other => other,
    }
}

/// Errors for folders that may not be read, and of file systems that do not sync folders.
const CANNOT_SYNC: [i32; 5] =
    [libc::EACCES, libc::EPERM, libc::EINVAL, libc::ENOTSUP, libc::ENOSYS];
