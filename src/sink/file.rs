//! Local files. A file written under a path appears there whole or not at all.

use std::fs::{self, File, OpenOptions};
use std::io::{self, IoSlice};
use std::os::unix::fs::{FileExt as _, MetadataExt as _, OpenOptionsExt as _, PermissionsExt as _};
use std::path::{Path, PathBuf};

use super::{Unclosed, WriteAt};
use crate::buffer::mapped;
use crate::error::{Error, Result};
use crate::sys::process::Maker;

/// A local file.
pub struct FileSink {
    file: File,
    uri: String,
    /// Until the file is published.
    pending: Option<Pending>,
}

/// A file that has not got its name yet.
struct Pending {
    /// Who alone may publish it, or remove it.
    maker: Maker,
    temporary: PathBuf,
    target: PathBuf,
}

impl FileSink {
    /// Begins a file that will be `path` once it is published; until then, and if it never is,
    /// whatever is at `path` stays. Missing parent directories are created.
    ///
    /// The bytes go to a temporary file in the same directory, which is removed when the sink is
    /// dropped unpublished. An existing file's permissions are kept; a symbolic link is followed.
    pub fn create(path: &Path) -> Result<Self> {
        let uri = path.display().to_string();
        let fail = |e| Error::io("creating", &uri, e);
        let target = match fs::canonicalize(path) {
            Ok(target) => target,
            Err(e) if e.kind() == io::ErrorKind::NotFound => end_of_links(path).map_err(fail)?,
            Err(e) => return Err(fail(e)),
        };
        let existing = fs::metadata(&target).ok();
        if let Some(metadata) = &existing {
            if metadata.is_dir() {
                return Err(fail(io::Error::from(io::ErrorKind::IsADirectory)));
            }
            if !metadata.is_file() {
                // A device: there is nothing to rename over.
                let file = OpenOptions::new().read(true).write(true).open(&target).map_err(fail)?;
                return Ok(FileSink { file, uri, pending: None });
            }
            // Replacing it must need the same permission as overwriting it.
            OpenOptions::new().write(true).open(&target).map_err(fail)?;
        }
        let name =
            target.file_name().ok_or_else(|| fail(io::Error::from(io::ErrorKind::InvalidInput)))?;
        let parent =
            target.parent().filter(|p| !p.as_os_str().is_empty()).unwrap_or(Path::new("."));
        fs::create_dir_all(parent).map_err(fail)?;
        let (file, temporary) = create_beside(parent, name).map_err(fail)?;
        let pending = Some(Pending { maker: Maker::this(), temporary, target });
        // From here on the temporary file is removed whatever happens.
        let sink = FileSink { file, uri: uri.clone(), pending };
        if let Some(metadata) = existing {
            let mode = metadata.permissions().mode() & 0o7777;
            sink.file.set_permissions(fs::Permissions::from_mode(mode)).map_err(fail)?;
        }
        Ok(sink)
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
                "`{uri}` must not be written: tensors of this process, loaded with mmap=True, are \
                 used in place of it and would change; write another file and rename it"
            )));
        }
        Ok(FileSink { file, uri, pending: None })
    }

    /// Ends the file at `len` bytes, and has it on the disk before it gets its name.
    fn settle(&self, len: u64) -> Result<()> {
        let settled = self.file.set_len(len).and_then(|()| self.file.sync_all());
        settled.map_err(|e| Error::io("finishing", &self.uri, e))
    }
}

/// Where a path leads that names nothing yet: absolute, because the process may change its folder,
/// and through symbolic links, as `open` would create what they point to.
fn end_of_links(path: &Path) -> io::Result<PathBuf> {
    // As many as Linux follows.
    const MOST: u32 = 40;
    let mut target = std::path::absolute(path)?;
    for _ in 0..MOST {
        match fs::read_link(&target) {
            Ok(link) => target = target.parent().unwrap_or(Path::new("/")).join(link),
            Err(_) => return Ok(target),
        }
    }
    Err(io::Error::from_raw_os_error(libc::ELOOP))
}

