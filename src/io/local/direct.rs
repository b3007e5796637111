//! Direct reads of local files that are not in the page cache. `unsafe` is allowed in this file:
//! the kernel writes to its memory.
//!
//! Several reads are under way at once, by io_uring if the kernel allows it. Direct reads need
//! aligned memory and positions. If memory is aligned like the file, block for block, they go
//! straight into it. Other bytes, such as headers and the ends of tensors, go through a buffer.
#![allow(unsafe_code)]

use std::fs::File;
use std::io;
use std::os::fd::AsRawFd;
use std::os::unix::fs::{FileExt as _, OpenOptionsExt as _};
use std::sync::Arc;

use io_uring::{IoUring, opcode, types};

use super::direct_plan::PlannedRead;
use crate::cancel::{Cancel, Never, retry_interrupted};
use crate::error::{Error, Result};
use crate::io::{Capabilities, Facts, ReadAt};
use crate::mem::{Buffers, DISK_BLOCK, Mapping};
use crate::sys::sync::{Mutex, unpoisoned};
use crate::sys::{is_on_fuse, to_usize};

/// Bytes of a read. Disks reach their speed with several of these, and take one of them at once
/// even if it goes to small pages: many take at most 254 pages.
pub const READ_LEN: usize = 512 << 10;
/// The number of reads that one reader has under way.
pub const DEPTH: usize = 8;
/// Bytes of the buffer of one reader.
pub const DIRECT_MEMORY: u64 = (DEPTH * READ_LEN) as u64;

/// The direct reads of one reader of a file. Bytes that these fail to read come from the source.
pub struct DirectReader<'s> {
    file: File,
    shared: &'s dyn ReadAt,
    memory: Arc<Mutex<DirectMemory>>,
}

/// The ring and the buffer of a reader for direct reads, of one file after another.
pub struct DirectMemory {
    buffer: Mapping,
    ring: Option<IoUring>,
    /// The number of times that reads were waited for, and the sum of those that were under way.
    waits: u64,
    under_way: u64,
}

/// The abilities of a file system with direct reads.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum DirectSupport {
    /// Nothing.
    None,
    /// Reads one after another.
    Plain,
    /// Reads by io_uring.
    Ring,
}

impl DirectMemory {
    /// Allocates the memory.
    pub fn new() -> Option<Self> {
        let buffer = Mapping::new(DEPTH * READ_LEN).ok()?;
        Some(DirectMemory { buffer, ring: None, waits: 0, under_way: 0 })
    }

    /// Returns a thousand times the mean number of reads that were under way; None without a ring.
    pub fn mean_reads(&self) -> Option<u64> {
        self.under_way.saturating_mul(1000).checked_div(self.waits)
    }
}

impl<'s> DirectReader<'s> {
    /// Opens the file of a source once more. `support` is that of its file system, and is examined
    /// if it is not known. None if there are no direct reads.
    pub fn open(
        source: &'s dyn ReadAt,
        memory: &Arc<Mutex<DirectMemory>>,
        support: &mut Option<DirectSupport>,
    ) -> Option<Self> {
        let shared = source.file()?;
        let path = format!("/proc/self/fd/{}", shared.as_raw_fd());
        let file = File::options().read(true).custom_flags(libc::O_DIRECT).open(path).ok()?;
        let mut state = unpoisoned(memory.lock());
        let examined = || examine(&file, &mut state.buffer);
        match *support.get_or_insert_with(examined) {
            DirectSupport::None => return None,
            DirectSupport::Plain => state.ring = None,
            // io_uring is refused in many containers, and if the limit of locked memory is too low.
            DirectSupport::Ring if state.ring.is_none() => {
                state.ring = IoUring::new(u32::try_from(DEPTH).ok()?).ok();
            }
            DirectSupport::Ring => {}
        }
        Some(DirectReader { file, shared: source, memory: Arc::clone(memory) })
    }

