//! Device memory as a target. Bytes are read into staging buffers, in which bytes that are adjacent
//! on the device are adjacent too. They are copied from there while other batches are read.
//!
//! No thread waits for a device unless all its staging buffers are in use; at the end, the
//! consumer's stream waits for the copies. A batch is for one device, and never waits for the
//! buffers of another.

use std::sync::Arc;

use super::direct::Direct;
use super::{Chunk, Committed, Lease, Target, batches_of};
use crate::cancel::Cancel;
use crate::codec::crypt::PIECE_LEN;
use crate::engine::plan::{
    Batch, Block, Limits, PLAN, Place, Segment, SegmentKind, Staged, Staging, stage,
};
use crate::engine::workers::WorkerRange;
use crate::error::{Error, Result};
use crate::fallible::{listed, with_room, zeroed};
use crate::io::Capabilities;
use crate::mem::device::{DeviceBlocks, Event, Streams};
use crate::mem::pinned::{self, Pool, QueueTicket, Share};
use crate::mem::{Buffers, SliceRemainder, as_uninit};
use crate::memory_limit::{LoadNeeds, LoadShares};

/// The route to one device: its streams and its staging buffers.
pub struct Route<'d> {
    /// Its streams.
    pub streams: &'d Streams,
    /// Its staging buffers.
    pub pool: &'d Pool,
    /// The load's limit on these buffers; None if it has none.
    pub share: Option<Arc<Share>>,
}

/// Device memory for the tensors of a load, as a target.
pub struct ToDevice<'d> {
    /// The blocks of memory.
    pub memory: &'d DeviceBlocks,
    /// The layout of each block.
    pub blocks: &'d [Block],
    /// The location of each tensor's data.
    pub places: &'d [Place],
    /// The route to each device, at least one.
    pub routes: Vec<Route<'d>>,
    /// The index of the route to each block; empty if there is one route.
    pub route_of: &'d [usize],
    /// The files that the device reads itself; only with a single device.
    pub direct: Option<&'d Direct<'d>>,
}

impl<'d> ToDevice<'d> {
    /// Returns the number of staging buffers that the load may use on each of its devices.
    fn buffers(&self) -> u64 {
        let of_each = self.routes.iter().map(|route| {
            let most = route.pool.limit();
            route.share.as_ref().map_or(most, |share| most.min(share.max_buffers()))
        });
        of_each.min().unwrap_or(0) as u64
    }

    /// Returns the bytes that a staging buffer of any device holds.
    fn buffer_len(&self) -> usize {
        self.routes.iter().map(|route| route.pool.buffer_len()).min().unwrap_or(1)
    }

    /// Returns the route of a batch.
    fn route(&self, batch: &Batch) -> Result<&Route<'d>> {
        let tensor = batch.segments.iter().find_map(|segment| match segment.kind {
            SegmentKind::Header { tensor } | SegmentKind::Data { tensor, .. } => Some(tensor),
            SegmentKind::Gap => None,
        });
        let route = tensor.map_or(0, |tensor| self.device_of(tensor));
        self.routes.get(route).ok_or_else(|| Error::Bug("a batch for no device".to_owned()))
    }

    /// Returns the destination of a segment at a file position, if it has one. A header has one
    /// only in an image, where it is copied along with the tensors.
    fn place(&self, file: usize, segment: &Segment, position: u64) -> Result<Option<Place>> {
        let bug = || Error::Bug("a tensor without a place".to_owned());
        match segment.kind {
            SegmentKind::Data { tensor, start } => {
                let place = self.places.get(tensor).ok_or_else(bug)?;
                Ok(Some(Place { block: place.block, offset: place.offset + start }))
            }
            SegmentKind::Header { tensor } => {
                let Place { block, .. } = *self.places.get(tensor).ok_or_else(bug)?;
                // A header that does not fit into a staging buffer is not copied.
                let fits = segment.len <= self.buffer_len() as u64;
                let image = self.blocks.get(block).filter(|_| fits);
                let offset = image.and_then(|image| image.find(file, position, segment.len));
                Ok(offset.map(|offset| Place { block, offset }))
            }
            SegmentKind::Gap => Ok(None),
        }
    }
}

impl<'d> Target for ToDevice<'d> {
    type Job = ();
    type Turn<'t>
        = QueueTicket<'d>
    where
        Self: 't;
    type Lease<'t>
        = Buffered<'d>
    where
        Self: 't;
    type Bytes = Kept<'d>;

