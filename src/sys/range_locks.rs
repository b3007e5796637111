//! Range locks of files (locks of open file descriptions), which end with the processes that hold
//! them. `unsafe` is allowed in this file: it makes system calls.
#![allow(unsafe_code)]

use std::ffi::CString;
use std::fs::File;
use std::io;
use std::ops::Range;
use std::os::fd::AsRawFd;
use std::os::unix::ffi::OsStrExt as _;
use std::path::Path;

/// The outcome of an attempt to lock a range.
#[derive(Debug, PartialEq, Eq)]
pub enum RangeLockAttempt {
    /// This open file description holds the lock of the range.
    Acquired,
    /// Another open file description holds a lock in the range, which begins at this position.
    HeldElsewhere(u64),
}

fn flock_request(range: &Range<u64>, kind: libc::c_int) -> io::Result<libc::flock> {
    let number =
        |n: u64| libc::off_t::try_from(n).map_err(|_| io::Error::from(io::ErrorKind::InvalidInput));
    let kind = libc::c_short::try_from(kind);
    Ok(libc::flock {
        l_type: kind.map_err(|_| io::Error::from(io::ErrorKind::InvalidInput))?,
        l_whence: 0, // SEEK_SET
        l_start: number(range.start)?,
        l_len: number(range.end.saturating_sub(range.start))?,
        l_pid: 0,
    })
}

/// Locks a range for this open file description, which all duplicates of the descriptor share. Does
/// not wait. A range that it holds already can be locked again.
pub fn try_lock_range(file: &File, range: &Range<u64>) -> io::Result<RangeLockAttempt> {
    let mut request = flock_request(range, libc::F_WRLCK)?;
    // SAFETY: one structure that lives until the call returns.
    if unsafe { libc::fcntl(file.as_raw_fd(), libc::F_OFD_SETLK, &raw const request) } == 0 {
        return Ok(RangeLockAttempt::Acquired);
    }
    let error = io::Error::last_os_error();
    if !matches!(error.raw_os_error(), Some(libc::EAGAIN | libc::EACCES)) {
        return Err(error);
    }
    // SAFETY: as above; the kernel writes the first conflicting lock to it.
    if unsafe { libc::fcntl(file.as_raw_fd(), libc::F_OFD_GETLK, &raw mut request) } != 0 {
        return Err(io::Error::last_os_error());
    }
    let free = libc::c_int::from(request.l_type) == libc::F_UNLCK;
    let from = if free { range.start } else { u64::try_from(request.l_start).unwrap_or(0) };
    Ok(RangeLockAttempt::HeldElsewhere(from))
}

/// Unlocks a range.
pub fn unlock_range(file: &File, range: &Range<u64>) {
    if let Ok(request) = flock_request(range, libc::F_UNLCK) {
        // SAFETY: one structure that lives until the call returns.
        let _ = unsafe { libc::fcntl(file.as_raw_fd(), libc::F_OFD_SETLK, &raw const request) };
    }
}

/// The range whose lock says that a file is in use. It lies behind all ranges that can be claimed.
const IN_USE: Range<u64> = 1 << 62..(1 << 62) + 1;

fn try_lock_in_use(file: &File, kind: libc::c_int) -> io::Result<bool> {
    let request = flock_request(&IN_USE, kind)?;
    // SAFETY: one structure that lives until the call returns.
    if unsafe { libc::fcntl(file.as_raw_fd(), libc::F_OFD_SETLK, &raw const request) } == 0 {
        return Ok(true);
    }
    match io::Error::last_os_error() {
        e if matches!(e.raw_os_error(), Some(libc::EAGAIN | libc::EACCES)) => Ok(false),
        e => Err(e),
    }
}

/// Takes the shared lock of a file in use. False if another open file description holds the
/// exclusive one.
pub fn try_lock_shared(file: &File) -> io::Result<bool> {
    try_lock_in_use(file, libc::F_RDLCK)
}

/// Takes the exclusive lock of a file that is open for writing. False if another open file
/// description holds the shared or the exclusive one.
pub fn try_lock_exclusive(file: &File) -> io::Result<bool> {
    try_lock_in_use(file, libc::F_WRLCK)
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
    match unsafe { libc::faccessat(libc::AT_FDCWD, path.as_ptr(), wanted, libc::AT_EACCESS) } {
        0 => Ok(()),
        _ => Err(io::Error::last_os_error()),
    }
}

/// The size of a file system in bytes, and the bytes that are free for this user.
pub fn disk_space(file: &File) -> io::Result<(u64, u64)> {
    let mut found = std::mem::MaybeUninit::<libc::statvfs>::uninit();
    // SAFETY: one structure, which the kernel fills if it returns 0.
    if unsafe { libc::fstatvfs(file.as_raw_fd(), found.as_mut_ptr()) } != 0 {
        return Err(io::Error::last_os_error());
    }
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
#[allow(clippy::unwrap_used)]
mod tests {
    use super::*;

    #[test]
    fn a_range_is_locked_by_one_open_file_description() {
        let path = tempfile::NamedTempFile::new().unwrap();
        let (one, other) = (path.reopen().unwrap(), path.reopen().unwrap());
        assert_eq!(try_lock_range(&one, &(10..20)).unwrap(), RangeLockAttempt::Acquired);
        assert_eq!(try_lock_range(&one, &(15..25)).unwrap(), RangeLockAttempt::Acquired);
        assert_eq!(try_lock_range(&other, &(5..12)).unwrap(), RangeLockAttempt::HeldElsewhere(10));
        assert_eq!(try_lock_range(&other, &(24..30)).unwrap(), RangeLockAttempt::HeldElsewhere(10));
        assert_eq!(try_lock_range(&other, &(25..30)).unwrap(), RangeLockAttempt::Acquired);
        unlock_range(&one, &(0..20));
        assert_eq!(try_lock_range(&other, &(5..20)).unwrap(), RangeLockAttempt::Acquired);
        assert!(try_lock_shared(&one).unwrap() && try_lock_shared(&other).unwrap());
        assert!(!try_lock_exclusive(&one).unwrap());
        drop(other);
        assert_eq!(try_lock_range(&one, &(0..100)).unwrap(), RangeLockAttempt::Acquired);
        assert!(try_lock_exclusive(&one).unwrap());
        assert!(!try_lock_shared(&path.reopen().unwrap()).unwrap());
    }
}
