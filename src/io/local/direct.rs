//! Local files that are not in the page cache, read around it. One of the few doors to `unsafe`.
//!
//! Several reads are under way at once, by io_uring where the kernel allows it. Direct reads want
//! aligned memory and positions: where memory lies as the file does, block for block, they go
//! straight into it. The rest, such as headers and the ends of tensors, goes through a buffer.
#![allow(unsafe_code)]
// A broken invariant ends the call by a panic that its boundary catches.
#![allow(clippy::indexing_slicing)]

use std::fs::File;
use std::io;
use std::os::fd::AsRawFd;
use std::os::unix::fs::{FileExt as _, OpenOptionsExt as _};
use std::sync::{Mutex, PoisonError};

use io_uring::{IoUring, opcode, types};

use crate::cancel::Cancel;
use crate::error::{Error, Result};
use crate::io::{Capabilities, ReadAt};
use crate::mem::{Arena, Buffers, DISK_BLOCK};

/// Bytes of a read; disks reach their speed with this, and a buffer is soon full.
const BLOCK: usize = 512 << 10;
/// Reads that are under way at once for one reader.
const DEPTH: usize = 8;
/// Bytes of the buffer of one reader.
pub const DIRECT_MEMORY: u64 = (DEPTH * BLOCK) as u64;
/// Less than this goes through the buffer together with what is beside it.
const STRAIGHT_FROM: usize = 64 << 10;

/// One reader's way around the page cache.
pub struct DirectReader {
    file: File,
    uri: String,
    traits: Capabilities,
    state: Mutex<DirectState>,
}

struct DirectState {
    memory: Arena,
    ring: Option<IoUring>,
}

impl DirectReader {
    /// Opens the file behind a source once more. None where its file system has no direct reads.
    pub fn open(source: &dyn ReadAt) -> Option<Self> {
        let path = format!("/proc/self/fd/{}", source.file()?.as_raw_fd());
        let file = File::options().read(true).custom_flags(libc::O_DIRECT).open(path).ok()?;
        let mut memory = Arena::new(DEPTH * BLOCK).ok()?;
        let probe = memory.bytes_mut().get_mut(..DISK_BLOCK)?;
        file.read_at(probe, 0).ok()?;
        // Refused in many containers, and where too little memory may be locked.
        let ring = IoUring::new(u32::try_from(DEPTH).ok()?).ok();
        let state = Mutex::new(DirectState { memory, ring });
        Some(DirectReader {
            file,
            uri: source.uri().to_owned(),
            traits: source.capabilities(),
            state,
        })
    }

    /// The kind of reads, for reports.
    pub fn name(&self) -> &'static str {
        match self.state.lock().unwrap_or_else(PoisonError::into_inner).ring {
            Some(_) => "direct reads by io_uring",
            None => "direct reads",
        }
    }

    /// Reads what is planned, and tells how many bytes of the buffers were filled.
    fn read_planned(
        &self,
        state: &mut DirectState,
        plan: &[Planned],
        into: &mut Buffers<'_>,
    ) -> io::Result<usize> {
        let DirectState { memory, ring } = state;
        let memory = memory.bytes_mut();
        let mut filled = 0;
        let Some(ring) = ring else {
            for planned in plan {
                let to = match planned.straight {
                    Some(at) => at.0,
                    None => memory[..planned.len].as_mut_ptr(),
                };
                // SAFETY: so many bytes are there, in our buffer or in memory of `into`, and no
                // other code uses them now.
                let read = unsafe { read_to(&self.file, to, planned.len, planned.position) }?;
                let now = planned.take(&memory[..planned.len.min(memory.len())], read, into);
                filled += now;
                if now < planned.wanted {
                    break;
                }
            }
            return Ok(filled);
        };
        let mut reads = Reads { ring, begun: 0, submitted: 0, ended: 0, results: [None; DEPTH] };
        let mut done = 0;
        while done < plan.len() {
            while reads.begun < plan.len() && reads.begun - done < DEPTH {
                reads.begin(&self.file, memory, &plan[reads.begun])?;
            }
            reads.wait()?;
            while let Some(result) = reads.result(done) {
                let read = usize::try_from(result)
                    .map_err(|_| io::Error::from_raw_os_error(result.wrapping_neg()))?;
                let planned = &plan[done];
                let now = planned.take(&memory[done % DEPTH * BLOCK..][..BLOCK], read, into);
                filled += now;
                if now < planned.wanted {
                    // The end of the file, or a read that was cut short. Nothing that the kernel has not
                    // taken yet may be left in a ring that is used again.
                    reads.submit_all()?;
                    return Ok(filled);
                }
                done += 1;
            }
        }
        Ok(filled)
    }
}

