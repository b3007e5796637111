//! Destinations of a read. A destination provides the memory for each batch, and takes it back once
//! it is full.

pub mod device;
pub mod direct_storage;
pub mod gather;
pub mod host;
mod scratch;
mod upload_queue;

use std::sync::Arc;

use crate::cancel::Cancel;
use crate::engine::plan::{Batch, BatchLimits, Extent, SegmentKind};
use crate::engine::workers::WorkerRange;
use crate::error::Result;
use crate::io::Capabilities;
use crate::mem::Buffers;
use crate::mem::device::{Device, Event};
use crate::memory_limit::MemoryLimit;

/// Memory that is filled by a read, batch by batch.
pub trait Destination: Sync {
    /// The plan of a batch.
    type BatchPlan: Send;
    /// A position in the queue for memory.
    type Ticket;
    /// Memory for one batch.
    type Lease: BatchMemory;
    /// Bytes that are valid as long as this value lives.
    type Bytes: AsRef<[u8]> + Send;

    /// Returns what does not depend on the read.
    fn facts(&self) -> Facts;

    /// Returns how many bytes of these extents are there already, before anything is read.
    fn present(&self, _extents: &[Extent]) -> u64 {
        0
    }

    /// Adapts itself to a read and to its memory limit. An error if the limit is too low for one
    /// reader.
    fn fit(&mut self, read: &ReadFacts<'_>) -> Result<Fit>;

    /// Plans a batch. Batches for one device come in the order of their files and positions.
    fn plan(&mut self, batch: &Batch) -> Result<Self::BatchPlan>;

    /// Returns for each device whether its memory is used up now while another's is not: batches
    /// for the others are better read first. May be empty if none is.
    fn full_devices(&self) -> Vec<bool> {
        Vec::new()
    }

    /// Takes a position in the queue for the memory of a batch.
    fn enqueue(&self, batch: &Batch) -> Result<Self::Ticket>;

    /// Waits for memory. Meanwhile it calls `idle`, which returns true if it found something to do.
    fn acquire(
        &self,
        ticket: Self::Ticket,
        batch: Batch,
        planned: Self::BatchPlan,
        idle: Idle<'_>,
        cancel: &dyn Cancel,
    ) -> Result<Self::Lease>;

    /// Takes back a lease whose memory is filled. With `keep`, returns the bytes of its chunks in
    /// order.
    fn commit(
        &self,
        lease: Self::Lease,
        keep: bool,
        idle: Idle<'_>,
        cancel: &dyn Cancel,
    ) -> Result<CommittedBatch<Self::Bytes>>;
}

/// Memory for one batch.
pub trait BatchMemory {
    /// Fills the memory. `read` fills buffers with the bytes from a position of the batch on.
    fn fill(&mut self, read: &dyn Fn(u64, &mut Buffers<'_>) -> Result<()>) -> Result<()>;

    /// Returns the bytes of the batch, in order and without gaps, once they are there.
    fn chunks(&mut self) -> Result<Vec<SegmentBytes<'_>>>;
}

/// Work for a thread that waits; returns true if it found something to do.
pub type Idle<'i> = &'i dyn Fn() -> Result<bool>;

/// The properties of a destination.
pub struct Facts {
    /// Within a batch, data are cut only at multiples of this many bytes.
    pub unit: u64,
    /// True if batches are read in shorter steps, so that hashes find their bytes in the CPU's
    /// cache.
    pub in_steps: bool,
    /// The NUMA node of the staging memory of each device, where it is known.
    pub nodes: Vec<Option<usize>>,
    /// Cores that are not for readers, but for copies to devices.
    pub spared_cores: usize,
    /// The device, if there is only one: readers enter it once. The sources that several readers
    /// read call no foreign code, which is not to run meanwhile.
    pub device: Option<Arc<dyn Device>>,
}

/// The facts of a read that its destination adapts to.
pub struct ReadFacts<'r> {
    /// The source.
    pub source: &'r Capabilities,
    /// The number of readers.
    pub readers: WorkerRange,
    /// Bytes of all headers and data.
    pub total: u64,
    /// Data are cut at multiples of this.
    pub unit: u64,
    /// Minimum bytes that each reader holds to gather parts from.
    pub gather_bytes: u64,
    /// The memory that the read may take.
    pub memory: MemoryLimit,
}

/// The limits of a read into a destination.
pub struct Fit {
    /// The number of readers that fit into the memory.
    pub readers: WorkerRange,
    /// The limits on batches.
    pub limits: BatchLimits,
    /// Maximum bytes of a batch to gather parts from.
    pub gather_bytes: u64,
    /// Bytes of one tensor that may wait for their hash before readers prefer other tensors. None
    /// if they wait in the tensors' own memory.
    pub max_unhashed: Option<u64>,
}

/// A batch that has reached its destination, or is on its way to a device.
pub struct CommittedBatch<B> {
    /// The bytes of its chunks, if they are retained.
    pub bytes: Vec<B>,
    /// The events after which the bytes are on their device; none for host memory.
    pub copy_events: Vec<Arc<dyn Event>>,
}

/// Bytes of a segment, or of part of one.
pub struct SegmentBytes<'l> {
    /// The header, data or gap that they belong to.
    pub kind: SegmentKind,
    /// The bytes.
    pub bytes: &'l mut [u8],
}

/// Maximum number of segments in a batch.
const MAX_SEGMENTS: usize = 64 << 10;

/// Returns limits for batches of `len` bytes, without what depends on the destination.
fn batch_limits(len: u64, read: &ReadFacts<'_>, overhead: u64) -> BatchLimits {
    BatchLimits {
        len,
        tapers: false,
        merge_gap: read.source.merge_gap,
        segments: MAX_SEGMENTS,
        unit: read.unit,
        block: 1,
        separate_len: u64::MAX,
        overhead,
    }
}
