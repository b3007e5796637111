//! GPUDirect Storage: files that the device reads itself. It is used only after a trial read has
//! given the right bytes.

use std::sync::Arc;
use std::sync::atomic::{AtomicBool, Ordering};
use std::time::Duration;

use crate::cancel::{self, Cancel};
use crate::engine::plan::{BlockLocation, Extent, ExtentUse, Place, ReadPlan};
use crate::error::{Error, Result};
use crate::io::{ReadAt, read_exact_at};
use crate::mem::Buffers;
use crate::mem::device::{DeviceBlocks, DeviceFile, DeviceMemory, Streams};
use crate::mem::pinned::Pool;
use crate::stats::Counters;
use crate::sys::to_usize;

/// Maximum bytes of the trial read, which the device and the host both do.
const MAX_TRIAL_LEN: usize = 1 << 20;
/// Poll interval while the previous user of the memory still uses it.
const STILL_USED: Duration = Duration::from_micros(100);

/// Files that the device reads, and the memory that it reads them into.
pub struct DirectStorage<'d> {
    files: Vec<Box<dyn DeviceFile>>,
    memory: &'d DeviceBlocks,
    locations: &'d [BlockLocation],
    failed: AtomicBool,
}

impl<'d> DirectStorage<'d> {
    /// Opens the sources for the device. None if the device cannot read them, or if its trial read
    /// gave other bytes.
    pub fn open(
        sources: &[&dyn ReadAt],
        plan: &ReadPlan<'_>,
        (memory, locations): (&'d DeviceBlocks, &'d [BlockLocation]),
        streams: &Streams,
        pool: &Pool,
        counters: &Counters,
        cancel: &dyn Cancel,
    ) -> Result<Option<Self>> {
        let files =
            sources.iter().map(|source| Arc::clone(streams.device()).file(&*source.file()?));
        let Some(files) = files.collect() else {
            counters.fallback(
                "GPUDirect Storage is not available, or does not support this file system",
            );
            return Ok(None);
        };
        // GPUDirect Storage is not ordered with streams, so earlier uses of the memory must have
        // ended.
        streams.finish()?;
        let direct = DirectStorage { files, memory, locations, failed: AtomicBool::new(false) };
        for (file, source) in sources.iter().enumerate() {
            if !direct.trial_read_matches((file, *source), plan, streams, pool, cancel)? {
                counters.fallback(
                    "GPUDirect Storage is not used: it returned other bytes than a plain read",
                );
                return Ok(None);
            }
        }
        counters.reading("GPUDirect Storage");
        Ok(Some(direct))
    }

    /// Reads bytes of a file with the device and with a plain read, and returns true if they are
    /// the same. The device reads into the memory of the first tensor, which is allocated first and
    /// gets its own bytes later.
    fn trial_read_matches(
        &self,
        (file, source): (usize, &dyn ReadAt),
        plan: &ReadPlan<'_>,
        streams: &Streams,
        pool: &Pool,
        cancel: &dyn Cancel,
    ) -> Result<bool> {
        let straight = |(extent, of): &(&Extent, &ExtentUse)| extent.data_len > 0 && !of.gathered;
        let with_data = || plan.extents.iter().zip(&plan.uses).filter(straight);
        let of_file = with_data().map(|(extent, _)| extent).filter(|extent| extent.file == file);
        let largest = of_file.max_by_key(|extent| extent.data_len);
        let Some(((first, of), extent)) = with_data().next().zip(largest) else {
            return Ok(true);
        };
        let place = plan.place(of.tensors.start, of.start);
        let most = MAX_TRIAL_LEN.min(pool.buffer_len());
        let len = extent.data_len.min(first.data_len);
        let len = to_usize(len).min(most);
        if !self.read(file, place, len, extent.data_offset, cancel)? {
            return Ok(false);
        }
        let (block, offset) = self.location(place, cancel)?;
        let mut lease = pool.enqueue(None).lease(1, streams.device(), cancel)?;
        lease.download(streams.next()?, (0, 0, len), block, offset)?;
        lease.wait(cancel)?;
        let mut plain = vec![0; len];
        let mut buffers = Buffers::from_slice(&mut plain);
        read_exact_at(source, extent.data_offset, &mut buffers, "tensors", cancel)?;
        Ok(lease.buffers().first().and_then(|unit| unit.get(..len)) == Some(plain.as_slice()))
    }

    /// Returns the memory of a place, once its previous use has ended.
    fn location(&self, place: Place, cancel: &dyn Cancel) -> Result<(&'d DeviceMemory, usize)> {
        let location = place.tensor.of(self.locations)?;
        let block = self.memory.get(location.block, cancel)?;
        while let Some(after) = &block.after
            && !after.passed()?
        {
            cancel::sleep(STILL_USED, cancel)?;
        }
        Ok((&block.memory, to_usize(location.offset + place.offset)))
    }

    /// True unless a read has failed.
    pub fn is_usable(&self) -> bool {
        !self.failed.load(Ordering::Relaxed)
    }

    /// Lets the device read bytes from a position of a file to a place. False if that fails: then
    /// the host must read these bytes, and [`DirectStorage::is_usable`] is false from now on.
    pub fn read(
        &self,
        file: usize,
        place: Place,
        len: usize,
        position: u64,
        cancel: &dyn Cancel,
    ) -> Result<bool> {
        let file = self.files.get(file).ok_or_else(|| Error::Bug(format!("no file {file}")))?;
        let (block, offset) = self.location(place, cancel)?;
        let mut done = 0;
        while done < len {
            let at = position + done as u64;
            match block.read_from(&**file, offset + done, len - done, at) {
                // A plain read will report the cause, such as the file's early end.
                Ok(0) | Err(_) => {
                    self.failed.store(true, Ordering::Relaxed);
                    return Ok(false);
                }
                Ok(read) => done += read.min(len - done),
            }
        }
        Ok(true)
    }
}
