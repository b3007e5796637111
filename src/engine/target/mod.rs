//! Targets of a load. A target provides the memory for each batch, and takes it back once it is
//! full.

pub mod device;
pub mod direct;
pub mod gather;
pub mod gather_to_device;
pub mod host;
pub mod owned;
mod scratch;

use std::sync::Arc;

use crate::cancel::Cancel;
use crate::codec::crypt::PIECE_LEN;
use crate::engine::plan::{Batch, BatchLimits, SegmentKind};
use crate::engine::workers::WorkerRange;
use crate::error::Result;
use crate::io::Capabilities;
use crate::mem::Buffers;
use crate::mem::device::Event;
use crate::memory_limit::{LoadNeeds, LoadShares};

/// The destination of a load, which provides memory for its batches.
pub trait Target: Sync {
    /// The plan of a batch.
    type BatchPlan: Send;
    /// A position in the queue for memory.
    type QueueTicket<'t>
    where
        Self: 't;
    /// Memory for one batch.
    type Lease<'t>: BatchMemory
    where
        Self: 't;
    /// Bytes that are valid as long as this value lives.
    type Bytes: AsRef<[u8]> + Send;

    /// Returns the limits on batches, for a range of readers and `total` bytes. `decrypts`:
    /// segments end where encrypted pieces do.
    fn limits(
        &self,
        source: &Capabilities,
        readers: WorkerRange,
        total: u64,
        decrypts: bool,
    ) -> BatchLimits;

    /// Returns the memory that the load needs besides its tensors, with at most `readers` readers
    /// of such a source.
    fn needs(&self, source: &Capabilities, readers: usize, _decrypts: bool) -> LoadNeeds {
        LoadNeeds { readers, reader_bytes: source.reader_memory, gather_bytes: 0, staging: None }
    }

    /// Limits its memory to these shares.
    fn limit_memory(&mut self, _shares: &LoadShares) {}

    /// Limits its memory to the needs of a load of `_total` bytes.
    fn expect_bytes(&mut self, _total: u64) {}

    /// Returns the unit of cuts: within a batch, data are cut only at multiples of this many bytes.
    fn unit(&self) -> u64;

    /// True if batches are read in shorter steps, so that hashes find their bytes in the CPU's
    /// cache.
    fn reads_in_steps(&self) -> bool {
        false
    }

    /// Returns the bytes of one tensor that may wait for their hash before readers prefer other
    /// tensors. None if they wait in the tensors' own memory.
    fn max_unhashed(&self, _source: &Capabilities, _readers: WorkerRange) -> Option<u64> {
        None
    }

    /// Returns the number of devices among which tensors are distributed. A batch is for one of
    /// them.
    fn devices(&self) -> usize {
        1
    }

    /// Returns the device of a tensor.
    fn device_of(&self, _tensor: usize) -> usize {
        0
    }

    /// Returns the NUMA node of a device's staging memory, if it is known.
    fn numa_node(&self, _device: usize) -> Option<usize> {
        None
    }

    /// Plans a batch. Batches for one device come in the order of their files and positions.
    fn plan(&mut self, batch: &Batch) -> Result<Self::BatchPlan>;

    /// Allocates memory for batches that are read next, unless [`Target::plan`] has done so. Called
    /// in the order of the work queue, by one thread at a time.
    fn prepare(&self, _job: &mut [(Batch, Self::BatchPlan)]) -> Result<()> {
        Ok(())
    }

    /// Takes a position in the queue for the memory of a batch.
    fn enqueue(&self, batch: &Batch) -> Result<Self::QueueTicket<'_>>;

    /// Waits for memory. Meanwhile it calls `idle`, which returns true if it found something to do.
    fn acquire<'t>(
        &'t self,
        ticket: Self::QueueTicket<'t>,
        batch: Batch,
        job: Self::BatchPlan,
        idle: &dyn Fn() -> Result<bool>,
        cancel: &dyn Cancel,
    ) -> Result<Self::Lease<'t>>;

    /// Prevents the data of a tensor that could not be decrypted from reaching their destination.
    fn withhold(&self, _lease: &mut Self::Lease<'_>, _tensor: usize) {}

    /// Takes back a lease whose memory is filled. With `keep`, returns the bytes of its chunks in
    /// order.
    fn commit(
        &self,
        lease: Self::Lease<'_>,
        keep: bool,
        cancel: &dyn Cancel,
    ) -> Result<CommittedBatch<Self::Bytes>>;

    /// Returns the files that the device reads itself, without host memory, if it does.
    fn direct(&self) -> Option<&direct::DirectStorage<'_>> {
        None
    }
}

/// A batch that has reached its destination, or is on its way to a device.
pub struct CommittedBatch<B> {
    /// The bytes of its chunks, if they are retained.
    pub bytes: Vec<B>,
    /// The event after which the bytes are on their device; None for host memory.
    pub copy_event: Option<Arc<dyn Event>>,
}

impl<B> CommittedBatch<B> {
    /// A batch in host memory.
    fn in_host(bytes: Vec<B>) -> Self {
        CommittedBatch { bytes, copy_event: None }
    }
}

/// Maximum number of segments in a batch.
const MAX_SEGMENTS: usize = 64 << 10;

/// Returns limits for batches of `len` bytes, without what depends on the target.
fn batch_limits(len: u64, source: &Capabilities, decrypts: bool) -> BatchLimits {
    BatchLimits {
        len,
        tapers: false,
        merge_gap: source.merge_gap,
        segments: MAX_SEGMENTS,
        unit: if decrypts { PIECE_LEN } else { 1 },
        block: 1,
        separate_len: u64::MAX,
        overhead: u64::MAX,
    }
}

/// Memory for one batch.
pub trait BatchMemory {
    /// Fills the memory. `read` fills buffers with the bytes from a position of the batch on.
    fn fill(&mut self, read: &dyn Fn(u64, &mut Buffers<'_>) -> Result<()>) -> Result<()>;

    /// Returns the bytes of the batch, in order and without gaps, once they are there.
    fn chunks(&mut self) -> Result<Vec<SegmentBytes<'_>>>;
}

/// Bytes of a segment, or of part of one.
pub struct SegmentBytes<'l> {
    /// The header, data or gap that they belong to.
    pub kind: SegmentKind,
    /// The bytes.
    pub bytes: &'l mut [u8],
}
