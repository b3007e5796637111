//! Local files. A file that is written under a path appears there complete or not at all.

use std::ffi::OsString;
use std::fs::{self, File, Metadata, OpenOptions};
use std::io::{self, IoSlice};
use std::os::unix::fs::{FileExt as _, FileTypeExt as _, MetadataExt as _, OpenOptionsExt as _};
use std::path::Path;
use std::sync::atomic::{AtomicU64, Ordering};

use super::copy_metadata::FileMetadata;
use super::held_folder::{Place, sync_folder};
use super::temporary::TemporaryFile;
use crate::cancel::{Cancel, retry_interrupted, run_detached};
use crate::error::{Error, Result};
use crate::io::save_order::SaveTurn;
use crate::io::{Ending, Published, Reservation, SinkFacts, WriteAt};
use crate::mem::mapped;

/// Fewer bytes are not worth a system call before the file is synced.
const WRITEBACK_FROM: usize = 64 << 10;

/// A local file.
pub struct FileSink {
    /// The unpublished file; None once it is published. This field is dropped before `file`, so
    /// that the hidden name is removed under the lock of the file.
    unpublished: Option<(TemporaryFile, SaveTurn)>,
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
    /// attributes of a file that is replaced are copied; a symbolic link is followed. The directory
    /// is held open: the file appears in it, whatever its path means by then.
    ///
    /// A file that a process has open, named as `/dev/stdout` or `/proc/self/fd/3`, and an empty
    /// file are written in place, because the bytes are wanted in that very file. If the sink is
    /// dropped unpublished, they are left empty.
    pub fn create(path: &Path) -> Result<Self> {
        Self::create_named(path, path.display().to_string())
    }

    /// Does the same with another path for messages.
    pub fn create_named(path: &Path, uri: String) -> Result<Self> {
        let fail = |e| Error::io("creating", &uri, e);
        let place = Place::find(path).map_err(fail)?;
        let existing = fs::metadata(place.path()).ok();
        if existing.as_ref().is_some_and(Metadata::is_dir) {
            return Err(fail(io::Error::from(io::ErrorKind::IsADirectory)));
        }
        if let Some(metadata) = existing.as_ref().filter(|metadata| !metadata.is_file()) {
            return Self::open_special(&place, metadata, uri);
        }
        let is_empty = existing.is_some_and(|metadata| metadata.len() == 0);
        if (place.is_open_file || is_empty)
            && let Some(file) = open_in_place(&place).map_err(fail)?
        {
            refuse_mapped(&file, &uri)?;
            let turn = turn_of(&place, Some(&file)).map_err(fail)?;
            if place.is_open_file && !turn.is_alone() {
                return Err(Error::InvalidArgument(format!(
                    "another save of this process is writing into the open file `{uri}`: wait for \
                     its end"
                )));
            }
            let unpublished = TemporaryFile::in_place(place, &file).map_err(fail)?;
            return Ok(Self::new(file, uri, Some((unpublished, turn))));
        }
        let (file, unpublished) = begin(place, &uri)?;
        Ok(Self::new(file, uri, Some(unpublished)))
    }

    fn new(file: File, uri: String, unpublished: Option<(TemporaryFile, SaveTurn)>) -> Self {
        FileSink { unpublished, file, uri, reserved: AtomicU64::new(0) }
    }

    /// Opens a device, which cannot be replaced by a rename.
    fn open_special(place: &Place, metadata: &Metadata, uri: String) -> Result<Self> {
        refuse_pipe(metadata, &uri)?;
        let opened = OpenOptions::new().read(true).write(true).open(place.path());
        let file = opened.map_err(|e| Error::io("creating", &uri, e))?;
        Ok(Self::new(file, uri, None))
    }

    /// Another handle of the file.
    pub fn handle(&self) -> Result<File> {
        self.file.try_clone().map_err(|e| Error::io("opening", &self.uri, e))
    }

