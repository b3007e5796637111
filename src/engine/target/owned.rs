//! Host memory of each tensor's own, as a target. It is allocated when the tensor is about to be
//! read, and handed out when the tensor is complete.

use std::collections::HashMap;
use std::sync::PoisonError;

use super::{BatchMemory, CommittedBatch, SegmentBytes, Target, batch_limits};
use crate::cancel::Cancel;
use crate::engine::plan::{Batch, BatchLimits, PLAN, Segment, SegmentKind};
use crate::engine::workers::WorkerRange;
use crate::error::{Error, Result};
use crate::fallible::{try_push, try_with_capacity, try_zeroed};
use crate::io::Capabilities;
use crate::mem::{BufferPiece, Buffers, HostBuffer, UnfilledBuffer, as_uninit};
use crate::sys::sync::Mutex;

/// The position of an extent's data in the memory of its tensor.
#[derive(Debug, Clone, Copy, Default)]
pub struct ExtentLocation {
    /// Index of the tensor.
    pub tensor: usize,
    /// Position in the tensor's memory.
    pub offset: u64,
    /// The file position that corresponds to the first byte of that memory, for its alignment.
    pub file_position: u64,
}

/// Memory of tensors that are being filled.
#[derive(Default)]
pub struct TensorBuffers(Mutex<HashMap<usize, UnfilledBuffer>>);

impl TensorBuffers {
    /// Takes the memory of a complete tensor; an empty buffer for a tensor without bytes.
    pub fn take(&self, tensor: usize) -> Result<HostBuffer> {
        let memory = self.0.lock().unwrap_or_else(PoisonError::into_inner).remove(&tensor);
        memory.map_or_else(|| Ok(HostBuffer::empty()), UnfilledBuffer::finish)
    }
}

/// Host memory as a target.
pub struct PerTensorTarget<'p> {
    /// The location of each extent.
    locations: &'p [ExtentLocation],
    /// Number of bytes of each tensor.
    lens: &'p [u64],
    /// Tensors that are being filled.
    store: &'p TensorBuffers,
}

impl<'p> PerTensorTarget<'p> {
    /// Creates the target for extents at `locations`, of tensors with `lens` bytes.
    pub fn new(locations: &'p [ExtentLocation], lens: &'p [u64], store: &'p TensorBuffers) -> Self {
        PerTensorTarget { locations, lens, store }
    }

    fn piece(&self, extent: usize, start: u64, len: u64) -> Result<BufferPiece> {
        let bug = || Error::Bug(format!("extent {extent} without memory"));
        let location = self.locations.get(extent).ok_or_else(bug)?;
        let size = |n: u64| usize::try_from(n).map_err(|_| bug());
        let mut unfilled = self.store.0.lock().unwrap_or_else(PoisonError::into_inner);
        let tensor = match unfilled.entry(location.tensor) {
            std::collections::hash_map::Entry::Occupied(existing) => existing.into_mut(),
            std::collections::hash_map::Entry::Vacant(new) => {
                let len = self.lens.get(location.tensor).copied().ok_or_else(bug)?;
                new.insert(UnfilledBuffer::new(size(len)?, size(location.file_position)?)?)
            }
        };
        tensor.piece(size(location.offset + start)?, size(len)?)
    }
}