    /// The kind of reads, for reports.
    pub fn name(&self) -> &'static str {
        match unpoisoned(self.memory.lock()).ring {
            Some(_) => "direct reads by io_uring",
            None => "direct reads",
        }
    }

    /// Executes planned reads, and returns the number of bytes that were filled in.
    fn read_planned(
        &self,
        state: &mut DirectMemory,
        plan: &[PlannedRead],
        into: &mut Buffers<'_>,
    ) -> io::Result<usize> {
        let DirectMemory { buffer, ring, waits, under_way } = state;
        let (memory, mut filled) = (buffer.bytes_mut(), 0);
        let Some(ring) = ring else {
            for planned in plan {
                let to = match planned.destination {
                    Some(at) => at,
                    None => part(memory, 0, planned.len)?.as_mut_ptr(),
                };
                // SAFETY: `planned.len` bytes are there, in our buffer or in memory of `into`, and
                // no other code uses them now.
                let read = unsafe { read_to(&self.file, to, planned.len, planned.position) }?;
                let got = planned.record(memory, read, into);
                filled += got;
                if got < planned.wanted {
                    break;
                }
            }
            return Ok(filled);
        };
        let mut reads =
            InFlightReads { ring, begun: 0, submitted: 0, ended: 0, results: [None; DEPTH] };
        let mut done = 0;
        while done < plan.len() {
            while let Some(next) = plan.get(reads.begun)
                && reads.begun - done < DEPTH
            {
                reads.begin(&self.file, memory, next)?;
            }
            (*waits, *under_way) = (*waits + 1, *under_way + (reads.begun - reads.ended) as u64);
            reads.wait()?;
            while let Some(result) = reads.results.get_mut(done % DEPTH).and_then(Option::take)
                && let Some(planned) = plan.get(done)
            {
                let read = usize::try_from(result)
                    .map_err(|_| io::Error::from_raw_os_error(result.wrapping_neg()))?;
                let block = part(memory, done % DEPTH * READ_LEN, READ_LEN)?;
                let got = planned.record(block, read, into);
                filled += got;
                if got < planned.wanted {
                    // The end of the file, or a read that was cut short. A ring that has reads that
                    // were not submitted is not used again: plain reads continue.
                    if reads.submitted < reads.begun {
                        return Err(io::Error::from(io::ErrorKind::UnexpectedEof));
                    }
                    return Ok(filled);
                }
                done += 1;
            }
        }
        Ok(filled)
    }
}

/// Examines the file system of a file that was opened for direct reads.
fn examine(file: &File, buffer: &mut Mapping) -> DirectSupport {
    let probe = buffer.bytes_mut().get_mut(..DISK_BLOCK).unwrap_or(&mut []);
    match file.read_at(probe, 0) {
        Err(_) => DirectSupport::None,
        // With FUSE, kernels fill the rest of a short read of a ring with wrong bytes.
        Ok(_) if is_on_fuse(file) => DirectSupport::Plain,
        Ok(_) => DirectSupport::Ring,
    }
}

/// Returns a part of the memory of reads.
fn part(memory: &mut [u8], start: usize, len: usize) -> io::Result<&mut [u8]> {
    let rest = memory.get_mut(start..);
    let found = rest.and_then(|rest| rest.get_mut(..len));
    found.ok_or_else(|| io::Error::other(Error::Bug("a read beyond its memory".to_owned())))
}

/// Reads at a position of a file.
///
/// # Safety
/// `len` bytes from `to` on can be written.
unsafe fn read_to(file: &File, to: *mut u8, len: usize, position: u64) -> io::Result<usize> {
    let position = libc::off_t::try_from(position).map_err(io::Error::other)?;
    retry_interrupted(&Never, || {
        // SAFETY: the caller's promise.
        let read = unsafe { libc::pread(file.as_raw_fd(), to.cast(), len, position) };
        usize::try_from(read).map_err(|_| io::Error::last_os_error())
    })
}

