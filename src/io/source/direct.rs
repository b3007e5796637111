//! Local files that are not in the page cache, read around it. One of the few doors to `unsafe`.
//!
//! Several reads are under way at once, by io_uring where the kernel allows it. What is read goes
//! through a buffer of its own: direct reads want aligned memory and positions, and data in a file
//! have neither. That copy runs at memory speed, and is small beside a disk.
#![allow(unsafe_code)]
// A broken invariant ends the call by a panic that its boundary catches.
#![allow(clippy::indexing_slicing)]

use std::fs::File;
use std::io;
use std::os::fd::AsRawFd;
use std::os::unix::fs::{FileExt as _, OpenOptionsExt as _};
use std::sync::{Mutex, PoisonError};

use io_uring::{IoUring, opcode, types};

use super::{ReadAt, Traits};
use crate::cancel::Cancel;
use crate::error::{Error, Result};
use crate::mem::{Arena, Buffers};

/// Positions and lengths of direct reads are multiples of this: the largest block of usual disks.
const ALIGNMENT: u64 = 4096;
/// Bytes of a read; disks reach their speed with this, and a buffer is soon full.
const BLOCK: usize = 512 << 10;
/// Reads that are under way at once for one reader.
const DEPTH: usize = 8;

/// One reader's way around the page cache.
pub struct DirectReader {
    file: File,
    uri: String,
    traits: Traits,
    state: Mutex<State>,
}

struct State {
    memory: Arena,
    ring: Option<IoUring>,
}

impl DirectReader {
    /// Opens the file behind a source once more. None where its file system has no direct reads.
    pub fn open(source: &dyn ReadAt) -> Option<Self> {
        let path = format!("/proc/self/fd/{}", source.file()?.as_raw_fd());
        let file = File::options().read(true).custom_flags(libc::O_DIRECT).open(path).ok()?;
        let mut memory = Arena::new(DEPTH * BLOCK).ok()?;
        let probe = memory.bytes_mut().get_mut(..usize::try_from(ALIGNMENT).ok()?)?;
        file.read_at(probe, 0).ok()?;
        // Refused in many containers, and where too little memory may be locked.
        let ring = IoUring::new(u32::try_from(DEPTH).ok()?).ok();
        let state = Mutex::new(State { memory, ring });
        Some(DirectReader { file, uri: source.uri().to_owned(), traits: source.traits(), state })
    }

    /// How it reads, for reports.
    pub fn name(&self) -> &'static str {
        match self.state.lock().unwrap_or_else(PoisonError::into_inner).ring {
            Some(_) => "direct reads by io_uring",
            None => "direct reads",
        }
    }

    /// Reads blocks from `first` on, and puts `wanted` bytes behind the first `skip` away.
    fn read_blocks(
        &self,
        state: &mut State,
        first: u64,
        skip: usize,
        wanted: usize,
        into: &mut Buffers<'_>,
    ) -> io::Result<usize> {
        let State { memory, ring } = state;
        let memory = memory.bytes_mut();
        let Some(ring) = ring else {
            let len = (skip + wanted).next_multiple_of(BLOCK).min(memory.len());
            let buffer = &mut memory[..len];
            let read = self.file.read_at(buffer, first)?;
            let end = read.min(skip + wanted);
            return Ok(into.put(&buffer[skip.min(end)..end]));
        };
        let blocks = (skip + wanted).div_ceil(BLOCK);
        let mut reads = Reads { ring, begun: 0, submitted: 0, ended: 0, results: [None; DEPTH] };
        let (mut done, mut put) = (0, 0);
        while done < blocks {
            while reads.begun < blocks && reads.begun - done < DEPTH {
                reads.begin(&self.file, memory, first)?;
            }
            reads.wait()?;
            while let Some(result) = reads.result(done) {
                let read = usize::try_from(result)
                    .map_err(|_| io::Error::from_raw_os_error(result.wrapping_neg()))?;
                let from = if done == 0 { skip } else { 0 };
                let end = read.min(skip + wanted - done * BLOCK);
                let block = &memory[done % DEPTH * BLOCK..][..BLOCK];
                put += into.put(&block[from.min(end)..end]);
                if read < BLOCK {
                    // The end of the file, or a read that was cut short.
                    return Ok(put);
                }
                done += 1;
            }
        }
        Ok(put)
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
    fn begin(&mut self, file: &File, memory: &mut [u8], first: u64) -> io::Result<()> {
        let number = self.begun;
        let block = &mut memory[number % DEPTH * BLOCK..][..BLOCK];
        let len = u32::try_from(block.len()).map_err(io::Error::other)?;
        let read = opcode::Read::new(types::Fd(file.as_raw_fd()), block.as_mut_ptr(), len)
            .offset(first + (number * BLOCK) as u64)
            .build()
            .user_data(number as u64);
        // SAFETY: the block is not touched before the read has ended, and stays as long as this
        // value, which waits for all reads when it is dropped; the file outlives it too.
        unsafe { self.ring.submission().push(&read) }.map_err(io::Error::other)?;
        self.begun += 1;
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
        // What was never submitted goes with the ring, which is not used again after an error.
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

    fn traits(&self) -> Traits {
        self.traits
    }

    fn read_at(
        &self,
        offset: u64,
        buffers: &mut Buffers<'_>,
        cancel: &dyn Cancel,
    ) -> Result<usize> {
        let wanted = buffers.left();
        let left = self.traits.len.unwrap_or(u64::MAX).saturating_sub(offset);
        let wanted = wanted.min(usize::try_from(left).unwrap_or(usize::MAX));
        if wanted == 0 {
            return Ok(0);
        }
        let skip = usize::try_from(offset % ALIGNMENT);
        let skip = skip.map_err(|_| Error::Bug("an alignment beyond memory".to_owned()))?;
        let mut state = self.state.lock().unwrap_or_else(PoisonError::into_inner);
        let first = offset - skip as u64;
        let read = self.read_blocks(&mut state, first, skip, wanted, buffers).map_err(|error| {
            state.ring = None;
            Error::io("reading", &self.uri, error)
        })?;
        cancel.moved(read as u64);
        Ok(read)
    }
}

#[cfg(test)]
#[allow(clippy::unwrap_used, clippy::indexing_slicing, clippy::cast_possible_truncation)]
mod tests {
    use super::*;
    use crate::cancel::Never;
    use crate::io::source::{FileSource, read_exact_at};

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
