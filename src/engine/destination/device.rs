//! Device memory as a destination. Bytes are read into staging buffers, in which bytes that are adjacent
//! on the device are adjacent too. They are copied from there while other batches are read.
//!
//! No thread waits for a device unless all its staging buffers are in use; at the end, the
//! consumer's stream waits for the copies. A batch is for one device, and never waits for the
//! buffers of another.

use std::sync::Arc;

use super::upload_queue::UploadQueue;
use super::{
    BatchMemory, CommittedBatch, Destination, Facts, Fit, Idle, ReadFacts, SegmentBytes,
    batch_limits,
};
use crate::cancel::Cancel;
use crate::codec::crypt::PIECE_LEN;
use crate::engine::plan::{
    Batch, BlockLayout, BlockLocation, Segment, SegmentKind, StagedSegment, StagingPlan,
    plan_staging,
};
use crate::error::{Error, Result};
use crate::fallible::try_zeroed;
use crate::mem::device::{DeviceBlocks, Streams};
use crate::mem::pinned::{self, Pool, QueueTicket, Share, Upload};
use crate::mem::{Buffers, SliceRemainder, as_uninit};
use crate::memory_limit::LoadNeeds;
use crate::sys::to_usize;

/// Staging buffers that keep a bus busy, however few readers fill them.
const BUSY: u64 = 16;

/// The route to one device: its streams and its staging buffers.
pub struct StagedDevice<'d> {
    /// Its streams.
    pub streams: &'d Streams,
    /// Its staging buffers.
    pub pool: &'d Pool,
    /// The load's limit on these buffers; None if it has none.
    share: Option<Arc<Share>>,
    uploads: UploadQueue<'d>,
}

impl<'d> StagedDevice<'d> {
    /// Creates the route.
    pub fn new(streams: &'d Streams, pool: &'d Pool) -> Self {
        StagedDevice { streams, pool, share: None, uploads: UploadQueue::new(streams) }
    }
}

/// Device memory for the tensors of a load.
pub struct DeviceDestination<'d> {
    /// The blocks of memory.
    pub memory: &'d DeviceBlocks,
    /// The layout of each block; empty if none is an image.
    pub blocks: &'d [BlockLayout],
    /// The location of each tensor.
    pub locations: &'d [BlockLocation],
    /// The route to each device, at least one.
    pub devices: Vec<StagedDevice<'d>>,
    /// The index of the route to each block; may be empty if there is one route.
    pub device_of_block: &'d [usize],
    /// True if the events at the ends of copies are needed: tensors are handed out one by one.
    pub in_order: bool,
    /// True if batches may be read in another order: see [`Destination::full_devices`].
    pub any_order: bool,
}

impl<'d> DeviceDestination<'d> {
    /// Returns the number of staging buffers that the load may use on each of its devices.
    fn buffers(&self) -> u64 {
        let of_each = self.devices.iter().map(|device| {
            let most = device.pool.limit();
            device.share.as_ref().map_or(most, |share| most.min(share.max_buffers))
        });
        of_each.min().unwrap_or(0) as u64
    }

    /// Returns the bytes that a staging buffer of any device holds.
    fn buffer_len(&self) -> usize {
        self.devices.iter().map(|device| device.pool.buffer_len()).min().unwrap_or(1)
    }

    /// Returns the length of an encrypted piece, which no buffer is shorter than, except in tests.
    fn unit(&self) -> u64 {
        PIECE_LEN.min(self.buffer_len() as u64).max(1)
    }

    /// Returns the index of a batch's route.
    fn route(&self, batch: &Batch) -> usize {
        let place = batch.segments.iter().find_map(|segment| segment.place);
        let location = place.and_then(|place| place.tensor.of(self.locations).ok());
        let device = location.and_then(|location| self.device_of_block.get(location.block));
        device.copied().unwrap_or(0)
    }