/// Reads under way. Dropping this waits for them, because the kernel writes to their memory.
struct InFlightReads<'r> {
    ring: &'r mut IoUring,
    /// Numbers of reads that were begun, that the kernel has taken, and that have ended.
    begun: usize,
    submitted: usize,
    ended: usize,
    results: [Option<i32>; DEPTH],
}

impl InFlightReads<'_> {
    /// Begins a read.
    fn begin(&mut self, file: &File, memory: &mut [u8], planned: &PlannedRead) -> io::Result<()> {
        let number = self.begun;
        self.begun += 1;
        let block = match planned.destination {
            Some(at) => at,
            None => part(memory, number % DEPTH * READ_LEN, planned.len)?.as_mut_ptr(),
        };
        let len = u32::try_from(planned.len).map_err(io::Error::other)?;
        let read = opcode::Read::new(types::Fd(file.as_raw_fd()), block, len)
            .offset(planned.position)
            .build()
            .user_data(number as u64);
        // SAFETY: the block, a part of ours or of the buffers that are to be filled, is not touched
        // before the read has ended, and stays as long as this value, which waits for all reads
        // when it is dropped; the file outlives it too.
        unsafe { self.ring.submission().push(&read) }.map_err(io::Error::other)
    }

    /// Submits what was begun, waits for a read, and collects the reads that have ended.
    fn wait(&mut self) -> io::Result<()> {
        let outcome = self.ring.submit_and_wait(1);
        for entry in self.ring.completion() {
            let slot = to_usize(entry.user_data()) % DEPTH;
            if let Some(slot) = self.results.get_mut(slot) {
                *slot = Some(entry.result());
            }
            self.ended += 1;
        }
        match outcome {
            Ok(submitted) => self.submitted += submitted,
            Err(error) if error.kind() == io::ErrorKind::Interrupted => {}
            Err(error) => return Err(error),
        }
        Ok(())
    }
}

impl Drop for InFlightReads<'_> {
    fn drop(&mut self) {
        // Reads that were never submitted end with the ring, which is not used again after an
        // error.
        while self.ended < self.submitted {
            if self.wait().is_err() {
                std::thread::sleep(std::time::Duration::from_millis(1));
            }
        }
    }
}

impl ReadAt for DirectReader<'_> {
    fn facts(&self) -> &Facts {
        self.shared.facts()
    }

    fn capabilities(&self) -> Capabilities {
        self.shared.capabilities()
    }

    fn read_at(&self, offset: u64, into: &mut Buffers<'_>, cancel: &dyn Cancel) -> Result<usize> {
        let wanted = into.remaining();
        let remaining_in_file = self.facts().len.unwrap_or(u64::MAX).saturating_sub(offset);
        let wanted = wanted.min(to_usize(remaining_in_file));
        if wanted == 0 {
            return Ok(0);
        }
        let mut state = unpoisoned(self.memory.lock());
        let read = loop {
            let (ring, remaining) = (state.ring.is_some(), into.remaining());
            let max_len = if ring { READ_LEN } else { DEPTH * READ_LEN };
            let plan = PlannedRead::plan(offset, into.ranges(usize::MAX), wanted, max_len);
            match self.read_planned(&mut state, &plan, into) {
                Ok(read) => break read,
                // Kernels before 5.6 do not support such reads in rings, others may lack memory for
                // them, and the file may have become shorter. Plain reads continue after the bytes
                // that have arrived.
                Err(_) if ring => {
                    state.ring = None;
                    if into.remaining() < remaining {
                        break remaining - into.remaining();
                    }
                }
                Err(_) => return self.shared.read_at(offset, into, cancel),
            }
        };
        into.arrived(read as u64);
        Ok(read)
    }
}

#[cfg(test)]
#[allow(clippy::cast_possible_truncation)]
mod tests {
    use super::*;
    use crate::cancel::Never;
    use crate::io::local::FileSource;
    use crate::io::read_exact_at;