    /// Batches of one staging buffer. For servers, batches of as many buffers as suit the source
    /// and leave each reader two batches. Batches may get a third longer than this, and may fill
    /// their buffers only by half.
    fn limits(
        &self,
        source: &Capabilities,
        readers: WorkerRange,
        _total: u64,
        decrypts: bool,
    ) -> Limits {
        let (buffer, limit) = (self.buffer_len() as u64, self.buffers());
        let most = (limit / (2 * readers.shares() as u64)).min(limit.saturating_sub(1) / 3).max(1);
        let buffers = if source.has_long_requests() {
            (source.request_len / buffer).clamp(1, most)
        } else {
            1
        };
        // With few buffers, a batch must not need more than there are.
        let part = limit.min(pinned::MIN_BUFFERS as u64);
        batches_of(
            buffers * (buffer - buffer / 16) * part / pinned::MIN_BUFFERS as u64,
            source,
            decrypts,
        )
    }

    fn needs(&self, source: &Capabilities, readers: usize, _decrypts: bool) -> LoadNeeds {
        let longest = self.routes.iter().map(|route| route.pool.buffer_len()).max();
        let (buffer, devices) = (longest.unwrap_or(1) as u64, self.routes.len() as u64);
        let most = self.routes.iter().map(|route| route.pool.limit() as u64).sum();
        let staging = Some((buffer, devices * pinned::min_buffers(buffer), most));
        LoadNeeds { readers, reader: source.reader_memory, gathers: 0, staging }
    }

    fn bound(&mut self, shares: &LoadShares) {
        let most = shares.staging / self.routes.len().max(1) as u64;
        let most = usize::try_from(most).unwrap_or(usize::MAX);
        // Another call may change the limits of the pools meanwhile, so the load keeps its own.
        for route in &mut self.routes {
            route.share = Some(Share::new(most));
        }
    }

    /// A short load pins only as many buffers as hold its bytes, and one more: pinning takes longer
    /// than copying.
    fn expect(&mut self, total: u64) {
        let buffer = self.buffer_len() as u64;
        let most = (total.div_ceil(buffer) + 1).max(pinned::min_buffers(buffer));
        let Ok(most) = usize::try_from(most) else { return };
        for route in &mut self.routes {
            if route.share.is_none() && most < route.pool.limit() {
                route.share = Some(Share::new(most));
            }
        }
    }

    /// The length of an encrypted piece, or half a buffer if that is shorter.
    fn unit(&self) -> u64 {
        PIECE_LEN.min(self.buffer_len() as u64 / 2).max(1)
    }

    /// Few enough bytes that each reader finds a tensor of its own to hash. None for sources that
    /// are read front to back, and for servers.
    fn room(&self, source: &Capabilities, readers: WorkerRange) -> Option<u64> {
        let bytes = self.buffers() * self.buffer_len() as u64;
        let any_order = source.max_readers > 1 && !source.has_long_requests();
        any_order.then_some(bytes / (2 * readers.most.max(1)) as u64)
    }

    fn plan(&mut self, _batch: &Batch) -> Result<()> {
        Ok(())
    }

    fn devices(&self) -> usize {
        self.routes.len()
    }

    fn device_of(&self, tensor: usize) -> usize {
        let block = self.places.get(tensor).map(|place| place.block);
        block.and_then(|block| self.route_of.get(block)).copied().unwrap_or(0)
    }

    fn node(&self, device: usize) -> Option<usize> {
        self.routes.get(device)?.streams.device().node()
    }

