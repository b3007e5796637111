//! Feeds the bytes of each origin into the file, in chunks that do not change any more.

use std::ops::Range;
use std::sync::Arc;

use super::chunk::{Bytes, Chunk};
use super::copies::{Copies, CopyTurns};
use super::item::Item;
use super::jobs::{BATCH_LEN, Job, Span, batches};
use super::origin::{HostCopy, Origin};
use super::pass::Pass;
use crate::cancel::Cancel;
use crate::engine::download::Downloader;
use crate::engine::plan::PLAN;
use crate::engine::workers::Control;
use crate::error::{Error, Result};
use crate::fallible::{collected, listed};
use crate::mem::device::{DeviceBytes, StreamsByDevice};
use crate::mem::pinned::Share;

/// Carries out the jobs of one save, on any thread.
pub struct Feeder<'f, 'p> {
    pub pass: &'f Pass<'p>,
    pub copies: &'p Copies,
    /// Limits the concurrent copies of an upload; None if threads do not wait for a server.
    pub turns: Option<&'f CopyTurns>,
    pub streams: &'f StreamsByDevice,
    /// The call's limit on staging buffers; None if it has none.
    pub share: Option<&'f Arc<Share>>,
}

impl<'p> Feeder<'_, 'p> {
    /// Hashes, encrypts and writes the bytes of one job.
    pub fn feed(&self, job: Job, control: &Control<'_>) -> Result<()> {
        match job {
            Job::Memory(spans) => self.memory(&spans, control)?,
            Job::Deferred(tensor) => self.deferred(tensor, control)?,
            Job::Device(tensor) => self.device(tensor, control)?,
            Job::DeviceGroup(tensors) => self.device_group(tensors, control)?,
        }
        self.pass.settle(control)
    }

    fn memory(&self, spans: &[Span], control: &Control<'_>) -> Result<()> {
        let _turn = self.turns.map(|turns| turns.next(control)).transpose()?;
        let chunks = spans.iter().map(|&Span { tensor, start, len }| {
            let item = self.pass.item(tensor)?;
            let bytes = match &item.origin {
                Origin::Bytes(bytes) => *bytes,
                _ => &[],
            };
            let range = range(item, start, len)?;
            let bytes = bytes.get(range).ok_or_else(|| changed(item))?;
            Ok(Chunk { tensor, start, bytes: Bytes::Copied(self.copies.of(bytes)?) })
        });
        self.pass.put(collected(chunks, PLAN)?, control)
    }

    /// Copies a tensor into memory, and writes it. Each thread holds one such copy at most, so it
    /// hashes until its copy is released.
    fn deferred(&self, tensor: usize, control: &Control<'_>) -> Result<()> {
        let item = self.pass.item(tensor)?;
        let Origin::Deferred(bring) = &item.origin else {
            return Err(Error::Bug(format!("tensor `{}` is not deferred", item.entry.name)));
        };
        let copy: HostCopy = bring()?;
        let copy: Arc<dyn AsRef<[u8]> + Send + Sync> = Arc::from(copy);
        if (*copy).as_ref().len() as u64 != item.entry.data_len {
            return Err(changed(item));
        }
        for spans in batches(self.pass.items, tensor..tensor + 1, BATCH_LEN)? {
            self.pass.hash_backlog(control)?;
            let chunks = spans.iter().map(|&Span { start, len, .. }| {
                let bytes = Bytes::Shared(Arc::clone(&copy), range(item, start, len)?);
                Ok(Chunk { tensor, start, bytes })
            });
            self.pass.put(collected(chunks, PLAN)?, control)?;
            self.pass.settle(control)?;
        }
        let let_go = || Arc::strong_count(&copy) == 1;
        while !let_go() && self.pass.hash(&let_go, control)? {}
        control.check()
    }

    fn device(&self, tensor: usize, control: &Control<'_>) -> Result<()> {
        let from = self.on_device(tensor)?;
        let stream = self.streams.next(from)?;
        let hash = || self.pass.hash_all_ready(control).and_then(|()| self.pass.settle(control));
        let all = 0..from.memory.size();
        self.downloader(&hash, control).each_chunk(from, all, stream, |start, chunk| {
            let len = chunk.as_ref().len();
            let bytes = Bytes::Shared(Arc::new(chunk), 0..len);
            self.pass.put(vec![Chunk { tensor, start, bytes }], control)?;
            self.pass.settle(control)?;
            self.pass.hash_backlog(control)
        })
    }

    fn device_group(&self, tensors: Range<usize>, control: &Control<'_>) -> Result<()> {
        let from = tensors.clone().map(|tensor| self.on_device(tensor));
        let from = collected(from, PLAN)?;
        let Some(first) = from.first() else { return Ok(()) };
        let stream = self.streams.next(first)?;
        let hash = || self.pass.hash_all_ready(control).and_then(|()| self.pass.settle(control));
        let (all, ranges) = self.downloader(&hash, control).together(&from, stream)?;
        let all: Arc<dyn AsRef<[u8]> + Send + Sync> = Arc::new(all);
        let chunks = tensors.zip(ranges).map(|(tensor, range)| {
            let bytes = Bytes::Shared(Arc::clone(&all), range);
            Chunk { tensor, start: 0, bytes }
        });
        self.pass.put(listed(chunks, PLAN)?, control)
    }

    fn on_device(&self, tensor: usize) -> Result<&'p DeviceBytes> {
        let item = self.pass.item(tensor)?;
        match &item.origin {
            Origin::Device(bytes) => Ok(bytes),
            _ => Err(Error::Bug(format!("tensor `{}` is on no device", item.entry.name))),
        }
    }

    fn downloader<'d>(
        &'d self,
        before_waiting: &'d dyn Fn() -> Result<()>,
        control: &'d Control<'_>,
    ) -> Downloader<'d> {
        let (counters, share) = (&self.pass.counters, self.share);
        Downloader { counters, cancel: control, before_waiting, share }
    }
}

fn range(item: &Item<'_>, start: u64, len: u64) -> Result<Range<usize>> {
    let start = usize::try_from(start).ok();
    let end = start.zip(usize::try_from(len).ok()).and_then(|(start, len)| start.checked_add(len));
    start.zip(end).map(|(start, end)| start..end).ok_or_else(|| changed(item))
}

fn changed(item: &Item<'_>) -> Error {
    Error::Bug(format!("tensor `{}` changed its size", item.entry.name))
}
