//! System calls that the standard library does not offer. `unsafe` is allowed in this file: it
//! makes system calls.
#![allow(unsafe_code)]

mod attributes;
mod buffers;
pub mod clock;
mod file_locks;
mod file_stamp;
mod filled;
pub mod fork_safe_mutex;
pub mod numa;
pub mod process;
pub mod sync;

use std::ffi::{CString, c_int};
use std::fs::File;
use std::io::{self, IoSlice, Read as _};
use std::ops::Range;
use std::os::fd::AsRawFd;
use std::os::unix::ffi::OsStrExt as _;
use std::path::Path;
use std::time::{Duration, Instant};

use self::fork_safe_mutex::ForkSafeMutex;

pub use attributes::{attribute, attribute_names, set_attribute};
pub use buffers::{BufferToFill, Buffers, FilledPart, fill_all};
pub(crate) use buffers::{as_uninit, zero_fill};
pub use file_locks::{
    check_writable, disk_space, effective_user_id, is_on_fuse, try_lock_exclusive, try_lock_fetch,
    try_lock_shared, unlock_fetch,
};
pub use file_stamp::{FileStamp, file_stamp};
pub use filled::FilledRanges;

const _: () = assert!(usize::BITS == u64::BITS, "tensorizer needs a 64-bit system");

/// A length or a position in memory: `usize` has 64 bits, as asserted above.
#[allow(clippy::cast_possible_truncation)]
pub const fn to_usize(number: u64) -> usize {
    number as usize
}

/// The maximum number of buffers in one vectored call (`UIO_MAXIOV` of Linux).
pub const MAX_VECTORS: usize = 1024;

fn position(offset: u64) -> io::Result<libc::off_t> {
    libc::off_t::try_from(offset).map_err(|_| {
        io::Error::new(io::ErrorKind::InvalidInput, format!("file position {offset} is too large"))
    })
}

/// The result of a system call; if it is negative, the error that the call has left.
fn checked(result: impl TryInto<usize>) -> io::Result<usize> {
    result.try_into().map_err(|_| io::Error::last_os_error())
}

fn vector_count(len: usize) -> c_int {
    c_int::try_from(len.min(MAX_VECTORS)).unwrap_or(c_int::MAX)
}

/// Reads at a position into several buffers, without moving the file's own position.
pub fn read_vectored_at(file: &File, offset: u64, buffers: &mut Buffers<'_>) -> io::Result<usize> {
    let offset = position(offset)?;
    let ranges = buffers.ranges(MAX_VECTORS);
    // SAFETY: each range is memory that is exclusively borrowed for this call, and the count does
    // not exceed the slice.
    let read = checked(unsafe {
        libc::preadv(file.as_raw_fd(), ranges.as_ptr(), vector_count(ranges.len()), offset)
    })?;
    // SAFETY: the kernel has written `read` bytes, in order.
    unsafe { buffers.advance(read) };
    Ok(read)
}