    /// Writes into a file that the caller has open for reading and writing. One that tensors of
    /// this process are mapped from is refused.
    pub fn from_file(file: File, uri: String) -> Result<Self> {
        refuse_pipe(&file.metadata().map_err(|e| Error::io("opening", &uri, e))?, &uri)?;
        refuse_mapped(&file, &uri)?;
        Ok(Self::new(file, uri, None))
    }
}

/// Refuses a target that cannot be sought in.
fn refuse_pipe(metadata: &Metadata, uri: &str) -> Result<()> {
    let kind = metadata.file_type();
    if !kind.is_fifo() && !kind.is_socket() {
        return Ok(());
    }
    Err(Error::InvalidArgument(format!(
        "expected a seekable file, found a pipe or a socket: `{uri}`; the index at the beginning is \
         written last, so save to a file and copy that"
    )))
}

/// Opens a file that is to be written where it lies: one that a process has open and that the path
/// names as such, or an empty one that no other save writes.
fn open_in_place(place: &Place) -> io::Result<Option<File>> {
    let opened = OpenOptions::new().read(true).write(true).open(place.path());
    if place.is_open_file {
        return opened.map(Some);
    }
    // The lock also tells that a save has not yet written anything. Without locks, or the
    // permission to read, an empty file is replaced like others.
    Ok(opened.ok().filter(|file| {
        let is_empty = || file.metadata().is_ok_and(|found| found.is_file() && found.len() == 0);
        is_empty() && matches!(crate::sys::try_flock(file), Ok(true)) && is_empty()
    }))
}

/// The turn of a save at a place. An open file has one order of saves, whatever its names.
fn turn_of(place: &Place, open: Option<&File>) -> io::Result<SaveTurn> {
    let (file, name) = match open.filter(|_| place.is_open_file) {
        Some(file) => (file, OsString::new()),
        None => (&place.folder.file, place.name.clone()),
    };
    Ok(SaveTurn::begin((Some(mapped::identity(file)?), name)))
}

/// Begins a file that will replace the one at a place, if there is one.
fn begin(place: Place, uri: &str) -> Result<(File, (TemporaryFile, SaveTurn))> {
    let fail = |e| Error::io("creating", uri, e);
    let old = open_replaced(&place).map_err(fail)?;
    let (path, shown) = (place.path(), place.folder.shown.clone());
    let folder = fs::metadata(&place.folder.path).map_err(fail)?;
    let refused = |error: io::Error| match error.raw_os_error() {
        Some(libc::EACCES | libc::EPERM | libc::EROFS | libc::EBUSY) if old.is_some() => {
            Error::Irreplaceable { uri: uri.to_owned(), folder: shown.clone(), error }
        }
        _ => fail(error),
    };
    let is_mount_point = old.as_ref().is_some_and(|(old, _)| place.folder.has_mount_point(old));
    let turn = turn_of(&place, None).map_err(fail)?;
    let (file, unpublished) = TemporaryFile::create(place, old.is_some()).map_err(refused)?;
    if is_mount_point {
        return Err(refused(io::Error::from_raw_os_error(libc::EBUSY)));
    }
    if let Some((_, metadata)) = &old {
        let own_user = file.metadata().map_err(fail)?.uid();
        if is_protected_by_sticky_bit(&path, metadata.owner.0, &folder, own_user) {
            return Err(refused(io::Error::from_raw_os_error(libc::EPERM)));
        }
        metadata.give(&file).map_err(fail)?;
    }
    Ok((file, (unpublished, turn)))
}

/// Opens the file that will be replaced. Replacing a file must require the same permission as
/// overwriting it. None if there is none, or none any more.
fn open_replaced(place: &Place) -> io::Result<Option<(File, FileMetadata)>> {
    let opened = OpenOptions::new().write(true).open(place.path());
    let described = opened.and_then(|file| FileMetadata::of(&file).map(|found| (file, found)));
    match described {
        // Some file systems say of a file that was just replaced that its handle is stale.
        Err(e) if matches!(e.raw_os_error(), Some(libc::ENOENT | libc::ESTALE)) => Ok(None),
        other => other.map(Some),
    }
}

