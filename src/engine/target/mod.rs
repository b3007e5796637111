//! Where the bytes of a load go: memory for a batch, and what happens to it once it is full.

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
use crate::engine::plan::{Batch, Limits, SegmentKind};
use crate::engine::workers::WorkerRange;
use crate::error::Result;
use crate::io::Capabilities;
use crate::mem::Buffers;
use crate::mem::device::Event;
use crate::memory_limit::{LoadNeeds, LoadShares};

/// Memory for the batches of a load.
pub trait Target: Sync {
    /// What was planned for a batch.
    type Job: Send;
    /// A place in the queue for memory.
    type Turn<'t>
    where
        Self: 't;
    /// Memory for one batch.
    type Lease<'t>: Lease
    where
        Self: 't;
    /// Bytes that stay where they are as long as somebody has this.
    type Bytes: AsRef<[u8]> + Send;

    /// How batches are cut for so many readers of so many bytes. `decrypts`: segments end where
    /// pieces of encryption do.
    fn limits(
        &self,
        source: &Capabilities,
        readers: WorkerRange,
        total: u64,
        decrypts: bool,
    ) -> Limits;

    /// What it takes beside the memory of the tensors, for so many readers of such a source at most.
    fn needs(&self, source: &Capabilities, readers: usize, _decrypts: bool) -> LoadNeeds {
        LoadNeeds { readers, reader: source.reader_memory, gathers: 0, staging: None }
    }

    /// Has it take no more than that.
    fn bound(&mut self, _shares: &LoadShares) {}

    /// Has it take no more memory than a load of so many bytes needs.
    fn expect(&mut self, _total: u64) {}

    /// Bytes in whose multiples data are cut within a batch, at most.
    fn unit(&self) -> u64;

    /// True if batches are read in shorter steps, so that hashes find their bytes in the CPU's cache.
    fn takes_steps(&self) -> bool {
        false
    }

    /// Bytes of one tensor that may wait for their hash before other tensors are read. None where
    /// they wait in memory that is their own.
    fn room(&self, _source: &Capabilities, _readers: WorkerRange) -> Option<u64> {
        None
    }

    /// Devices among which tensors are shared out. A batch is for one of them.
    fn devices(&self) -> usize {
        1
    }

    /// The device of a tensor.
    fn device_of(&self, _tensor: usize) -> usize {
        0
    }

    /// The NUMA node of a device's staging memory, if that is known.
    fn node(&self, _device: usize) -> Option<usize> {
        None
    }

    /// Plans a batch. Batches for one device come in the order of their files and positions.
    fn plan(&mut self, batch: &Batch) -> Result<Self::Job>;

    /// Takes memory for batches that are read next, where that was not done when they were planned.
    /// Called in the order of the work queue, by one thread at a time.
    fn prepare(&self, _job: &mut [(Batch, Self::Job)]) -> Result<()> {
        Ok(())
    }

    /// Takes a place in the queue for the memory of a batch.
    fn enter(&self, batch: &Batch) -> Result<Self::Turn<'_>>;

    /// Waits for memory. Meanwhile it calls `idle`, which says whether it found something to do.
    fn acquire<'t>(
        &'t self,
        turn: Self::Turn<'t>,
        batch: Batch,
        job: Self::Job,
        idle: &dyn Fn() -> Result<bool>,
        cancel: &dyn Cancel,
    ) -> Result<Self::Lease<'t>>;

    /// Keeps the data of a tensor, which could not be decrypted, from where they were to go.
    fn withhold(&self, _lease: &mut Self::Lease<'_>, _tensor: usize) {}

    /// Takes a full lease. With `keep`, gives the bytes of its chunks, in their order.
    fn commit(
        &self,
        lease: Self::Lease<'_>,
        keep: bool,
        cancel: &dyn Cancel,
    ) -> Result<Committed<Self::Bytes>>;

    /// What brings bytes into place by itself, without host memory.
    fn direct(&self) -> Option<&direct::Direct<'_>> {
        None
    }
}

/// A batch that is where it belongs, or on its way there.
pub struct Committed<B> {
    /// The bytes of its chunks, if they are kept.
    pub bytes: Vec<B>,
    /// The event after which they are there, if they go to a device.
    pub mark: Option<Arc<dyn Event>>,
}

impl<B> Committed<B> {
    /// A batch in host memory.
    fn in_host(bytes: Vec<B>) -> Self {
        Committed { bytes, mark: None }
    }
}

/// The most segments of a batch.
const MAX_SEGMENTS: usize = 64 << 10;

/// Limits of batches of `len` bytes: of any source, into any memory.
fn batches_of(len: u64, source: &Capabilities, decrypts: bool) -> Limits {
    Limits {
        len,
        tapers: false,
        merge_gap: source.merge_gap,
        segments: MAX_SEGMENTS,
        unit: if decrypts { PIECE_LEN } else { 1 },
        block: 1,
        apart: u64::MAX,
        passing: u64::MAX,
    }
}

/// Memory for one batch.
pub trait Lease {
    /// Has it filled. `read` fills buffers from a position of the batch on.
    fn fill(&mut self, read: &dyn Fn(u64, &mut Buffers<'_>) -> Result<()>) -> Result<()>;

    /// The bytes of the batch, in order and without gaps, once they are there.
    fn chunks(&mut self) -> Result<Vec<Chunk<'_>>>;
}

/// Bytes of a segment, or of part of one.
pub struct Chunk<'l> {
    /// Whose they are.
    pub kind: SegmentKind,
    /// The bytes.
    pub bytes: &'l mut [u8],
}
