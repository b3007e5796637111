//! The read engine: sources → batches in memory of a target → decryption and hashes → the target.

use std::sync::atomic::{AtomicBool, AtomicUsize, Ordering};
use std::time::Instant;

use super::file_handles::{Access, FileHandles};
use super::landing::Landing;
use super::order::{LARGE, jobs};
use super::plan::{Batch, Extent, Limits, PLAN, WorkQueue, partition_by_device};
use super::read_task::ReadTask;
pub use super::reading::{Begun, Codec, Reading};
use super::sources::{Sources, access};
use super::target::Target;
use super::worker_range;
use super::workers::{self, Control, WorkerRange};
use crate::cancel::Cancel;
use crate::codec::HashPool;
use crate::codec::crypt::PIECE_LEN;
use crate::codec::hash::{self, Verify};
use crate::error::{Error, Result};
use crate::fallible::listed;
use crate::io::Capabilities;
use crate::mem::DISK_BLOCK;
use crate::mem::numa::Affinity;
use crate::stats::{Counters, Stage};
use crate::sys::sync::Mutex;

/// Loads of fewer bytes are read on the calling thread: it would be done before a second thread
/// runs.
const INLINE_LEN: u64 = 4 << 20;
/// The same limit if bytes are decrypted or hashed.
const INLINE_HASHED: u64 = 1 << 20;
/// Bytes of one read step when hashes are verified. They stay in a core's L2 cache until they are
/// hashed.
const STEP: u64 = 512 << 10;
/// Minimum length of a batch, however small the read-ahead is.
const SHORTEST_BATCH: u64 = 64 << 10;

/// Reads all extents into the target. Returns the tensors whose data could not be decrypted in
/// chunks; these were neither decrypted nor verified.
pub fn read<T: Target>(
    what: &Reading<'_>,
    target: &mut T,
    counters: &Counters,
    cancel: &dyn Cancel,
) -> Result<Vec<usize>> {
    read_while(what, target, counters, cancel, &mut || Ok(false))
}

/// Reads like [`read`]. While the readers work, the calling thread calls `meanwhile` until it
/// returns false.
pub fn read_while<T: Target>(
    what: &Reading<'_>,
    target: &mut T,
    counters: &Counters,
    cancel: &dyn Cancel,
    meanwhile: &mut dyn FnMut() -> Result<bool>,
) -> Result<Vec<usize>> {
    let begun = Instant::now();
    let memory = worker_range::limit(what.memory, what.files)?;
    let total = total(what)?;
    let Some(sources) = Sources::of(what, total, memory)? else {
        while meanwhile()? {}
        return Ok(Vec::new());
    };
    if sources.are_local() && target.direct().is_none() {
        counters.reading("page cache");
    }
    let traits = sources.traits;
    let range = worker_range::range(&traits, sources.cached, what.readers)?;
    let (range, passing) = worker_range::share(memory, range, &traits, what.decrypts, target)?;
    target.expect(total);
    let limits = target.limits(&traits, range, total, what.decrypts);
    let block = if sources.direct { DISK_BLOCK as u64 } else { 1 };
    let mut limits = bounded(Limits { passing, block, ..limits }, what);
    let step = if target.takes_steps() { step(what, &sources) } else { u64::MAX };
    // Tensors up to this length come in one chunk, and are hashed at once.
    let whole = hash::SMALL.min(limits.len).min(target.unit());
    let sha = what.verify == Verify::All;
    // Tensors that are handed out while others are read come in file order.
    let in_order = what.receiver.is_some();
    let room = target.room(&traits, range).filter(|_| sha && !in_order);
    if room.is_some() {
        limits.apart = LARGE;
    }
    let large_first = begins_with_large(what, &traits, target);
    let batches = batches(what, target, &limits)?;
    let jobs = jobs(what.extents, batches, target, (step, whole), large_first)?;
    let most = if is_inline(what, &traits, total) { 1 } else { jobs.len() };
    let range = WorkerRange { bytes: Some(total), ..range.at_most(most) };
    // SHA-256, decryption and a receiver depend on the order of reads: then readers share a queue.
    let any_order = !sha && !what.decrypts && !in_order;
    let affinity = affinity(target, range);
    let own = any_order && range.most > 1 && sources.are_local() && affinity.node(0).is_none();
    let task = ReadTask {
        what,
        target: &*target,
        counters,
        whole,
        room,
        hashes: pool(what, whole)?,
        left: listed(what.extents.iter().map(|_| AtomicBool::new(false)), PLAN)?,
        queue: WorkQueue::new(jobs, if own { range.first } else { 1 })?,
        turn: Mutex::new(()),
        landing: landing(what)?,
        affinity,
    };
    counters.since(Stage::Plan, begun);
    let reads = sources.direct_reads(range.most, counters);
    carry_out(&task, range, access(reads.as_ref(), range.most), cancel, meanwhile)
}