/// Reads at a position of a file.
///
/// # Safety
/// `len` bytes from `to` on can be written.
unsafe fn read_to(file: &File, to: *mut u8, len: usize, position: u64) -> io::Result<usize> {
    let position = libc::off_t::try_from(position).map_err(io::Error::other)?;
    loop {
        // SAFETY: the caller's promise.
        let read = unsafe { libc::pread(file.as_raw_fd(), to.cast(), len, position) };
        match usize::try_from(read).map_err(|_| io::Error::last_os_error()) {
            Err(error) if error.kind() == io::ErrorKind::Interrupted => {}
            outcome => return outcome,
        }
    }
}

/// Memory of the caller.
#[derive(Clone, Copy)]
struct Straight(*mut u8);

/// One read.
struct Planned {
    /// The position of its first block in the file.
    position: u64,
    /// Bytes that it reads: whole blocks.
    len: usize,
    /// Its bytes that are wanted: so many behind the first `skip`.
    skip: usize,
    wanted: usize,
    /// Its destination, if it does not go through the buffer. Then all of it is wanted.
    straight: Option<Straight>,
}

impl Planned {
    /// Cuts the first `wanted` bytes of buffers, which lie at `offset` of a file, into reads of at
    /// most `longest` bytes.
    fn all(offset: u64, ranges: &[libc::iovec], wanted: usize, longest: usize) -> Vec<Planned> {
        let phase = offset.to_le_bytes();
        // The position in its block of the file.
        let phase = usize::from(u16::from_le_bytes([phase[0], phase[1]])) % DISK_BLOCK;
        let mut plan = Plan { offset, phase, longest, reads: Vec::new() };
        // Positions behind the offset: where what goes through the buffer begins, and a range does.
        let (mut from, mut at) = (0, 0);
        for range in ranges {
            let len = range.iov_len.min(wanted - at);
            let head = (DISK_BLOCK - (phase + at) % DISK_BLOCK) % DISK_BLOCK;
            let straight = len.saturating_sub(head) / DISK_BLOCK * DISK_BLOCK;
            let alike = (range.iov_base.addr() + head).is_multiple_of(DISK_BLOCK);
            if alike && straight >= STRAIGHT_FROM {
                plan.through_buffer(from, at + head);
                plan.straight(at + head, straight, range.iov_base.cast::<u8>().wrapping_add(head));
                from = at + head + straight;
            }
            at += len;
        }
        plan.through_buffer(from, at);
        plan.reads
    }

    /// Takes note of so many bytes that were read, `block` being the buffer. Says how many of them
    /// were wanted.
    fn take(&self, block: &[u8], read: usize, into: &mut Buffers<'_>) -> usize {
        match self.straight {
            Some(_) => {
                let read = read.min(self.wanted);
                // SAFETY: these are the next bytes of the buffers (`all`), and they were written.
                unsafe { into.advance(read) };
                read
            }
            None => {
                let end = read.min(self.skip + self.wanted);
                into.put(&block[self.skip.min(end)..end])
            }
        }
    }
}

/// Reads in the making. Positions are those behind the offset.
struct Plan {
    offset: u64,
    /// Of the offset in its block.
    phase: usize,
    longest: usize,
    reads: Vec<Planned>,
}

impl Plan {
    fn straight(&mut self, at: usize, len: usize, to: *mut u8) {
        for start in (0..len).step_by(self.longest) {
            let wanted = self.longest.min(len - start);
            let straight = Some(Straight(to.wrapping_add(start)));
            let position = self.offset + (at + start) as u64;
            self.reads.push(Planned { position, len: wanted, skip: 0, wanted, straight });
        }
    }