/// Reads the next bytes of a pipe, a socket or a terminal.
pub fn read_vectored(file: &File, buffers: &mut Buffers<'_>) -> io::Result<usize> {
    let ranges = buffers.ranges(MAX_VECTORS);
    // SAFETY: as for `read_vectored_at`.
    let read = checked(unsafe {
        libc::readv(file.as_raw_fd(), ranges.as_ptr(), vector_count(ranges.len()))
    })?;
    // SAFETY: the kernel has written `read` bytes, in order.
    unsafe { buffers.advance(read) };
    Ok(read)
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

/// Waits until a read of a pipe, a socket or a terminal would not block: there are bytes, or it has
/// ended. False if the time is over before that, or a signal interrupts. A named pipe that was
/// opened at once has not ended as long as no writer has opened it.
pub fn wait_readable(file: &File, at_most: Duration) -> io::Result<bool> {
    let mut wanted = libc::pollfd { fd: file.as_raw_fd(), events: libc::POLLIN, revents: 0 };
    let milliseconds = c_int::try_from(at_most.as_millis()).unwrap_or(c_int::MAX);
    // SAFETY: one structure that lives until the call returns.
    match checked(unsafe { libc::poll(&mut wanted, 1, milliseconds) }) {
        Err(e) if e.kind() == io::ErrorKind::Interrupted => Ok(false),
        ready => Ok(ready? > 0),
    }
}

/// Opens a path for reading. A named pipe is opened at once, with or without a writer: see
/// [`wait_readable`].
pub fn open_nonblocking(path: &Path) -> io::Result<File> {
    use std::os::unix::fs::OpenOptionsExt as _;
    File::options().read(true).custom_flags(libc::O_NONBLOCK).open(path)
}

/// True if the byte at a position is in the page cache; None if the kernel does not say.
pub fn is_in_page_cache(file: &File, offset: u64) -> Option<bool> {
    if let Some(cached) = cachestat(file, offset) {
        return Some(cached);
    }
    // Older kernels: a read that may not block. It may make the kernel read ahead.
    let offset = position(offset).ok()?;
    let mut byte = 0u8;
    let vector = libc::iovec { iov_base: std::ptr::from_mut(&mut byte).cast(), iov_len: 1 };
    // SAFETY: one vector of one byte that lives until the call returns.
    let read = unsafe { libc::preadv2(file.as_raw_fd(), &vector, 1, offset, libc::RWF_NOWAIT) };
    let would_wait = io::Error::last_os_error().kind() == io::ErrorKind::WouldBlock;
    if read >= 0 { Some(true) } else { would_wait.then_some(false) }
}

/// The result of `cachestat(2)`, which Linux has since 6.5; None without it.
fn cachestat(file: &File, offset: u64) -> Option<bool> {
    /// The number of the call, the same on all architectures.
    const CACHESTAT: libc::c_long = 451;
    // Structures of the kernel: a range, and five counts of pages. The first counts those in the
    // cache.
    let range: [u64; 2] = [offset, 1];
    let mut counts = [0u64; 5];
    // SAFETY: the kernel reads the range and writes the counts, which live until it returns.
    let result = unsafe {
        libc::syscall(CACHESTAT, file.as_raw_fd(), range.as_ptr(), counts.as_mut_ptr(), 0u32)
    };
    let [cached, ..] = counts;
    (result == 0).then_some(cached > 0)
}

/// Asks the kernel to begin reading a range into the page cache. It blocks only while more reads
/// are under way than the disk accepts.
pub fn read_ahead(file: &File, offset: u64, len: u64) {
    /// For one call the kernel reads no more than its read-ahead, or the disk's limit of one
    /// request.
    const STEP: u64 = 512 << 10;
    let end = offset.saturating_add(len);
    let mut at = offset;
    while at < end {
        let step = STEP.min(end - at);
        let (Ok(start), Ok(step_len)) = (position(at), position(step)) else { return };
        // SAFETY: takes numbers only; the descriptor is open for the borrow of `file`.
        unsafe {
            libc::posix_fadvise(file.as_raw_fd(), start, step_len, libc::POSIX_FADV_WILLNEED)
        };
        at += step;
    }
}

/// Opens the same file once more for reading. The kernel keeps the position, and its prediction of
/// the next reads, for each open file description. None if that is not possible.
pub fn reopen(file: &File) -> Option<File> {
    File::open(format!("/proc/self/fd/{}", file.as_raw_fd())).ok()
}

/// The number of the mount that a file was opened through; None if the kernel does not say.
pub fn mount_number(file: &File) -> Option<u64> {
    // SAFETY: a struct of numbers.
    let mut found: libc::statx = unsafe { std::mem::zeroed() };
    // SAFETY: an empty path means the descriptor, which is open for the borrow of `file`; the call
    // writes one struct.
    let result = unsafe {
        let (descriptor, path) = (file.as_raw_fd(), c"".as_ptr());
        libc::statx(descriptor, path, libc::AT_EMPTY_PATH, libc::STATX_MNT_ID, &raw mut found)
    };
    (result == 0 && found.stx_mask & libc::STATX_MNT_ID != 0).then_some(found.stx_mnt_id)
}

/// Asks the kernel to begin writing a range to disk, without waiting for it.
///
/// Best effort: it only starts early what `fsync` will do anyway.
pub fn start_writeback(file: &File, offset: u64, len: u64) {
    if let (Ok(offset), Ok(len)) = (position(offset), position(len)) {
        // SAFETY: takes numbers only; the descriptor is open for the borrow of `file`.
        let _ = unsafe {
            libc::sync_file_range(file.as_raw_fd(), offset, len, libc::SYNC_FILE_RANGE_WRITE)
        };
    }
}

/// Reserves disk space for a range of a file, so that a full disk is found before anything is
/// written. It is no error if the file system cannot do that.
pub fn reserve(file: &File, range: Range<u64>) -> io::Result<()> {
    if range.is_empty() {
        return Ok(());
    }
    let (start, len) = (position(range.start)?, position(range.end - range.start)?);
    let full = [libc::ENOSPC, libc::EDQUOT, libc::EFBIG].map(Some);
    let mode = libc::FALLOC_FL_KEEP_SIZE;
    // SAFETY: takes numbers only; the descriptor is open for the borrow of `file`.
    match checked(unsafe { libc::fallocate(file.as_raw_fd(), mode, start, len) }) {
        Err(error) if full.contains(&error.raw_os_error()) => Err(error),
        _ => Ok(()),
    }
}

/// Renames a file. If the new name exists, the error is `AlreadyExists`, and that file stays.
pub fn rename_to_free_name(from: &Path, to: &Path) -> io::Result<()> {
    let here = libc::AT_FDCWD;
    let old = CString::new(from.as_os_str().as_bytes())?;
    let new = CString::new(to.as_os_str().as_bytes())?;
    // SAFETY: two strings that end in a zero and live until the call returns.
    let renamed = checked(unsafe {
        libc::renameat2(here, old.as_ptr(), here, new.as_ptr(), libc::RENAME_NOREPLACE)
    });
    match renamed {
        Err(e) if matches!(e.raw_os_error(), Some(libc::EINVAL | libc::ENOSYS)) => {}
        renamed => return renamed.map(drop),
    }
    // File systems without that call: a hard link is not made either if the name exists.
    match std::fs::hard_link(from, to) {
        Ok(()) => std::fs::remove_file(from),
        Err(e) if e.kind() == io::ErrorKind::AlreadyExists => Err(e),
        // File systems without links: a check and a rename, between which another process may take
        // the name.
        Err(_) => match std::fs::symlink_metadata(to) {
            Err(e) if e.kind() == io::ErrorKind::NotFound => std::fs::rename(from, to),
            Err(e) => Err(e),
            Ok(_) => Err(io::Error::from(io::ErrorKind::AlreadyExists)),
        },
    }
}

/// Takes the exclusive `flock` of an open file description, which all duplicates of its descriptor
/// share. Does not wait: false if another holds it. An error if locks do not work.
pub fn try_flock(file: &File) -> io::Result<bool> {
    loop {
        // SAFETY: takes numbers only; the descriptor is open for the borrow of `file`.
        match checked(unsafe { libc::flock(file.as_raw_fd(), libc::LOCK_EX | libc::LOCK_NB) }) {
            Err(e) if e.kind() == io::ErrorKind::WouldBlock => return Ok(false),
            Err(e) if e.kind() == io::ErrorKind::Interrupted => {}
            locked => return locked.map(|_| true),
        }
    }
}

/// Releases that lock, if it was held.
pub fn release_flock(file: &File) {
    // SAFETY: takes numbers only; the descriptor is open for the borrow of `file`.
    let _ = unsafe { libc::flock(file.as_raw_fd(), libc::LOCK_UN) };
}

/// Gives a name to an open file, which may have had none. If the name exists, the error is
/// `AlreadyExists`.
pub fn link(file: &File, name: &Path) -> io::Result<()> {
    let here = libc::AT_FDCWD;
    let name = CString::new(name.as_os_str().as_bytes())?;
    let number = file.as_raw_fd();
    let from = c"".as_ptr();
    // SAFETY: two strings that end in a zero and live until the call returns; the descriptor is
    // open for the borrow of `file`.
    match checked(unsafe { libc::linkat(number, from, here, name.as_ptr(), libc::AT_EMPTY_PATH) }) {
        Err(e) if e.kind() != io::ErrorKind::AlreadyExists => {}
        linked => return linked.map(drop),
    }
    // The call above needs a privilege before Linux 6.10; this one needs /proc.
    let path = CString::new(format!("/proc/self/fd/{number}"))?;
    let flags = libc::AT_SYMLINK_FOLLOW;
    // SAFETY: as above.
    checked(unsafe { libc::linkat(here, path.as_ptr(), here, name.as_ptr(), flags) }).map(drop)
}

/// Returns the memory of whole pages to the system.
///
/// # Safety
/// `[start, start + len)` is page-aligned, lies in a private mapping, and is neither read nor
/// written from now on: its content is lost, and becomes zeros or that of the file.
pub unsafe fn release_pages(start: *mut u8, len: usize) {
    // SAFETY: the caller's promise. After a failure the pages stay until they are unmapped. Miri
    // has no such call.
    let _ = cfg!(miri) || unsafe { libc::madvise(start.cast(), len, libc::MADV_DONTNEED) } == 0;
}

/// CPU time that all threads of the process have used together.
pub fn cpu_time() -> Duration {
    let mut time = libc::timespec { tv_sec: 0, tv_nsec: 0 };
    // SAFETY: one structure that lives until the call returns, which cannot fail.
    unsafe { libc::clock_gettime(libc::CLOCK_PROCESS_CPUTIME_ID, &mut time) };
    let seconds = u64::try_from(time.tv_sec).unwrap_or(0);
    Duration::new(seconds, u32::try_from(time.tv_nsec).unwrap_or(0))
}

/// Fills a buffer with random bytes that cannot be predicted, by `getrandom` or else from
/// `/dev/urandom`. If both are forbidden, as in a sandbox, the error is that of the second.
pub fn random(bytes: &mut [u8]) -> io::Result<()> {
    let mut done = 0;
    while let Some(unfilled) = bytes.get_mut(done..).filter(|unfilled| !unfilled.is_empty()) {
        // SAFETY: writes at most `unfilled.len()` bytes there.
        let got = unsafe { libc::getrandom(unfilled.as_mut_ptr().cast(), unfilled.len(), 0) };
        match checked(got) {
            Ok(got) => done += got,
            Err(e) if e.kind() == io::ErrorKind::Interrupted => {}
            Err(_) => return File::open("/dev/urandom")?.read_exact(unfilled),
        }
    }
    Ok(())
}

/// Size of a page in bytes.
pub fn page_size() -> usize {
    // SAFETY: takes a number and returns one.
    usize::try_from(unsafe { libc::sysconf(libc::_SC_PAGESIZE) }).unwrap_or(4096)
}

/// The number of cores that this process may use, within the quota of its control group. It is
/// cached for a second: finding out takes some system calls and files, and each load of each tensor
/// needs it.
pub fn cpu_count() -> usize {
    static CACHED: ForkSafeMutex<Option<(Instant, usize)>> = ForkSafeMutex::new(None);
    let mut cached = CACHED.lock();
    let fresh = cached.filter(|(found, _)| found.elapsed() < Duration::from_secs(1));
    let count = || std::thread::available_parallelism().map_or(1, std::num::NonZero::get);
    cached.insert(fresh.unwrap_or_else(|| (Instant::now(), count()))).1
}

#[cfg(test)]
#[allow(clippy::cast_possible_truncation, clippy::cast_sign_loss)]
mod tests {
    #[test]
    fn the_number_of_cores_is_cached() {
        let (begun, first) = (super::Instant::now(), super::cpu_count());
        let again = std::thread::spawn(|| {
            let one = [1usize; 1];
            // SAFETY: a mask of `size_of_val(&one)` bytes, for this thread, which ends soon.
            let set = unsafe { libc::sched_setaffinity(0, size_of_val(&one), one.as_ptr().cast()) };
            // If the process may not run on the first core, it keeps its cores, and there is
            // nothing to test.
            (set, super::cpu_count())
        });
        let count = again.join().map_err(|_| "it panicked").map(|(_, count)| count);
        // The machine may have been busy for so long that it is found out again.
        assert!(count == Ok(first) || begun.elapsed() > super::Duration::from_millis(900));
    }

    /// Makes the system refuse some calls of this thread from now on.
    fn refuse(calls: &[libc::c_long]) -> bool {
        let step = |code, k, jt| libc::sock_filter { code, jt, jf: 0, k };
        // Loads the number of the call; two steps for each call that is refused; then all others
        // are allowed.
        let mut steps = vec![step((libc::BPF_LD | libc::BPF_W | libc::BPF_ABS) as u16, 0, 0)];
        for &call in calls {
            let refused = libc::SECCOMP_RET_ERRNO | libc::EPERM as u32;
            let is_other = (libc::BPF_JMP | libc::BPF_JEQ | libc::BPF_K) as u16;
            steps.push(libc::sock_filter { code: is_other, jt: 0, jf: 1, k: call as u32 });
            steps.push(step((libc::BPF_RET | libc::BPF_K) as u16, refused, 0));
        }
        steps.push(step((libc::BPF_RET | libc::BPF_K) as u16, libc::SECCOMP_RET_ALLOW, 0));
        let program = libc::sock_fprog { len: steps.len() as u16, filter: steps.as_mut_ptr() };
        // SAFETY: numbers, and a program that lives until the call returns.
        unsafe {
            libc::prctl(libc::PR_SET_NO_NEW_PRIVS, 1, 0, 0, 0) == 0
                && libc::prctl(libc::PR_SET_SECCOMP, libc::SECCOMP_MODE_FILTER, &raw const program)
                    == 0
        }
    }

    #[test]
    fn a_system_without_random_numbers_is_an_error() {
        let ask = || crate::codec::crypt::random::<16>().map(|_| ()).map_err(|e| e.to_string());
        let asked = std::thread::spawn(move || {
            let first = refuse(&[libc::SYS_getrandom]).then(ask);
            (first, refuse(&[libc::SYS_openat]).then(ask))
        });
        let (by_file, by_none) = asked.join().unwrap_or_else(|_| panic!("it panicked"));
        let none = "cannot get random numbers from the system: Operation not permitted (os error \
                    1)";
        assert_eq!((by_file, by_none), (Some(Ok(())), Some(Err(none.to_owned()))));
    }
}