    /// Some bytes in a file of a disk: temporary folders may be in memory.
    fn file_on_disk(len: usize) -> (tempfile::TempDir, Vec<u8>, FileSource) {
        let folder = tempfile::tempdir_in(env!("CARGO_MANIFEST_DIR")).unwrap();
        let path = folder.path().join("f");
        let bytes: Vec<u8> = (0..len).map(|i| (i * 7 + i / 4096) as u8).collect();
        std::fs::write(&path, &bytes).unwrap();
        let source = FileSource::open(&path).unwrap();
        (folder, bytes, source)
    }

    fn open_reader(source: &FileSource) -> Option<DirectReader<'_>> {
        let memory = Arc::new(Mutex::new(DirectMemory::new().unwrap()));
        DirectReader::open(source, &memory, &mut None)
    }

    #[test]
    fn any_range_is_read_into_any_buffers_with_and_without_io_uring() {
        let (_folder, bytes, source) = file_on_disk((10 << 20) + 1234);
        let Some(reader) = open_reader(&source) else {
            return eprintln!("no direct reads on this file system");
        };
        for _ in 0..2 {
            for (offset, len) in
                [(0, 1), (4095, 2), (1, 9 << 20), (5000, 4 << 20), (10 << 20, 1234), (123, 0)]
            {
                let (mut one, mut two) = (vec![0; len / 3], vec![0; len - len / 3]);
                let mut buffers = Buffers::from_slice(&mut one);
                buffers.push(crate::mem::as_uninit(&mut two));
                read_exact_at(&reader, offset as u64, &mut buffers, "", &Never).unwrap();
                assert!([one, two].concat() == bytes[offset..offset + len], "{offset} {len}");
            }
            let mut beyond = [0; 2000];
            let mut buffers = Buffers::from_slice(&mut beyond);
            assert_eq!(reader.read_at(10 << 20, &mut buffers, &Never).unwrap(), 1234);
            assert_eq!(reader.read_at(11 << 20, &mut buffers, &Never).unwrap(), 0);
            // A file that shrinks under the reader.
            reader.memory.lock().unwrap().ring = None;
        }
    }

    #[test]
    fn memory_aligned_like_the_file_is_read_into_directly() {
        let (_folder, bytes, source) = file_on_disk((10 << 20) + 1234);
        let Some(reader) = open_reader(&source) else { return };
        for ring in [true, false] {
            for (offset, before, len) in
                [(5000, 300, 5 << 20), (0, 0, 1 << 20), (4096, 10, 70 << 10)]
            {
                let mut mapping = Mapping::new(8 << 20).unwrap();
                let mut header = vec![0; before];
                let start = (offset + before) % 4096;
                let to = mapping.bytes_mut().get_mut(start..start + len).unwrap();
                let mut buffers = Buffers::from_slice(&mut header);
                buffers.push(crate::mem::as_uninit(to));
                let plan =
                    PlannedRead::plan(offset as u64, buffers.ranges(9), before + len, READ_LEN);
                let direct: usize = plan
                    .iter()
                    .filter(|read| read.destination.is_some())
                    .map(|read| read.len)
                    .sum();
                assert!(direct + 2 * 4096 > len, "{direct} of {len} bytes go straight");
                read_exact_at(&reader, offset as u64, &mut buffers, "", &Never).unwrap();
                assert!(header == bytes[offset..][..before]);
                assert!(mapping.bytes_mut()[start..][..len] == bytes[offset + before..][..len]);
            }
            if ring {
                reader.memory.lock().unwrap().ring = None;
            }
        }
    }

    #[test]
    fn shrunk_file_returns_its_remaining_bytes() {
        let (folder, bytes, source) = file_on_disk(3 << 20);
        let Some(reader) = open_reader(&source) else { return };
        let path = folder.path().join("f");
        File::options().write(true).open(path).unwrap().set_len(1 << 20).unwrap();
        let mut buffer = vec![0; 3 << 20];
        let read = reader.read_at(100, &mut Buffers::from_slice(&mut buffer), &Never).unwrap();
        assert!(buffer[..read] == bytes[100..1 << 20]);
    }
}