impl Target for PerTensorTarget<'_> {
    /// For each segment, its memory; None for headers and gaps.
    type BatchPlan = Vec<Option<BufferPiece>>;
    type QueueTicket<'t>
        = ()
    where
        Self: 't;
    type Lease<'t>
        = PerTensorBatch
    where
        Self: 't;
    type Bytes = BufferPiece;

    /// Batches have the length that suits the source. The order of tensors matters more than that
    /// all readers end at the same time.
    fn limits(
        &self,
        source: &Capabilities,
        _: WorkerRange,
        _total: u64,
        decrypts: bool,
    ) -> BatchLimits {
        batch_limits(source.request_len, source, decrypts)
    }

    fn unit(&self) -> u64 {
        u64::MAX
    }

    fn reads_in_steps(&self) -> bool {
        true
    }

    fn plan(&mut self, _batch: &Batch) -> Result<Vec<Option<BufferPiece>>> {
        Ok(Vec::new())
    }

    fn prepare(&self, job: &mut [(Batch, Vec<Option<BufferPiece>>)]) -> Result<()> {
        for (batch, pieces) in job {
            *pieces = try_with_capacity(batch.segments.len(), PLAN)?;
            for segment in &batch.segments {
                pieces.push(match segment.kind {
                    SegmentKind::Data { tensor, start } => {
                        Some(self.piece(tensor, start, segment.len)?)
                    }
                    SegmentKind::Header { .. } | SegmentKind::Gap => None,
                });
            }
        }
        Ok(())
    }

    fn enqueue(&self, _batch: &Batch) -> Result<()> {
        Ok(())
    }

    fn acquire(
        &self,
        _turn: (),
        batch: Batch,
        pieces: Vec<Option<BufferPiece>>,
        _idle: &dyn Fn() -> Result<bool>,
        _cancel: &dyn Cancel,
    ) -> Result<PerTensorBatch> {
        let overhead = batch.segments.iter().zip(&pieces).filter(|(_, piece)| piece.is_none());
        let overhead = overhead.fold(0, |sum: u64, (segment, _)| sum.saturating_add(segment.len));
        let overhead = try_zeroed(usize::try_from(overhead).unwrap_or(usize::MAX), || {
            "headers of tensors".to_owned()
        })?;
        Ok(PerTensorBatch { segments: batch.segments, pieces, overhead })
    }

    fn commit(
        &self,
        lease: PerTensorBatch,
        keep: bool,
        _cancel: &dyn Cancel,
    ) -> Result<CommittedBatch<BufferPiece>> {
        let mut bytes = Vec::new();
        for piece in lease.pieces.into_iter().filter(|_| keep) {
            let piece = piece.map_or_else(|| UnfilledBuffer::new(0, 0)?.piece(0, 0), Ok)?;
            try_push(&mut bytes, piece, PLAN)?;
        }
        Ok(CommittedBatch::in_host(bytes))
    }
}

/// Memory for one batch.
pub struct PerTensorBatch {
    segments: Vec<Segment>,
    pieces: Vec<Option<BufferPiece>>,
    overhead: Box<[u8]>,
}

impl PerTensorBatch {
    /// Returns the memory of each segment.
    fn memory(&mut self) -> Result<Vec<SegmentBytes<'_>>> {
        let bug = || Error::Bug("a header without memory".to_owned());
        let mut overhead = &mut *self.overhead;
        let mut chunks = try_with_capacity(self.segments.len(), PLAN)?;
        for (segment, piece) in self.segments.iter().zip(&mut self.pieces) {
            let bytes = match piece {
                Some(piece) => piece.bytes_mut(),
                None => {
                    let len = usize::try_from(segment.len).map_err(|_| bug())?;
                    let cut = std::mem::take(&mut overhead).split_at_mut_checked(len);
                    let (now, later) = cut.ok_or_else(bug)?;
                    overhead = later;
                    now
                }
            };
            chunks.push(SegmentBytes { kind: segment.kind, bytes });
        }
        Ok(chunks)
    }
}

impl BatchMemory for PerTensorBatch {
    fn fill(&mut self, read: &dyn Fn(u64, &mut Buffers<'_>) -> Result<()>) -> Result<()> {
        let mut buffers = Buffers::default();
        self.memory()?.into_iter().for_each(|chunk| buffers.push(as_uninit(chunk.bytes)));
        read(0, &mut buffers)
    }

    fn chunks(&mut self) -> Result<Vec<SegmentBytes<'_>>> {
        self.memory()
    }
}
