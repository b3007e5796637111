//! A folder that is held open, so that files in it keep their place when its path changes.

use std::ffi::OsString;
use std::fs::{self, File, OpenOptions};
use std::io;
use std::os::fd::AsRawFd as _;
use std::os::unix::fs::{MetadataExt as _, OpenOptionsExt as _};
use std::path::{Path, PathBuf};

use crate::sys;

/// A folder. Paths of its entries lead to it even after it was renamed, or after a symbolic link
/// that led to it was changed.
pub(super) struct HeldFolder {
    pub(super) file: File,
    /// The path by which the system finds the folder as long as this value lives: one that does not
    /// depend on its name, where there is one.
    pub(super) path: PathBuf,
    /// Its path when it was opened, for messages.
    pub(super) shown: PathBuf,
}

impl HeldFolder {
    /// Opens a folder. That needs no permission to list it.
    fn open(folder: &Path) -> io::Result<Self> {
        let flags = libc::O_PATH | libc::O_DIRECTORY;
        let file = OpenOptions::new().read(true).custom_flags(flags).open(folder)?;
        let by_number = PathBuf::from(format!("/proc/self/fd/{}", file.as_raw_fd()));
        // Without /proc, the path is all that there is.
        let (path, shown) = match fs::read_link(&by_number) {
            Ok(shown) => (by_number, shown),
            Err(_) => (folder.to_owned(), folder.to_owned()),
        };
        Ok(HeldFolder { file, path, shown })
    }

    /// True if an open file is a mount point in this folder, so that it cannot be renamed over.
    pub(super) fn has_mount_point(&self, file: &File) -> bool {
        mount_of(&self.file).zip(mount_of(file)).is_some_and(|(folder, file)| folder != file)
    }

    /// True if its links stand for files that a process has open, as in `/proc/self/fd`.
    fn links_are_open_files(&self) -> bool {
        let is_same = |process: fs::Metadata| {
            self.file.metadata().is_ok_and(|folder| folder.dev() == process.dev())
        };
        fs::metadata("/proc/self/fd").is_ok_and(is_same)
    }
}

/// The number of the mount that a file was opened through; None if the kernel does not say.
fn mount_of(file: &File) -> Option<u64> {
    sys::mount_number(file).or_else(|| {
        // Kernels before 5.8 say it only here.
        let info = fs::read_to_string(format!("/proc/self/fdinfo/{}", file.as_raw_fd())).ok()?;
        info.lines().find_map(|line| line.strip_prefix("mnt_id:"))?.trim().parse().ok()
    })
}

/// The place of a file: a name in a folder.
pub(super) struct Place {
    pub(super) folder: HeldFolder,
    pub(super) name: OsString,
    /// True if the name stands for an open file, as `/dev/stdout` and `/proc/self/fd/3` do.
    pub(super) is_open_file: bool,
}

impl Place {
    /// Finds the place of a path. Symbolic links are followed, as `open` would do; missing folders
    /// are created.
    pub(super) fn find(path: &Path) -> io::Result<Self> {
        // Maximum number of symbolic links, as in Linux.
        const MAX_LINKS: u32 = 40;
        // Absolute, because the process may change its working directory.
        let mut path = std::path::absolute(path)?;
        let mut _followed = None;
        for _ in 0..MAX_LINKS {
            let (Some(parent), Some(name)) = (path.parent(), path.file_name()) else {
                return Err(io::Error::from(io::ErrorKind::IsADirectory));
            };
            let folder = match HeldFolder::open(parent) {
                Err(e) if e.kind() == io::ErrorKind::NotFound => {
                    make_folders(parent)?;
                    HeldFolder::open(parent)?
                }
                opened => opened?,
            };
            let name = name.to_owned();
            let found = Place { folder, name, is_open_file: false };
            match fs::read_link(found.path()) {
                Ok(_) if found.folder.links_are_open_files() => {
                    return Ok(Place { is_open_file: true, ..found });
                }
                // The folder stays open as long as its path is used.
                Ok(link) => {
                    path = found.folder.path.join(link);
                    _followed = Some(found.folder);
                }
                Err(_) => return Ok(found),
            }
        }
        Err(io::Error::from_raw_os_error(libc::ELOOP))
    }

    /// The path by which the system finds the file.
    pub(super) fn path(&self) -> PathBuf {
        self.folder.path.join(&self.name)
    }
}

/// Creates a folder and its missing ancestors. Their names are synced before anything is in them.
fn make_folders(folder: &Path) -> io::Result<()> {
    let missing: Vec<&Path> = folder.ancestors().take_while(|above| !above.exists()).collect();
    fs::create_dir_all(folder).map_err(|error| match error.kind() {
        io::ErrorKind::AlreadyExists => io::Error::from_raw_os_error(libc::ENOTDIR),
        _ => error,
    })?;
    missing.into_iter().filter_map(Path::parent).try_for_each(sync_folder)
}

/// Syncs the names in a folder, if the system allows it.
pub(super) fn sync_folder(folder: &Path) -> io::Result<()> {
    match File::open(folder).and_then(|folder| folder.sync_all()) {
        Err(e) if CANNOT_SYNC.contains(&e.raw_os_error().unwrap_or(0)) => Ok(()),
        other => other,
    }
}

/// Errors for folders that may not be read, and of file systems that do not sync folders.
const CANNOT_SYNC: [i32; 5] =
    [libc::EACCES, libc::EPERM, libc::EINVAL, libc::ENOTSUP, libc::ENOSYS];
