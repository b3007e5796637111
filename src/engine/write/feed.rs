//! Copies tensors from memory or devices into private chunks, and writes these to the file.

use std::ops::Range;
use std::sync::Arc;

use super::chunk::{ChunkBytes, TensorChunk};
use super::copy_pool::{CopyPool, CopySlots};
use super::save_task::SaveTask;
use super::tensor_data::{HostCopy, TensorData};
use super::write_jobs::{BATCH_LEN, DataRange, WriteJob, batches};
use super::write_tensor::WriteTensor;
use crate::cancel::Cancel;
use crate::engine::download::Downloader;
use crate::engine::workers::Control;
use crate::error::{Error, Result};
use crate::mem::device::{DeviceBytes, StreamsByDevice};
use crate::mem::pinned::Share;
use crate::sys::to_usize;

/// Carries out the jobs of one save, on any thread.
pub struct Feeder<'f, 'p> {
    pub task: &'f SaveTask<'p>,
    pub copies: &'p CopyPool,
    /// Limits the concurrent copies of an upload; None if threads do not wait for a server.
    pub copy_slots: Option<&'f CopySlots>,
    pub streams: &'f StreamsByDevice,
    /// The call's limit on staging buffers; None if it has none.
    pub share: Option<&'f Arc<Share>>,
}

impl<'p> Feeder<'_, 'p> {
    /// Hashes, encrypts and writes the bytes of one job.
    pub fn feed(&self, job: WriteJob, control: &Control<'_>) -> Result<()> {
        match job {
            WriteJob::Memory(ranges) => self.memory(&ranges, control)?,
            WriteJob::Deferred(tensor) => self.deferred(tensor, control)?,
            WriteJob::Device(tensor) => self.device(tensor, control)?,
            WriteJob::DeviceGroup(tensors) => self.device_group(tensors, control)?,
        }
        self.task.send_complete_parts(control)
    }

    fn memory(&self, ranges: &[DataRange], control: &Control<'_>) -> Result<()> {
        let _slot = self.copy_slots.map(|slots| slots.acquire(control)).transpose()?;
        let chunks = ranges.iter().map(|&DataRange { tensor, start, len }| {
            let item = self.task.item(tensor)?;
            let bytes = match &item.data {
                TensorData::Bytes(bytes) => *bytes,
                _ => &[],
            };
            let bytes = bytes.get(to_usize(start)..to_usize(start + len));
            let bytes = bytes.ok_or_else(|| changed(item))?;
            // Without hashes, nothing is compared with these bytes later.
            let bytes = match self.task.hashes {
                None => ChunkBytes::Borrowed(bytes),
                Some(_) => ChunkBytes::Copied(self.copies.copy(bytes)?),
            };
            Ok(TensorChunk { tensor, start, bytes })
        });
        self.task.write_chunks(chunks.collect::<Result<Vec<_>>>()?, control)
    }

    /// Copies a tensor into memory, and writes it. Each thread holds one such copy at most, so it
    /// hashes until its copy is released.
    fn deferred(&self, tensor: usize, control: &Control<'_>) -> Result<()> {
        let item = self.task.item(tensor)?;
        let TensorData::Deferred(copy_to_host) = &item.data else {
            return Err(Error::Bug(format!("tensor `{}` is not deferred", item.entry.name)));
        };
        let copy: HostCopy = copy_to_host()?;
        let copy: Arc<dyn AsRef<[u8]> + Send + Sync> = Arc::from(copy);
        if (*copy).as_ref().len() as u64 != item.entry.data_len {
            return Err(changed(item));
        }
        for ranges in batches(self.task.items, tensor..tensor + 1, BATCH_LEN) {
            self.task.hash_backlog(control)?;
            let chunks = ranges.iter().map(|&DataRange { start, len, .. }| {
                let range = to_usize(start)..to_usize(start + len);
                TensorChunk { tensor, start, bytes: ChunkBytes::Shared(Arc::clone(&copy), range) }
            });
            self.task.write_chunks(chunks.collect(), control)?;
            self.task.send_complete_parts(control)?;
        }
        let released = || Arc::strong_count(&copy) == 1;
        while !released() && self.task.hash(&released, control)? {}
        control.check()
    }

    fn device(&self, tensor: usize, control: &Control<'_>) -> Result<()> {
        let from = self.on_device(tensor)?;
        let stream = self.streams.next(from)?;
        let hash = || {
            self.task.hash_all_ready(control).and_then(|()| self.task.send_complete_parts(control))
        };
        let all = 0..from.memory.size();
        self.downloader(&hash, control).each_chunk(from, all, stream, |start, chunk| {
            let len = chunk.as_ref().len();
            let bytes = ChunkBytes::Shared(Arc::new(chunk), 0..len);
            self.task.write_chunks(vec![TensorChunk { tensor, start, bytes }], control)?;
            self.task.send_complete_parts(control)?;
            self.task.hash_backlog(control)
        })
    }

    fn device_group(&self, tensors: Range<usize>, control: &Control<'_>) -> Result<()> {
        let from = tensors.clone().map(|tensor| self.on_device(tensor));
        let from = from.collect::<Result<Vec<_>>>()?;
        let Some(first) = from.first() else { return Ok(()) };
        let stream = self.streams.next(first)?;
        let hash = || {
            self.task.hash_all_ready(control).and_then(|()| self.task.send_complete_parts(control))
        };
        let (all, ranges) = self.downloader(&hash, control).download_group(&from, stream)?;
        let all: Arc<dyn AsRef<[u8]> + Send + Sync> = Arc::new(all);
        let chunks = tensors.zip(ranges).map(|(tensor, range)| {
            let bytes = ChunkBytes::Shared(Arc::clone(&all), range);
            TensorChunk { tensor, start: 0, bytes }
        });
        self.task.write_chunks(chunks.collect(), control)
    }

    fn on_device(&self, tensor: usize) -> Result<&'p DeviceBytes> {
        let item = self.task.item(tensor)?;
        match &item.data {
            TensorData::Device(bytes) => Ok(bytes),
            _ => Err(Error::Bug(format!("tensor `{}` is on no device", item.entry.name))),
        }
    }

    fn downloader<'d>(
        &'d self,
        before_waiting: &'d dyn Fn() -> Result<()>,
        control: &'d Control<'_>,
    ) -> Downloader<'d> {
        let (counters, share) = (&self.task.counters, self.share);
        Downloader { counters, cancel: control, before_waiting, share }
    }
}

fn changed(item: &WriteTensor<'_>) -> Error {
    Error::Bug(format!("tensor `{}` changed its size", item.entry.name))
}
