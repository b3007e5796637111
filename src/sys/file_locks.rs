//! Locks of open file descriptions, which end with the processes that hold them, and facts about
//! folders and disks. `unsafe` is allowed in this file: it makes system calls.
#![allow(unsafe_code)]

use std::ffi::CString;
use std::fs::File;
use std::io;
use std::os::fd::AsRawFd;
use std::os::unix::ffi::OsStrExt as _;
use std::path::Path;

use super::checked;

/// The byte whose lock says that a file is in use. It lies behind all bytes of files.
const IN_USE: libc::off_t = 1 << 62;
/// The byte whose lock says that a process is fetching the bytes of a file.
const FETCHING: libc::off_t = IN_USE + 1;

/// Locks or unlocks a byte for an open file description, which all duplicates of the descriptor
/// share. Does not wait: false if another one holds the lock.
fn set_lock(file: &File, byte: libc::off_t, kind: libc::c_int) -> io::Result<bool> {
    let invalid = |_| io::Error::from(io::ErrorKind::InvalidInput);
    let kind = libc::c_short::try_from(kind).map_err(invalid)?;
    // The position counts from the beginning of the file (SEEK_SET).
    let request = libc::flock { l_type: kind, l_whence: 0, l_start: byte, l_len: 1, l_pid: 0 };
    // SAFETY: one structure that lives until the call returns.
    let set = unsafe { libc::fcntl(file.as_raw_fd(), libc::F_OFD_SETLK, &raw const request) };
    match checked(set) {
        Err(e) if matches!(e.raw_os_error(), Some(libc::EAGAIN | libc::EACCES)) => Ok(false),
        set => set.map(|_| true),
    }
}

/// Takes the shared lock of a file in use. False if another open file description holds the
/// exclusive one.
pub fn try_lock_shared(file: &File) -> io::Result<bool> {
    set_lock(file, IN_USE, libc::F_RDLCK)
}

/// Takes the exclusive lock of a file that is open for writing. False if another open file
/// description holds the shared or the exclusive one.
pub fn try_lock_exclusive(file: &File) -> io::Result<bool> {
    set_lock(file, IN_USE, libc::F_WRLCK)
}

/// Takes the lock of the one process that fetches a file. False if another open file description
/// holds it.
pub fn try_lock_fetch(file: &File) -> io::Result<bool> {
    set_lock(file, FETCHING, libc::F_WRLCK)
}

/// Lets another process fetch a file.
pub fn unlock_fetch(file: &File) {
    let _ = set_lock(file, FETCHING, libc::F_UNLCK);
}

/// The effective user id of this process.
pub fn effective_user_id() -> u32 {
    // SAFETY: takes nothing and cannot fail.
    unsafe { libc::geteuid() }
}

/// Fails if this user may not make files in a folder, or if its file system is read-only.
pub fn check_writable(folder: &Path) -> io::Result<()> {
    let path = CString::new(folder.as_os_str().as_bytes())?;
    let wanted = libc::W_OK | libc::X_OK;
    // SAFETY: a text that ends with a zero byte and lives until the call returns.
    let found = unsafe { libc::faccessat(libc::AT_FDCWD, path.as_ptr(), wanted, libc::AT_EACCESS) };
    checked(found).map(drop)
}

/// The size of a file system in bytes, and the bytes that are free for this user.
pub fn disk_space(file: &File) -> io::Result<(u64, u64)> {
    let mut found = std::mem::MaybeUninit::<libc::statvfs>::uninit();
    // SAFETY: one structure, which the kernel fills if it returns 0.
    checked(unsafe { libc::fstatvfs(file.as_raw_fd(), found.as_mut_ptr()) })?;
    // SAFETY: filled, as it returned 0.
    let found = unsafe { found.assume_init() };
    let bytes = |blocks: libc::fsblkcnt_t| blocks.saturating_mul(found.f_frsize);
    Ok((bytes(found.f_blocks), bytes(found.f_bavail)))
}

/// True if a file is on a FUSE file system, or if its kind cannot be found.
pub fn is_on_fuse(file: &File) -> bool {
    let mut found = std::mem::MaybeUninit::<libc::statfs>::uninit();
    // SAFETY: one structure, which the kernel fills if it returns 0.
    if unsafe { libc::fstatfs(file.as_raw_fd(), found.as_mut_ptr()) } != 0 {
        return true;
    }
    // SAFETY: filled, as it returned 0.
    let found = unsafe { found.assume_init() };
    found.f_type == libc::FUSE_SUPER_MAGIC
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_lock_is_held_by_one_open_file_description() {
        let path = tempfile::NamedTempFile::new().unwrap();
        let (one, other) = (path.reopen().unwrap(), path.reopen().unwrap());
        assert!(try_lock_fetch(&one).unwrap() && try_lock_fetch(&one).unwrap());
        assert!(!try_lock_fetch(&other).unwrap());
        assert!(try_lock_shared(&one).unwrap() && try_lock_shared(&other).unwrap());
        assert!(!try_lock_exclusive(&one).unwrap());
        unlock_fetch(&one);
        assert!(try_lock_fetch(&other).unwrap());
        drop(other);
        assert!(try_lock_fetch(&one).unwrap() && try_lock_exclusive(&one).unwrap());
        assert!(!try_lock_shared(&path.reopen().unwrap()).unwrap());
    }
}