/// Cuts the extents into batches, each for one device.
fn batches<T: Target>(what: &Reading<'_>, target: &T, limits: &Limits) -> Result<Vec<Batch>> {
    let device_of = |tensor| target.device_of(tensor);
    partition_by_device(what.extents, limits, (target.devices(), &device_of))
}

/// Returns the CPUs of the readers. A single reader runs on the calling thread, which is not bound.
fn affinity<T: Target>(target: &T, range: WorkerRange) -> Affinity {
    let devices = if range.most > 1 { target.devices() } else { 0 };
    Affinity::of((0..devices).map(|device| target.node(device)))
}

/// Runs the readers until all work is done. Returns the tensors that could not be decrypted in
/// chunks.
fn carry_out<T: Target>(
    task: &ReadTask<'_, T>,
    range: WorkerRange,
    access: Access<'_>,
    cancel: &dyn Cancel,
    meanwhile: &mut dyn FnMut() -> Result<bool>,
) -> Result<Vec<usize>> {
    let started = AtomicUsize::new(1);
    let work = |control: &Control<'_>, number: usize| {
        started.fetch_max(number + 1, Ordering::Relaxed);
        let handles = FileHandles::new(task.what.files, access);
        task.work(number, handles, control)
    };
    workers::run_while(range, cancel, work, meanwhile)?;
    task.counters.threads(started.into_inner().min(range.most), range.most);
    let left = task.left.iter().enumerate().filter(|(_, left)| left.load(Ordering::Relaxed));
    Ok(left.map(|(tensor, _)| tensor).collect())
}

/// Shortens batches if tensors are handed out while others are read, so that several batches fit
/// into the read-ahead.
fn bounded(limits: Limits, what: &Reading<'_>) -> Limits {
    let Some((receiver, _)) = what.receiver else { return limits };
    let most = receiver.batch_len();
    let len = limits.len.min(most.max(SHORTEST_BATCH));
    Limits { len, apart: limits.apart.min(most), tapers: false, ..limits }
}

/// Returns what hands out tensors as they land, if the call has a receiver.
fn landing<'r>(what: &Reading<'r>) -> Result<Option<Landing<'r>>> {
    let new = |(receiver, tensors)| Landing::new(receiver, tensors, what.extents, what.verify);
    what.receiver.map(new).transpose()
}

/// Returns the bytes of all headers and data.
fn total(what: &Reading<'_>) -> Result<u64> {
    let header_len = |extent: &Extent| extent.data_offset.saturating_sub(extent.header_offset);
    if what.verify != Verify::Nothing && what.extents.iter().any(|extent| header_len(extent) == 0) {
        return Err(Error::Bug("hashes of a format that has none".to_owned()));
    }
    let lens = what.extents.iter().map(|extent| extent.data_len.saturating_add(header_len(extent)));
    Ok(lens.fold(0, u64::saturating_add))
}

/// True if large tensors are read first. Their bytes may then wait long for their hash, so nothing
/// else may wait for these bytes. No reader may need their memory, and no header that is read later
/// may be needed to decrypt them.
fn begins_with_large<T: Target>(what: &Reading<'_>, source: &Capabilities, target: &T) -> bool {
    let any_order = !what.decrypts && what.receiver.is_none();
    what.verify == Verify::All && source.max_readers > 1 && any_order && target.takes_steps()
}

/// True if the calling thread reads everything. Never from servers: their latency exceeds the time
/// of the transfer, so requests must overlap however few the bytes.
fn is_inline(what: &Reading<'_>, source: &Capabilities, total: u64) -> bool {
    let hashed = what.decrypts || what.verify != Verify::Nothing;
    let most = if hashed { INLINE_HASHED } else { INLINE_LEN };
    total < most && !source.has_long_requests()
}

/// Returns the bytes of one read step.
fn step(what: &Reading<'_>, sources: &Sources) -> u64 {
    match (what.decrypts, what.verify) {
        // Long requests are not cut, as each request costs a round trip. Nor are direct reads:
        // those of one batch run at the same time.
        _ if sources.traits.has_long_requests() || sources.direct => u64::MAX,
        (true, _) => PIECE_LEN,
        (false, Verify::Nothing) => u64::MAX,
        (false, _) => STEP,
    }
}

/// Returns the hash pool for tensors that come in more than one chunk.
fn pool<B: AsRef<[u8]>>(what: &Reading<'_>, whole: u64) -> Result<HashPool<B>> {
    let lens = what.extents.iter().map(|extent| {
        let pooled = what.verify != Verify::Nothing && extent.data_len > whole;
        pooled.then_some(extent.data_len)
    });
    HashPool::new(lens, what.verify == Verify::All)
}