    fn through_buffer(&mut self, mut from: usize, end: usize) {
        while from < end {
            let skip = (self.phase + from) % DISK_BLOCK;
            let wanted = (self.longest - skip).min(end - from);
            let position = self.offset + from as u64 - skip as u64;
            let len = (skip + wanted).next_multiple_of(DISK_BLOCK);
            self.reads.push(Planned { position, len, skip, wanted, straight: None });
            from += wanted;
        }
    }
}

/// Reads under way. Dropped, they are waited for: the kernel writes to their memory.
struct Reads<'r> {
    ring: &'r mut IoUring,
    begun: usize,
    submitted: usize,
    ended: usize,
    results: [Option<i32>; DEPTH],
}

impl Reads<'_> {
    fn begin(&mut self, file: &File, memory: &mut [u8], planned: &Planned) -> io::Result<()> {
        let number = self.begun;
        let block = match planned.straight {
            Some(at) => at.0,
            None => memory[number % DEPTH * BLOCK..][..planned.len].as_mut_ptr(),
        };
        let len = u32::try_from(planned.len).map_err(io::Error::other)?;
        let read = opcode::Read::new(types::Fd(file.as_raw_fd()), block, len)
            .offset(planned.position)
            .build()
            .user_data(number as u64);
        // SAFETY: the block, a part of ours or of the buffers that are to be filled, is not touched
        // before the read has ended, and stays as long as this value, which waits for all reads when
        // it is dropped; the file outlives it too.
        unsafe { self.ring.submission().push(&read) }.map_err(io::Error::other)?;
        self.begun += 1;
        Ok(())
    }

    fn submit_all(&mut self) -> io::Result<()> {
        while self.submitted < self.begun {
            match self.ring.submit() {
                Ok(0) => return Err(io::Error::other("reads were not taken")),
                Ok(submitted) => self.submitted += submitted,
                Err(error) if error.kind() == io::ErrorKind::Interrupted => {}
                Err(error) => return Err(error),
            }
        }
        Ok(())
    }

    fn wait(&mut self) -> io::Result<()> {
        match self.ring.submit_and_wait(1) {
            Ok(submitted) => self.submitted += submitted,
            Err(error) if error.kind() == io::ErrorKind::Interrupted => {}
            Err(error) => return Err(error),
        }
        self.look();
        Ok(())
    }

    /// Takes note of the reads that have ended.
    fn look(&mut self) {
        for entry in self.ring.completion() {
            let slot = usize::try_from(entry.user_data()).unwrap_or(usize::MAX) % DEPTH;
            if let Some(slot) = self.results.get_mut(slot) {
                *slot = Some(entry.result());
            }
            self.ended += 1;
        }
    }

    fn result(&mut self, number: usize) -> Option<i32> {
        self.results.get_mut(number % DEPTH)?.take()
    }
}

impl Drop for Reads<'_> {
    fn drop(&mut self) {
        // Reads that were never submitted end with the ring, which is not used again after an error.
        while self.ended < self.submitted {
            match self.ring.submit_and_wait(1) {
                Ok(submitted) => self.submitted += submitted,
                Err(_) => std::thread::sleep(std::time::Duration::from_millis(1)),
            }
            self.look();
        }
    }
}

impl ReadAt for DirectReader {
    fn uri(&self) -> &str {
        &self.uri
    }

    fn capabilities(&self) -> Capabilities {
        self.traits
    }

    fn read_at(
        &self,
        offset: u64,
        buffers: &mut Buffers<'_>,
        _cancel: &dyn Cancel,
    ) -> Result<usize> {
        let wanted = buffers.left();
        let left = self.traits.len.unwrap_or(u64::MAX).saturating_sub(offset);
        let wanted = wanted.min(usize::try_from(left).unwrap_or(usize::MAX));
        if wanted == 0 {
            return Ok(0);
        }
        let mut state = self.state.lock().unwrap_or_else(PoisonError::into_inner);
        let read = loop {
            let (ring, left) = (state.ring.is_some(), buffers.left());
            let longest = if ring { BLOCK } else { DEPTH * BLOCK };
            let plan = Planned::all(offset, buffers.ranges(usize::MAX), wanted, longest);
            match self.read_planned(&mut state, &plan, buffers) {
                Ok(read) => break read,
                // Kernels before 5.6 have rings without such reads, and one may be short of memory for
                // them: plain reads go on behind what is there.
                Err(_) if ring => {
                    state.ring = None;
                    if buffers.left() < left {
                        break left - buffers.left();
                    }
                }
                Err(error) => return Err(Error::io("reading", &self.uri, error)),
            }
        };
        buffers.arrived(read as u64);
        Ok(read)
    }
}

