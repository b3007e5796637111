//! Hands out tensors one by one, while others are being read.

use std::collections::HashMap;
use std::sync::{Arc, PoisonError};
use std::time::Duration;

use super::plan::{Extent, PLAN};
use crate::codec::hash::Verify;
use crate::error::{Error, Result};
use crate::fallible::{try_collect, try_push, try_with_capacity};
use crate::mem::device::Event;
use crate::sys::sync::Mutex;

/// Events after which the bytes of a tensor are on its device; none for host memory.
pub type CopyEvents = Vec<Arc<dyn Event>>;

/// Receives tensors one by one, and limits the read-ahead.
pub trait TensorReceiver: Sync {
    /// Returns the most bytes of a batch. With longer batches, too few tensors would be in flight.
    fn batch_len(&self) -> u64;

    /// True if the tensors from `first` to `last`, which share a batch, may be read now. Called in
    /// rising order, again and again until it returns true.
    fn admits(&self, first: usize, last: usize) -> Result<bool>;

    /// Waits until more tensors may be admitted, for at most this time.
    fn wait(&self, time: Duration);

    /// Takes the tensors that one batch has completed. All their bytes are there and authenticated,
    /// and the requested hashes verified.
    fn deliver(&self, tensors: Vec<(usize, CopyEvents)>) -> Result<()>;

    /// Takes a complete tensor that cannot be decrypted in chunks. In host memory its bytes are as
    /// in the file; on a device they are missing. `extent`: the extent of the tensor.
    fn deliver_undecrypted(&self, tensor: usize, extent: usize) -> Result<()>;
}

/// Counts the parts of each tensor of a read that have arrived.
pub struct CompletionTracker<'r> {
    receiver: &'r dyn TensorReceiver,
    /// For each extent, the tensor that it is a part of.
    tensors: &'r [usize],
    /// Parts of each tensor: its bytes, its header if it has one, its hash if that is verified.
    parts: Vec<u64>,
    /// Tensors of which some parts have arrived.
    partial: Mutex<HashMap<usize, PartialTensor>>,
}

#[derive(Default)]
struct PartialTensor {
    missing: u64,
    copy_events: CopyEvents,
    /// True if the tensor cannot be decrypted in chunks.
    undecrypted: bool,
}

/// Parts of an extent that have arrived.
#[derive(Debug, Clone, Copy)]
pub struct Arrival {
    /// Index of the extent.
    pub extent: usize,
    /// The number of parts: one for each byte of data, for the header and for the hash.
    pub parts: u64,
    /// True for the header of a tensor that cannot be decrypted in chunks.
    pub undecrypted: bool,
}

impl Arrival {
    /// The arrival of a tensor's verified hash.
    pub fn of_hash(extent: usize) -> Self {
        Arrival { extent, parts: 1, undecrypted: false }
    }
}

impl<'r> CompletionTracker<'r> {
    /// Creates the counts for a read of `extents`.
    pub fn new(
        receiver: &'r dyn TensorReceiver,
        tensors: &'r [usize],
        extents: &[Extent],
        verify: Verify,
    ) -> Result<Self> {
        let count = tensors.iter().max().map_or(0, |most| most + 1);
        let mut parts = try_collect((0..count).map(|_| 0u64), PLAN)?;
        for (number, extent) in extents.iter().enumerate() {
            let hash = u64::from(verify != Verify::Nothing);
            let header = u64::from(extent.header_offset < extent.data_offset);
            let slot = tensors.get(number).and_then(|&tensor| parts.get_mut(tensor));
            let slot = slot.ok_or_else(|| Error::Bug(format!("extent {number} of no tensor")))?;
            *slot = slot.saturating_add(extent.data_len).saturating_add(header + hash);
        }
        Ok(CompletionTracker { receiver, tensors, parts, partial: Mutex::default() })
    }

    /// Returns the receiver of the tensors.
    pub fn receiver(&self) -> &dyn TensorReceiver {
        self.receiver
    }

    /// Returns the tensor that an extent is a part of.
    pub fn tensor(&self, extent: usize) -> Result<usize> {
        self.tensors
            .get(extent)
            .copied()
            .ok_or_else(|| Error::Bug(format!("extent {extent} of no tensor")))
    }

    /// Counts parts that have arrived, and hands out the tensors that are complete now.
    /// `copy_event`: the event after which the parts are on their device.
    pub fn arrived(&self, arrivals: &[Arrival], copy_event: Option<&Arc<dyn Event>>) -> Result<()> {
        let mut complete: Vec<(usize, usize, PartialTensor)> = Vec::new();
        let mut arrivals = arrivals.iter().copied().peekable();
        let mut partial = self.partial.lock().unwrap_or_else(PoisonError::into_inner);
        while let Some(Arrival { extent, mut parts, undecrypted: mut is_undecrypted }) =
            arrivals.next()
        {
            let tensor = self.tensor(extent)?;
            while let Some(more) = arrivals.next_if(|next| next.extent == extent) {
                parts = parts.saturating_add(more.parts);
                is_undecrypted |= more.undecrypted;
            }
            let bug = || Error::Bug(format!("tensor {tensor} has come twice"));
            let missing = self.parts.get(tensor).copied().unwrap_or(0);
            let new = || PartialTensor { missing, ..PartialTensor::default() };
            let progress = partial.remove(&tensor).unwrap_or_else(new);
            let PartialTensor { missing, mut copy_events, undecrypted } = progress;
            let missing = missing.checked_sub(parts).ok_or_else(bug)?;
            let undecrypted = undecrypted || is_undecrypted;
            copy_events.extend(
                copy_event
                    .filter(|copy_event| {
                        !copy_events.iter().any(|one| Arc::ptr_eq(one, copy_event))
                    })
                    .cloned(),
            );
            let now = PartialTensor { missing, copy_events, undecrypted };
            if missing == 0 {
                try_push(&mut complete, (tensor, extent, now), PLAN)?;
            } else {
                partial.insert(tensor, now);
            }
        }
        drop(partial);
        let mut delivered = try_with_capacity(complete.len(), PLAN)?;
        for (tensor, extent, PartialTensor { copy_events, undecrypted, .. }) in complete {
            if undecrypted {
                self.receiver.deliver_undecrypted(tensor, extent)?;
            } else {
                delivered.push((tensor, copy_events));
            }
        }
        if delivered.is_empty() { Ok(()) } else { self.receiver.deliver(delivered) }
    }
}
