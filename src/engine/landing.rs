//! Hands out tensors one by one, while others are being read.

use std::collections::HashMap;
use std::sync::{Arc, PoisonError};
use std::time::Duration;

use super::plan::{Extent, PLAN};
use crate::codec::hash::Verify;
use crate::error::{Error, Result};
use crate::fallible::{listed, push, with_room};
use crate::mem::device::Event;
use crate::sys::sync::Mutex;

/// Events after which the bytes of a tensor are on its device; none for host memory.
pub type Marks = Vec<Arc<dyn Event>>;

/// Receives tensors one by one, and limits the read-ahead.
pub trait Receiver: Sync {
    /// Returns the most bytes of a batch. With longer batches, too few tensors would be in flight.
    fn batch_len(&self) -> u64;

    /// True if the tensors from `first` to `last`, which share a batch, may be read now. Called in
    /// rising order, again and again until it returns true.
    fn admits(&self, first: usize, last: usize) -> Result<bool>;

    /// Waits until more tensors may be admitted, for at most this time.
    fn wait(&self, time: Duration);

    /// Takes the tensors that one batch has completed. All their bytes are there and authenticated,
    /// and the requested hashes verified.
    fn landed(&self, tensors: Vec<(usize, Marks)>) -> Result<()>;

    /// Takes a complete tensor that cannot be decrypted in chunks. In host memory its bytes are as
    /// in the file; on a device they are missing. `extent`: the extent of the tensor.
    fn sealed(&self, tensor: usize, extent: usize) -> Result<()>;
}

/// Counts the parts of each tensor of a read that have arrived.
pub struct Landing<'r> {
    receiver: &'r dyn Receiver,
    /// For each extent, the tensor that it is a part of.
    tensors: &'r [usize],
    /// Parts of each tensor: its bytes, its header if it has one, its hash if that is verified.
    parts: Vec<u64>,
    /// Tensors of which some parts have arrived.
    partial: Mutex<HashMap<usize, Partial>>,
}

#[derive(Default)]
struct Partial {
    missing: u64,
    marks: Marks,
    /// True if the tensor cannot be decrypted in chunks.
    sealed: bool,
}

/// Parts of an extent that have arrived.
#[derive(Debug, Clone, Copy)]
pub struct Arrival {
    /// Index of the extent.
    pub extent: usize,
    /// The number of parts: one for each byte of data, for the header and for the hash.
    pub parts: u64,
    /// True for the header of a tensor that cannot be decrypted in chunks.
    pub sealed: bool,
}

impl<'r> Landing<'r> {
    /// Creates the counts for a read of `extents`.
    pub fn new(
        receiver: &'r dyn Receiver,
        tensors: &'r [usize],
        extents: &[Extent],
        verify: Verify,
    ) -> Result<Self> {
        let count = tensors.iter().max().map_or(0, |most| most + 1);
        let mut parts = listed((0..count).map(|_| 0u64), PLAN)?;
        for (number, extent) in extents.iter().enumerate() {
            let hash = u64::from(verify != Verify::Nothing);
            let header = u64::from(extent.header_offset < extent.data_offset);
            let slot = tensors.get(number).and_then(|&tensor| parts.get_mut(tensor));
            let slot = slot.ok_or_else(|| Error::Bug(format!("extent {number} of no tensor")))?;
            *slot = slot.saturating_add(extent.data_len).saturating_add(header + hash);
        }
        Ok(Landing { receiver, tensors, parts, partial: Mutex::default() })
    }

    /// Returns the receiver of the tensors.
    pub fn receiver(&self) -> &dyn Receiver {
        self.receiver
    }

    /// Returns the tensor that an extent is a part of.
    pub fn tensor(&self, extent: usize) -> Result<usize> {
        self.tensors
            .get(extent)
            .copied()
            .ok_or_else(|| Error::Bug(format!("extent {extent} of no tensor")))
    }

    /// Counts parts that have arrived, and hands out the tensors that are complete now. `mark`: the
    /// event after which the parts are on their device.
    pub fn arrived(&self, arrivals: &[Arrival], mark: Option<&Arc<dyn Event>>) -> Result<()> {
        let mut complete: Vec<(usize, usize, Partial)> = Vec::new();
        let mut arrivals = arrivals.iter().copied().peekable();
        let mut partial = self.partial.lock().unwrap_or_else(PoisonError::into_inner);
        while let Some(Arrival { extent, mut parts, sealed: mut is_sealed }) = arrivals.next() {
            let tensor = self.tensor(extent)?;
            while let Some(more) = arrivals.next_if(|next| next.extent == extent) {
                parts = parts.saturating_add(more.parts);
                is_sealed |= more.sealed;
            }
            let bug = || Error::Bug(format!("tensor {tensor} has come twice"));
            let missing = self.parts.get(tensor).copied().unwrap_or(0);
            let new = || Partial { missing, ..Partial::default() };
            let known = partial.remove(&tensor).unwrap_or_else(new);
            let Partial { missing, mut marks, sealed } = known;
            let missing = missing.checked_sub(parts).ok_or_else(bug)?;
            let sealed = sealed || is_sealed;
            marks.extend(
                mark.filter(|mark| !marks.iter().any(|one| Arc::ptr_eq(one, mark))).cloned(),
            );
            let now = Partial { missing, marks, sealed };
            if missing == 0 {
                push(&mut complete, (tensor, extent, now), PLAN)?;
            } else {
                partial.insert(tensor, now);
            }
        }
        drop(partial);
        let mut landed = with_room(complete.len(), PLAN)?;
        for (tensor, extent, Partial { marks, sealed, .. }) in complete {
            if sealed {
                self.receiver.sealed(tensor, extent)?;
            } else {
                landed.push((tensor, marks));
            }
        }
        if landed.is_empty() { Ok(()) } else { self.receiver.landed(landed) }
    }
}