    fn device(&self, route: usize) -> Result<&StagedDevice<'d>> {
        let device = self.devices.get(route);
        device.ok_or_else(|| Error::Bug("a batch for no device".to_owned()))
    }

    /// Returns the destination of a segment at a file position, if it has one. A header has one
    /// only in an image, where it is copied along with the tensors.
    fn location(
        &self,
        file: usize,
        segment: &Segment,
        position: u64,
    ) -> Result<Option<BlockLocation>> {
        let Some(place) = segment.place else { return Ok(None) };
        let &BlockLocation { block, offset } = place.tensor.of(self.locations)?;
        if matches!(segment.kind, SegmentKind::Data { .. }) {
            return Ok(Some(BlockLocation { block, offset: offset + place.offset }));
        }
        // A header that does not fit into a staging buffer is not copied.
        let fits = segment.len <= self.buffer_len() as u64;
        let image = self.blocks.get(block).filter(|_| fits);
        let offset = image.and_then(|image| image.find(file, position, segment.len));
        Ok(offset.map(|offset| BlockLocation { block, offset }))
    }

    /// Limits the staging buffers of the load, as pinning takes longer than copying. Without a
    /// memory limit it pins two for each reader of local files: one is filled while the other is
    /// copied. A short load pins only as many as hold its bytes, and one more.
    fn limit(&mut self, read: &ReadFacts<'_>, readers: usize, staging: u64) {
        let buffer = self.buffer_len() as u64;
        let servers = read.source.has_long_requests();
        let two_each = if servers { u64::MAX } else { (2 * readers as u64).max(BUSY) };
        let of_total = (read.total.div_ceil(buffer) + 1).min(two_each);
        let of_total = of_total.max(pinned::min_buffers(buffer));
        let limited = read.memory.bytes().is_some();
        let most = if limited { staging / self.devices.len().max(1) as u64 } else { of_total };
        let most = to_usize(most);
        // Another call may change the limits of the pools meanwhile, so the load keeps its own.
        for device in &mut self.devices {
            device.share = (limited || most < device.pool.limit()).then(|| Share::new(most));
        }
    }
}

impl<'d> Destination for DeviceDestination<'d> {
    type BatchPlan = ();
    type Ticket = QueueTicket<'d>;
    type Lease = StagedBatch<'d>;
    type Bytes = StagedBytes<'d>;

    fn facts(&self) -> Facts {
        let nodes = self.devices.iter().map(|device| device.streams.device().numa_node());
        let device = match &*self.devices {
            [one] => Some(Arc::clone(one.streams.device())),
            _ => None,
        };
        Facts {
            unit: self.unit(),
            in_steps: false,
            nodes: nodes.collect(),
            spared_cores: (crate::cpu_count() / 4).min(4),
            device,
        }
    }

    /// Batches of one staging buffer. For servers, a batch has as many buffers as the source's
    /// request length needs, while each reader can still have two batches. Batches may get a third
    /// longer than this, and may fill their buffers only by half.
    fn fit(&mut self, read: &ReadFacts<'_>) -> Result<Fit> {
        let longest = self.devices.iter().map(|device| device.pool.buffer_len()).max();
        let (buffer, devices) = (longest.unwrap_or(1) as u64, self.devices.len() as u64);
        let most = self.devices.iter().map(|device| device.pool.limit() as u64).sum();
        let shares = read.memory.load(&LoadNeeds {
            readers: read.readers.max,
            reader_bytes: read.source.reader_memory,
            gather_bytes: read.gather_bytes,
            staging: Some((buffer, devices * pinned::min_buffers(buffer), most)),
        })?;
        let readers = read.readers.limited_to(shares.readers);
        self.limit(read, readers.max, shares.staging);
        let (buffer, limit) = (self.buffer_len() as u64, self.buffers());
        let most = (limit / (2 * readers.shares() as u64)).min(limit.saturating_sub(1) / 3).max(1);
        let buffers = if read.source.has_long_requests() {
            (read.source.request_len / buffer).clamp(1, most)
        } else {
            1
        };
        // With few buffers, a batch must not need more than there are.
        let part = limit.min(pinned::MIN_BUFFERS as u64);
        let len = buffers * (buffer - buffer / 16) * part / pinned::MIN_BUFFERS as u64;
        // Low enough that each reader finds another tensor to hash. None for sources that are read
        // front to back, and for servers.
        let any_order = read.source.max_readers > 1 && !read.source.has_long_requests();
        self.any_order = any_order && self.devices.len() > 1;
        let max_unhashed = any_order.then_some(limit * buffer / (2 * readers.max.max(1)) as u64);
        let limits = batch_limits(len, read, shares.overhead);
        Ok(Fit { readers, limits, gather_bytes: shares.gather_bytes, max_unhashed })
    }

    fn plan(&mut self, _batch: &Batch) -> Result<()> {
        Ok(())
    }

    fn full_devices(&self) -> Vec<bool> {
        let shares =
            self.devices.iter().map(|device| device.share.as_ref()).filter(|_| self.any_order);
        let full: Vec<bool> =
            shares.map(|share| share.is_some_and(|share| !share.allows(1))).collect();
        if full.contains(&false) { full } else { Vec::new() }
    }

