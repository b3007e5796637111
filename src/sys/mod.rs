//! The system calls that the standard library does not offer. One of the few doors to `unsafe`.
#![allow(unsafe_code)]

pub mod process;

use std::ffi::{CString, c_int};
use std::fs::File;
use std::io::{self, IoSlice, IoSliceMut};
use std::os::fd::AsRawFd;
use std::path::Path;

/// The most buffers that one vectored call may name (`UIO_MAXIOV` of Linux).
pub const MAX_VECTORS: usize = 1024;

fn position(offset: u64) -> io::Result<libc::off_t> {
    libc::off_t::try_from(offset).map_err(|_| {
        io::Error::new(io::ErrorKind::InvalidInput, format!("file position {offset} is too large"))
    })
}

fn checked(result: isize) -> io::Result<usize> {
    usize::try_from(result).map_err(|_| io::Error::last_os_error())
}

fn vector_count(len: usize) -> c_int {
    c_int::try_from(len.min(MAX_VECTORS)).unwrap_or(c_int::MAX)
}

/// Reads at a position into several buffers, without moving the file's own position.
pub fn read_vectored_at(
    file: &File,
    offset: u64,
    buffers: &mut [IoSliceMut<'_>],
) -> io::Result<usize> {
    let offset = position(offset)?;
    // SAFETY: `IoSliceMut` is documented to have the layout of `iovec`, each one points to memory
    // that is exclusively borrowed for this call, and the count does not exceed the slice.
    checked(unsafe {
        libc::preadv(
            file.as_raw_fd(),
            buffers.as_mut_ptr().cast(),
            vector_count(buffers.len()),
            offset,
        )
    })
}

/// Writes several buffers at a position, without moving the file's own position.
pub fn write_vectored_at(file: &File, offset: u64, buffers: &[IoSlice<'_>]) -> io::Result<usize> {
    let offset = position(offset)?;
    // SAFETY: as for `read_vectored_at`, with shared borrows that the call only reads.
    checked(unsafe {
        libc::pwritev(
            file.as_raw_fd(),
            buffers.as_ptr().cast(),
            vector_count(buffers.len()),
            offset,
        )
    })
}

/// Whether the byte at a position is in memory, as far as the kernel says: true if it does not.
pub fn is_cached(file: &File, offset: u64) -> bool {
    #[cfg(target_os = "linux")]
    if let Some(cached) = in_page_cache(file, offset) {
        return cached;
    }
    // Older kernels: a read that may not wait, but may have the kernel read ahead.
    #[cfg(target_os = "linux")]
    if let Ok(offset) = position(offset) {
        let mut byte = 0u8;
        let vector = libc::iovec { iov_base: std::ptr::from_mut(&mut byte).cast(), iov_len: 1 };
        // SAFETY: one vector of one byte that lives until the call returns.
        let read = unsafe { libc::preadv2(file.as_raw_fd(), &vector, 1, offset, libc::RWF_NOWAIT) };
        return read >= 0 || io::Error::last_os_error().kind() != io::ErrorKind::WouldBlock;
    }
    let _ = (file, offset);
    true
}

/// What `cachestat(2)` says, of Linux 6.5 and later.
#[cfg(target_os = "linux")]
fn in_page_cache(file: &File, offset: u64) -> Option<bool> {
    /// The number of the call, the same on all architectures.
    const CACHESTAT: libc::c_long = 451;
    // Structures of the kernel: a range, and five counts of pages, the first those in the cache.
    let range: [u64; 2] = [offset, 1];
    let mut counts = [0u64; 5];
    // SAFETY: the kernel reads the range and writes the counts, which live until it returns.
    let result = unsafe {
        libc::syscall(CACHESTAT, file.as_raw_fd(), range.as_ptr(), counts.as_mut_ptr(), 0u32)
    };
    let [cached, ..] = counts;
    (result == 0).then_some(cached > 0)
}

/// The same file, opened once more for reading: the kernel keeps positions and its guess of what is
/// read next for each opening. None where that is not possible.
pub fn reopen(file: &File) -> Option<File> {
    #[cfg(target_os = "linux")]
    return File::open(format!("/proc/self/fd/{}", file.as_raw_fd())).ok();
    #[cfg(not(target_os = "linux"))]
    {
        let _ = file;
        None
    }
}

/// Locks a file for as long as it is open. False where another has done so; where there are no
/// locks it stays without one.
pub fn claim(file: &File) -> bool {
    // SAFETY: takes numbers only; the descriptor is open for the borrow of `file`.
    let result = unsafe { libc::flock(file.as_raw_fd(), libc::LOCK_EX | libc::LOCK_NB) };
    result == 0 || io::Error::last_os_error().kind() != io::ErrorKind::WouldBlock
}

/// Asks the kernel to begin writing a range to the disk, and does not wait for it.
///
/// Best effort: it only starts early what `fsync` will do anyway.
pub fn start_writeback(file: &File, offset: u64, len: u64) {
    #[cfg(target_os = "linux")]
    if let (Ok(offset), Ok(len)) = (position(offset), position(len)) {
        // SAFETY: takes numbers only; the descriptor is open for the borrow of `file`.
        let _ = unsafe {
            libc::sync_file_range(file.as_raw_fd(), offset, len, libc::SYNC_FILE_RANGE_WRITE)
        };
    }
    #[cfg(not(target_os = "linux"))]
    let _ = (file, offset, len);
}

/// Reserves disk space for a file, so that a full disk shows before anything is written.
/// File systems that cannot do it are not an error.
pub fn reserve(file: &File, len: u64) -> io::Result<()> {
    #[cfg(target_os = "linux")]
    {
        let len = position(len)?;
        if len == 0 {
            return Ok(());
        }
        // SAFETY: takes numbers only; the descriptor is open for the borrow of `file`.
        let result =
            unsafe { libc::fallocate(file.as_raw_fd(), libc::FALLOC_FL_KEEP_SIZE, 0, len) };
        if result != 0 {
            let error = io::Error::last_os_error();
            return match error.raw_os_error() {
                Some(libc::ENOSPC | libc::EDQUOT | libc::EFBIG) => Err(error),
                _ => Ok(()),
            };
        }
    }
    #[cfg(not(target_os = "linux"))]
    let _ = (file, len);
    Ok(())
}

/// Renames a file, unless something has the new name: that is `AlreadyExists`, and stays.
pub fn rename_to_free_name(from: &Path, to: &Path) -> io::Result<()> {
    #[cfg(target_os = "linux")]
    {
        use std::os::unix::ffi::OsStrExt as _;
        let here = libc::AT_FDCWD;
        let old = CString::new(from.as_os_str().as_bytes())?;
        let new = CString::new(to.as_os_str().as_bytes())?;
        // SAFETY: two strings that end in a zero and live until the call returns.
        let result = unsafe {
            libc::renameat2(here, old.as_ptr(), here, new.as_ptr(), libc::RENAME_NOREPLACE)
        };
        if result == 0 {
            return Ok(());
        }
        let error = io::Error::last_os_error();
        if !matches!(error.raw_os_error(), Some(libc::EINVAL | libc::ENOSYS)) {
            return Err(error);
        }
    }
    // File systems without that call: a second name is not made where there is one already.
    match std::fs::hard_link(from, to) {
        Ok(()) => std::fs::remove_file(from),
        Err(e) if e.kind() == io::ErrorKind::AlreadyExists => Err(e),
        // And without links: a look and a rename, with a moment between them.
        Err(_) => match std::fs::symlink_metadata(to) {
            Err(e) if e.kind() == io::ErrorKind::NotFound => std::fs::rename(from, to),
            Err(e) => Err(e),
            Ok(_) => Err(io::Error::from(io::ErrorKind::AlreadyExists)),
        },
    }
}

/// Gives the memory of whole pages back to the system.
///
/// # Safety
/// `[start, start + len)` is page-aligned, lies in a private mapping, and nobody reads or writes
/// it from now on: it reads as zeros or as the file afterwards.
pub unsafe fn release_pages(start: *mut u8, len: usize) {
    // SAFETY: the caller's promise. Failure leaves the pages where they are until the unmapping.
    let _ = unsafe { libc::madvise(start.cast(), len, libc::MADV_DONTNEED) };
}

/// Size of a page in bytes.
pub fn page_size() -> usize {
    // SAFETY: takes a number and returns one.
    usize::try_from(unsafe { libc::sysconf(libc::_SC_PAGESIZE) }).unwrap_or(4096)
}