#[cfg(test)]
#[allow(clippy::unwrap_used, clippy::indexing_slicing, clippy::cast_possible_truncation)]
mod tests {
    use super::*;
    use crate::cancel::Never;
    use crate::io::local::FileSource;
    use crate::io::read_exact_at;

    /// Some bytes in a file of a disk: temporary folders may be in memory.
    fn on_disk(len: usize) -> (tempfile::TempDir, Vec<u8>, FileSource) {
        let folder = tempfile::tempdir_in(env!("CARGO_MANIFEST_DIR")).unwrap();
        let path = folder.path().join("f");
        let bytes: Vec<u8> = (0..len).map(|i| (i * 7 + i / 4096) as u8).collect();
        std::fs::write(&path, &bytes).unwrap();
        let source = FileSource::open(&path).unwrap();
        (folder, bytes, source)
    }

    #[test]
    fn any_range_into_any_buffers_with_and_without_a_ring() {
        let (_folder, bytes, source) = on_disk((10 << 20) + 1234);
        let Some(reader) = DirectReader::open(&source) else {
            return eprintln!("no direct reads on this file system");
        };
        for _ in 0..2 {
            for (offset, len) in
                [(0, 1), (4095, 2), (1, 9 << 20), (5000, 4 << 20), (10 << 20, 1234), (123, 0)]
            {
                let (mut one, mut two) = (vec![0; len / 3], vec![0; len - len / 3]);
                let mut buffers = Buffers::of(&mut one);
                buffers.push(crate::mem::to_fill(&mut two));
                read_exact_at(&reader, offset as u64, &mut buffers, &String::new, &Never).unwrap();
                assert!([one, two].concat() == bytes[offset..offset + len], "{offset} {len}");
            }
            let mut beyond = [0; 2000];
            let mut buffers = Buffers::of(&mut beyond);
            assert_eq!(reader.read_at(10 << 20, &mut buffers, &Never).unwrap(), 1234);
            assert_eq!(reader.read_at(11 << 20, &mut buffers, &Never).unwrap(), 0);
            // A file that shrinks under the reader.
            reader.state.lock().unwrap().ring = None;
        }
    }

    #[test]
    fn memory_that_lies_as_the_file_does_is_read_into_straight() {
        let (_folder, bytes, source) = on_disk((10 << 20) + 1234);
        let Some(reader) = DirectReader::open(&source) else { return };
        for ring in [true, false] {
            for (offset, before, len) in
                [(5000, 300, 5 << 20), (0, 0, 1 << 20), (4096, 10, 70 << 10)]
            {
                let mut arena = Arena::new(8 << 20).unwrap();
                let mut header = vec![0; before];
                let start = (offset + before) % 4096;
                let to = arena.bytes_mut().get_mut(start..start + len).unwrap();
                let mut buffers = Buffers::of(&mut header);
                buffers.push(crate::mem::to_fill(to));
                let plan = Planned::all(offset as u64, buffers.ranges(9), before + len, BLOCK);
                let straight: usize =
                    plan.iter().filter(|read| read.straight.is_some()).map(|read| read.len).sum();
                assert!(straight + 2 * 4096 > len, "{straight} of {len} bytes go straight");
                read_exact_at(&reader, offset as u64, &mut buffers, &String::new, &Never).unwrap();
                assert!(header == bytes[offset..][..before]);
                assert!(arena.bytes_mut()[start..][..len] == bytes[offset + before..][..len]);
            }
            if ring {
                reader.state.lock().unwrap().ring = None;
            }
        }
    }

    #[test]
    fn a_file_that_has_shrunk_ends_where_it_ends() {
        let (folder, bytes, source) = on_disk(3 << 20);
        let Some(reader) = DirectReader::open(&source) else { return };
        let path = folder.path().join("f");
        File::options().write(true).open(path).unwrap().set_len(1 << 20).unwrap();
        let mut buffer = vec![0; 3 << 20];
        let read = reader.read_at(100, &mut Buffers::of(&mut buffer), &Never).unwrap();
        assert!(buffer[..read] == bytes[100..1 << 20]);
    }
}
