//! The system calls that the standard library does not offer. One of the few doors to `unsafe`.
#![allow(unsafe_code)]

use std::ffi::c_int;
use std::fs::File;
use std::io::{self, IoSlice, IoSliceMut};
use std::os::fd::AsRawFd;

/// The most buffers that one vectored call may name (`UIO_MAXIOV` of Linux).
pub const MAX_VECTORS: usize = 1024;

fn position(offset: u64) -> io::Result<libc::off_t> {
    libc::off_t::try_from(offset)
        .map_err(|_| io::Error::new(io::ErrorKind::InvalidInput, format!("file position {offset} is too large")))
}

fn checked(result: isize) -> io::Result<usize> {
    usize::try_from(result).map_err(|_| io::Error::last_os_error())
}

fn vector_count(len: usize) -> c_int {
    c_int::try_from(len.min(MAX_VECTORS)).unwrap_or(c_int::MAX)
}

/// Reads at a position into several buffers, without moving the file's own position.
pub fn read_vectored_at(file: &File, offset: u64, buffers: &mut [IoSliceMut<'_>]) -> io::Result<usize> {
    let offset = position(offset)?;
    // SAFETY: `IoSliceMut` is documented to have the layout of `iovec`, each one points to memory
    // that is exclusively borrowed for this call, and the count does not exceed the slice.
    checked(unsafe {
        libc::preadv(file.as_raw_fd(), buffers.as_mut_ptr().cast(), vector_count(buffers.len()), offset)
    })
}

/// Writes several buffers at a position, without moving the file's own position.
pub fn write_vectored_at(file: &File, offset: u64, buffers: &[IoSlice<'_>]) -> io::Result<usize> {
    let offset = position(offset)?;
    // SAFETY: as for `read_vectored_at`, with shared borrows that the call only reads.
    checked(unsafe {
        libc::pwritev(file.as_raw_fd(), buffers.as_ptr().cast(), vector_count(buffers.len()), offset)
    })
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
        let result = unsafe { libc::fallocate(file.as_raw_fd(), libc::FALLOC_FL_KEEP_SIZE, 0, len) };
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

/// Gives the memory of whole pages back to the system; they read as zeros afterwards.
///
/// # Safety
/// `[start, start + len)` is page-aligned, lies in a private anonymous mapping, and nobody reads
/// or writes it from now on.
pub unsafe fn release_pages(start: *mut u8, len: usize) {
    // SAFETY: the caller's promise. Failure leaves the pages where they are until the unmapping.
    let _ = unsafe { libc::madvise(start.cast(), len, libc::MADV_DONTNEED) };
}

/// Size of a page in bytes.
pub fn page_size() -> usize {
    // SAFETY: takes a number and returns one.
    usize::try_from(unsafe { libc::sysconf(libc::_SC_PAGESIZE) }).unwrap_or(4096)
}

/// Duplicates a descriptor that somebody else owns.
#[cfg(feature = "python")]
pub fn duplicate(descriptor: c_int) -> io::Result<File> {
    use std::os::fd::{BorrowedFd, FromRawFd, IntoRawFd};
    if descriptor < 0 {
        return Err(io::Error::from_raw_os_error(libc::EBADF));
    }
    // SAFETY: not negative, and borrowed only for the duplication, which reports a closed one.
    let borrowed = unsafe { BorrowedFd::borrow_raw(descriptor) };
    let owned = borrowed.try_clone_to_owned()?;
    // SAFETY: the duplicate is ours alone.
    Ok(unsafe { File::from_raw_fd(owned.into_raw_fd()) })
}