    fn enqueue(&self, batch: &Batch) -> Result<QueueTicket<'d>> {
        let device = self.device(self.route(batch))?;
        Ok(device.pool.enqueue(device.share.as_ref()))
    }

    fn acquire(
        &self,
        ticket: QueueTicket<'d>,
        batch: Batch,
        (): (),
        idle: Idle<'_>,
        cancel: &dyn Cancel,
    ) -> Result<StagedBatch<'d>> {
        let unit = to_usize(self.unit());
        let locate = |segment: &Segment, position| self.location(batch.file, segment, position);
        let route = self.route(&batch);
        let device = self.device(route)?.streams.device();
        let staging = plan_staging(&batch, self.buffer_len(), unit, locate)?;
        let overhead = staging.staged.iter().filter(|staged| staged.buffer.is_none());
        let overhead = overhead.map(|staged| staged.len).sum();
        let overhead = try_zeroed(overhead, "headers of tensors")?;
        let lease = ticket.lease_with_idle_work(staging.buffers, device, idle, cancel)?;
        Ok(StagedBatch { staging, route, lease, overhead })
    }

    fn commit(
        &self,
        full: StagedBatch<'d>,
        keep: bool,
        _idle: Idle<'_>,
        cancel: &dyn Cancel,
    ) -> Result<CommittedBatch<StagedBytes<'d>>> {
        let StagedBatch { staging, route, lease, .. } = full;
        let mut upload = Upload { lease, copies: Vec::new(), after: Vec::new() };
        for copy in &staging.copies {
            let block = self.memory.get(copy.block, cancel)?;
            let last = upload.after.last();
            let new = block.after.as_ref().filter(|new| last.is_none_or(|l| !Arc::ptr_eq(l, new)));
            upload.after.extend(new);
            upload.copies.push(((copy.buffer, copy.at, copy.len), &block.memory, copy.offset));
        }
        let uploads = &self.device(route)?.uploads;
        if !keep && !self.in_order {
            uploads.add(upload)?;
            return Ok(CommittedBatch { bytes: Vec::new(), copy_events: Vec::new() });
        }
        let copy_events = uploads.submit_now(&mut upload)?.into_iter().collect();
        if !keep {
            return Ok(CommittedBatch { bytes: Vec::new(), copy_events });
        }
        let lease = Arc::new(upload.lease);
        let retained = staging
            .staged
            .into_iter()
            .map(|staged| StagedBytes { lease: Arc::clone(&lease), staged });
        Ok(CommittedBatch { bytes: retained.collect(), copy_events })
    }
}

/// Staging buffers that hold a batch.
pub struct StagedBatch<'d> {
    staging: StagingPlan,
    /// The index of its device's route.
    route: usize,
    lease: pinned::StagingLease<'d>,
    /// Memory for bytes that are not copied to the device.
    overhead: Box<[u8]>,
}

impl BatchMemory for StagedBatch<'_> {
    fn fill(&mut self, read: &dyn Fn(u64, &mut Buffers<'_>) -> Result<()>) -> Result<()> {
        let mut buffers = Buffers::default();
        self.chunks()?.into_iter().for_each(|chunk| buffers.push(as_uninit(chunk.bytes)));
        read(0, &mut buffers)
    }

    fn chunks(&mut self) -> Result<Vec<SegmentBytes<'_>>> {
        let bug = || Error::Bug("staged bytes without memory".to_owned());
        let mut buffers: Vec<SliceRemainder<'_, u8>> =
            self.lease.buffers().into_iter().map(SliceRemainder::new).collect();
        let mut overhead = SliceRemainder::new(&mut self.overhead);
        let chunk = |&StagedSegment { kind, buffer, at, len }: &StagedSegment| {
            let bytes = match buffer {
                Some(buffer) => buffers.get_mut(buffer).ok_or_else(bug)?.cut(at, len)?,
                None => overhead.next(len)?,
            };
            Ok(SegmentBytes { kind, bytes })
        };
        self.staging.staged.iter().map(chunk).collect()
    }
}

/// Bytes in a staging buffer, which is not reused as long as this value lives.
pub struct StagedBytes<'d> {
    lease: Arc<pinned::StagingLease<'d>>,
    staged: StagedSegment,
}

impl AsRef<[u8]> for StagedBytes<'_> {
    fn as_ref(&self) -> &[u8] {
        let StagedSegment { buffer, at, len, .. } = self.staged;
        buffer.and_then(|buffer| self.lease.bytes(buffer, at, len)).unwrap_or(&[])
    }
}