/// Refuses a file that tensors of this process are mapped from.
fn refuse_mapped(file: &File, uri: &str) -> Result<()> {
    if mapped::is_mapped(file).map_err(|e| Error::io("examining", uri, e))? {
        return Err(Error::InvalidArgument(format!(
            "cannot write into `{uri}`: this process has tensors that were loaded from it with \
             mmap=True, and they would change; write another file and rename it"
        )));
    }
    Ok(())
}

/// True if the folder, like `/tmp`, lets only owners replace files, and another user owns this one.
fn is_protected_by_sticky_bit(target: &Path, old_user: u32, folder: &Metadata, user: u32) -> bool {
    if folder.mode() & libc::S_ISVTX == 0 || folder.uid() == user || old_user == user {
        return false;
    }
    // Tests the privilege by an operation that needs it: only the owner, or a privileged process,
    // may do this.
    let opened = OpenOptions::new().write(true).custom_flags(libc::O_NOATIME).open(target);
    opened.is_err_and(|e| e.raw_os_error() == Some(libc::EPERM))
}

impl WriteAt for FileSink {
    fn uri(&self) -> &str {
        &self.uri
    }

    fn facts(&self) -> SinkFacts {
        SinkFacts {
            max_writers: usize::MAX,
            default_writers: crate::sys::cpu_count(),
            max_positions: usize::MAX,
            is_visible_early: self.unpublished.is_none(),
            retained: 0,
            part_len: 0,
        }
    }

    fn write_at(&self, offset: u64, buffers: &[IoSlice<'_>], cancel: &dyn Cancel) -> Result<usize> {
        let write = || crate::sys::write_vectored_at(&self.file, offset, buffers);
        let written =
            retry_interrupted(cancel, write).map_err(|e| Error::of_io("writing", &self.uri, e))?;
        if self.unpublished.is_some() && written >= WRITEBACK_FROM {
            crate::sys::start_writeback(&self.file, offset, written as u64);
        }
        Ok(written)
    }

    fn read_back(&self, offset: u64, buffer: &mut [u8]) -> Result<()> {
        self.file.read_exact_at(buffer, offset).map_err(|e| Error::io("reading back", &self.uri, e))
    }

    fn reserve(&self, expected: &Reservation) -> Result<()> {
        let len = expected.len;
        if self.unpublished.is_some() {
            // Repeated reservations are made once: file systems look through all
            // that they are asked for.
            let before = self.reserved.fetch_max(len, Ordering::Relaxed);
            crate::sys::reserve(&self.file, before..len)
                .map_err(|e| Error::io("reserving space for", &self.uri, e))?;
        }
        Ok(())
    }

    /// Ends the file, syncs it, gives it its name, and syncs that. A folder that cannot be synced is
    /// no failure. If the disk fails, the error says that the file is there. On a busy disk this may
    /// take long; the file stays if the call is interrupted.
    fn publish(&mut self, len: u64, ending: Ending, cancel: &dyn Cancel) -> Result<Published> {
        let fail = |e| Error::io("finishing", &self.uri, e);
        if let Some((unpublished, _)) = &self.unpublished {
            unpublished.owner.check(&self.uri)?;
            let file = self.handle()?;
            run_detached(cancel, move || file.set_len(len).and_then(|()| file.sync_all()))?
                .map_err(fail)?;
        }
        let Some((mut unpublished, turn)) = self.unpublished.take() else {
            return Ok(Published::InPlace);
        };
        let other_name = match ending {
            Ending::Unclosed => unpublished.publish_unclosed(&self.file).map_err(fail).map(Some),
            Ending::Finished => turn
                .publish(cancel, || unpublished.publish(&self.file).map_err(fail))
                .map(|published| published.map(|()| None)),
        }?;
        crate::sys::release_flock(&self.file);
        let Some(other_name) = other_name else { return Ok(Published::Overtaken) };
        let synced = run_detached(cancel, move || sync_folder(&unpublished.target.folder.path))?;
        synced.map_err(|error| Error::Unsynced { uri: self.uri.clone(), error })?;
        Ok(other_name.map_or(Published::InPlace, Published::OtherName))
    }
}