/// A new file with a name that nobody else uses, hidden and close to the final one. It is locked
/// while it is open: one that is not was left behind by a process that was killed.
fn create_beside(parent: &Path, name: &std::ffi::OsStr) -> io::Result<(File, PathBuf)> {
    const TRIES: u32 = 100;
    let mut shown = name.to_string_lossy().into_owned();
    // Leave room for the rest of the name within the usual limit of 255 bytes.
    while shown.len() > 200 {
        shown.pop();
    }
    let clock = std::time::SystemTime::now().duration_since(std::time::UNIX_EPOCH);
    let start = clock.map(|t| t.subsec_nanos()).unwrap_or_default();
    for attempt in 0..TRIES {
        let unique = format!("{}-{:08x}", std::process::id(), start.wrapping_add(attempt));
        let path = parent.join(format!(".{shown}.{unique}.tmp"));
        match OpenOptions::new().read(true).write(true).create_new(true).mode(0o666).open(&path) {
            Err(e) if e.kind() == io::ErrorKind::AlreadyExists => {}
            Err(e) => return Err(e),
            // Who cleans up may have come before the lock.
            Ok(file) if crate::sys::claim(&file) && file.metadata()?.nlink() > 0 => {
                return Ok((file, path));
            }
            Ok(_) => {}
        }
    }
    Err(io::Error::from(io::ErrorKind::AlreadyExists))
}

impl WriteAt for FileSink {
    fn uri(&self) -> &str {
        &self.uri
    }

    fn max_writers(&self) -> usize {
        usize::MAX
    }

    fn write_at(&self, offset: u64, buffers: &[IoSlice<'_>]) -> Result<usize> {
        loop {
            match crate::sys::write_vectored_at(&self.file, offset, buffers) {
                Err(e) if e.kind() == io::ErrorKind::Interrupted => {}
                Err(e) => return Err(Error::io("writing", &self.uri, e)),
                Ok(written) => {
                    if self.pending.is_some() {
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

    fn shows_early(&self) -> bool {
        self.pending.is_none()
    }

    fn reserve(&self, _head: u64, len: u64) -> Result<()> {
        if self.pending.is_some() {
            crate::sys::reserve(&self.file, len)
                .map_err(|e| Error::io("reserving space for", &self.uri, e))?;
        }
        Ok(())
    }

    fn publish(&mut self, len: u64) -> Result<()> {
        let Some(Pending { maker, temporary, target }) = &self.pending else {
            return Ok(());
        };
        maker.check(&self.uri)?;
        self.settle(len)?;
        fs::rename(temporary, target).map_err(|e| Error::io("finishing", &self.uri, e))?;
        let target = target.clone();
        self.pending = None;
        sync_name(&target, &self.uri)
    }

    fn publish_unclosed(&mut self, len: u64) -> Result<Unclosed> {
        let Some(Pending { maker, temporary, target }) = &self.pending else {
            return Ok(Unclosed::InPlace);
        };
        maker.check(&self.uri)?;
        self.settle(len)?;
        for number in 0..MOST_UNCLOSED {
            let name = unclosed_name(target, number);
            match crate::sys::rename_to_free_name(temporary, &name) {
                Err(e) if e.kind() == io::ErrorKind::AlreadyExists => {}
                Err(e) => return Err(Error::io("finishing", &self.uri, e)),
                Ok(()) => {
                    self.pending = None;
                    sync_name(&name, &self.uri)?;
                    return Ok(if number == 0 {
                        Unclosed::InPlace
                    } else {
                        Unclosed::Beside(name)
                    });
                }
            }
        }
        Err(Error::io("finishing", &self.uri, io::Error::from(io::ErrorKind::AlreadyExists)))
    }
}

/// So many names are tried for a file that was forgotten.
const MOST_UNCLOSED: u32 = 1000;

/// The name itself, then `name.unclosed`, `name.unclosed.2` and so on.
fn unclosed_name(target: &Path, number: u32) -> PathBuf {
    let mut name = target.as_os_str().to_owned();
    match number {
        0 => {}
        1 => name.push(".unclosed"),
        _ => name.push(format!(".unclosed.{number}")),
    }
    name.into()
}

/// Has the name of a file on the disk too. The file is there in any case: where a folder cannot be
/// synced that is no failure, and where the disk fails the error says that it is there.
fn sync_name(path: &Path, uri: &str) -> Result<()> {
    let parent = path.parent().filter(|p| !p.as_os_str().is_empty()).unwrap_or(Path::new("."));
    match File::open(parent).and_then(|folder| folder.sync_all()) {
        Ok(()) => Ok(()),
        Err(e) if CANNOT_SYNC.contains(&e.raw_os_error().unwrap_or(0)) => Ok(()),
        Err(error) => Err(Error::Unsynced { uri: uri.to_owned(), error }),
    }
}

/// Of folders that may not be read, and of file systems that do not sync folders.
const CANNOT_SYNC: [i32; 5] =
    [libc::EACCES, libc::EPERM, libc::EINVAL, libc::ENOTSUP, libc::ENOSYS];

impl Drop for FileSink {
    fn drop(&mut self) {
        if let Some(Pending { maker, temporary, .. }) = &self.pending
            && maker.is_here()
        {
            // Nothing more can be done about a file that cannot be removed.
            let _ = fs::remove_file(temporary);
        }
    }
}
