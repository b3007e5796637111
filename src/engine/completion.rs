//! Hands out tensors one by one, while others are being read.

use std::collections::HashMap;
use std::ops::Range;
use std::sync::Arc;
use std::time::Duration;

use super::plan::{ExtentUse, ReadPlan};
use crate::codec::hash::Verify;
use crate::error::{Error, Result};
use crate::mem::device::Event;
use crate::numbers::{ExtentNumber, TensorNumber};
use crate::sys::sync::{Mutex, unpoisoned};

/// Events after which the bytes of a tensor are on its device; none for host memory.
pub type CopyEvents = Vec<Arc<dyn Event>>;

/// Receives tensors one by one, and limits the read-ahead.
pub trait TensorReceiver: Sync {
    /// Returns the most bytes of a batch. With longer batches, too few tensors would be in flight.
    fn batch_len(&self) -> u64;

    /// True if the tensors from `first` to `last`, which share a batch, may be read now. Called in
    /// rising order, again and again until it returns true.
    fn admits(&self, first: TensorNumber, last: TensorNumber) -> Result<bool>;

    /// Waits until more tensors may be admitted, for at most this time.
    fn wait(&self, time: Duration);

    /// Takes the tensors that one batch has completed. All their bytes are there and authenticated,
    /// and the requested hashes verified.
    fn deliver(&self, tensors: Vec<(TensorNumber, CopyEvents)>) -> Result<()>;
}

/// Counts the parts of each tensor of a read that have arrived.
pub struct CompletionTracker<'r> {
    /// The receiver of the tensors.
    pub receiver: &'r dyn TensorReceiver,
    /// The use of each extent.
    uses: &'r [ExtentUse],
    /// Parts of each tensor: its bytes, its headers, its hashes if these are verified.
    parts: Vec<u64>,
    /// Tensors of which some parts have arrived: the number of missing parts, and the events of the
    /// others.
    partial: Mutex<HashMap<TensorNumber, (u64, CopyEvents)>>,
}

/// Parts of an extent that have arrived.
#[derive(Debug, Clone, Copy)]
pub struct Arrival {
    /// The extent.
    pub extent: ExtentNumber,
    /// The number of parts: one for each byte of data, for the header and for the hash.
    pub parts: u64,
}

impl<'r> CompletionTracker<'r> {
    /// Creates the counts for a read.
    pub fn new(receiver: &'r dyn TensorReceiver, plan: &'r ReadPlan<'r>, verify: Verify) -> Self {
        let count = plan.uses.iter().map(|of| of.tensors.end.0).max().unwrap_or(0);
        let mut parts = vec![0u64; count];
        for (extent, of) in plan.extents.iter().zip(&plan.uses) {
            let hash = u64::from(verify != Verify::Nothing);
            let header = u64::from(extent.header_offset < extent.data_offset);
            let tensors = of.tensors.start.0..of.tensors.end.0;
            for slot in parts.get_mut(tensors).unwrap_or(&mut []) {
                *slot = slot.saturating_add(extent.data_len).saturating_add(header + hash);
            }
        }
        CompletionTracker { receiver, uses: &plan.uses, parts, partial: Mutex::default() }
    }

    /// Returns the tensors that an extent is for.
    pub fn tensors(&self, extent: ExtentNumber) -> Result<Range<TensorNumber>> {
        Ok(extent.of(self.uses)?.tensors.clone())
    }

    /// Counts parts that have arrived, and hands out the tensors that are complete now.
    /// `copy_events`: the events after which the parts are on their device.
    pub fn arrived(&self, arrivals: &[Arrival], copy_events: &[Arc<dyn Event>]) -> Result<()> {
        let mut complete = Vec::new();
        let mut partial = unpoisoned(self.partial.lock());
        for arrivals in arrivals.chunk_by(|one, next| one.extent == next.extent) {
            let Some(&Arrival { extent, .. }) = arrivals.first() else { continue };
            let parts =
                arrivals.iter().fold(0u64, |sum, arrival| sum.saturating_add(arrival.parts));
            for tensor in extent.of(self.uses)?.each_tensor() {
                let bug = || Error::Bug(format!("{tensor:?} has come twice"));
                let all = || tensor.of(&self.parts).copied().unwrap_or(0);
                let (missing, events) =
                    partial.entry(tensor).or_insert_with(|| (all(), CopyEvents::new()));
                *missing = missing.checked_sub(parts).ok_or_else(bug)?;
                for event in copy_events {
                    if !events.iter().any(|one| Arc::ptr_eq(one, event)) {
                        events.push(Arc::clone(event));
                    }
                }
                if *missing == 0 {
                    complete.push((tensor, std::mem::take(events)));
                    partial.remove(&tensor);
                }
            }
        }
        drop(partial);
        if complete.is_empty() { Ok(()) } else { self.receiver.deliver(complete) }
    }
}