    fn enter(&self, batch: &Batch) -> Result<QueueTicket<'d>> {
        let route = self.route(batch)?;
        Ok(route.pool.enqueue(route.share.as_ref()))
    }

    fn acquire<'t>(
        &'t self,
        turn: QueueTicket<'d>,
        batch: Batch,
        (): (),
        idle: &dyn Fn() -> Result<bool>,
        cancel: &dyn Cancel,
    ) -> Result<Buffered<'d>> {
        let unit = usize::try_from(self.unit()).map_err(|_| Error::Bug("a unit".to_owned()))?;
        let place = |segment: &Segment, position| self.place(batch.file, segment, position);
        let streams = self.route(&batch)?.streams;
        let staging = stage(&batch, self.buffer_len(), unit, place)?;
        let passing = staging.staged.iter().filter(|staged| staged.buffer.is_none());
        let passing = passing.map(|staged| staged.len).sum();
        let passing = zeroed(passing, || "headers of tensors".to_owned())?;
        let lease = turn.lease_with_idle_work(staging.buffers, streams.device(), idle, cancel)?;
        Ok(Buffered { staging, streams, lease, passing })
    }

    fn withhold(&self, lease: &mut Buffered<'d>, tensor: usize) {
        // Such a tensor is larger than an encrypted piece, and alone in its block.
        let block = self.places.get(tensor).map(|place| place.block);
        lease.staging.copies.retain(|copy| Some(copy.block) != block);
    }

    fn commit(
        &self,
        full: Buffered<'d>,
        keep: bool,
        cancel: &dyn Cancel,
    ) -> Result<Committed<Kept<'d>>> {
        let Buffered { staging, streams, mut lease, .. } = full;
        let mut uploads = with_room(staging.copies.len(), PLAN)?;
        // Blocks that were allocated together share one event.
        let mut before: Vec<&Arc<dyn Event>> = Vec::new();
        for copy in &staging.copies {
            let block = self.memory.get(copy.block, cancel)?;
            if let Some(after) = &block.after
                && !before.iter().any(|known| Arc::ptr_eq(known, after))
            {
                before.push(after);
            }
            uploads.push(((copy.buffer, copy.at, copy.len), &block.memory, copy.offset));
        }
        let _entered = streams.device().enter()?;
        let stream = streams.next()?;
        for event in before {
            // An event that has passed costs later batches no driver call.
            if !event.passed()? {
                event.delay_stream(stream.handle())?;
            }
        }
        lease.upload_batch(stream, &uploads)?;
        let mark = match lease.record_end() {
            Ok(mark) => mark,
            Err(_) => {
                stream.finish()?;
                None
            }
        };
        if !keep {
            return Ok(Committed { bytes: Vec::new(), mark });
        }
        let lease = Arc::new(lease);
        let kept =
            staging.staged.into_iter().map(|staged| Kept { lease: Arc::clone(&lease), staged });
        Ok(Committed { bytes: listed(kept, PLAN)?, mark })
    }

    fn direct(&self) -> Option<&Direct<'_>> {
        self.direct
    }
}

/// Staging buffers that hold a batch.
pub struct Buffered<'d> {
    staging: Staging,
    /// The streams of its device.
    streams: &'d Streams,
    lease: pinned::StagingLease<'d>,
    /// Memory for bytes that are not copied to the device.
    passing: Box<[u8]>,
}

impl Buffered<'_> {
    /// Returns the memory of all staged bytes, in order.
    pub(super) fn memory(&mut self) -> Result<Vec<&mut [u8]>> {
        let bug = || Error::Bug("staged bytes without memory".to_owned());
        let mut buffers: Vec<SliceRemainder<'_>> =
            self.lease.buffers().into_iter().map(SliceRemainder::new).collect();
        let (mut passing, mut passed) = (SliceRemainder::new(&mut self.passing), 0);
        let mut memory = Vec::with_capacity(self.staging.staged.len());
        for staged in &self.staging.staged {
            memory.push(match staged.buffer {
                Some(buffer) => {
                    buffers.get_mut(buffer).ok_or_else(bug)?.cut(staged.at, staged.len)?
                }
                None => {
                    passed += staged.len;
                    passing.cut(passed - staged.len, staged.len)?
                }
            });
        }
        Ok(memory)
    }
}

impl Lease for Buffered<'_> {
    fn fill(&mut self, read: &dyn Fn(u64, &mut Buffers<'_>) -> Result<()>) -> Result<()> {
        let mut buffers = Buffers::default();
        self.memory()?.into_iter().for_each(|bytes| buffers.push(as_uninit(bytes)));
        read(0, &mut buffers)
    }

    fn chunks(&mut self) -> Result<Vec<Chunk<'_>>> {
        let kinds: Vec<SegmentKind> =
            self.staging.staged.iter().map(|staged| staged.kind).collect();
        let memory = self.memory()?;
        Ok(kinds.into_iter().zip(memory).map(|(kind, bytes)| Chunk { kind, bytes }).collect())
    }
}

/// Bytes in a staging buffer, which is not reused as long as this value lives.
pub struct Kept<'d> {
    lease: Arc<pinned::StagingLease<'d>>,
    staged: Staged,
}

impl AsRef<[u8]> for Kept<'_> {
    fn as_ref(&self) -> &[u8] {
        let Staged { buffer, at, len, .. } = self.staged;
        buffer.and_then(|buffer| self.lease.bytes(buffer, at, len)).unwrap_or(&[])
    }
}
