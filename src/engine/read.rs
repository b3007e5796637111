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

/// Less than this is read on the calling thread: until a second one runs, the first has read as much.
const INLINE_LEN: u64 = 4 << 20;
/// The same where bytes are decrypted or hashed.
const INLINE_HASHED: u64 = 1 << 20;
/// When hashes are verified, a step of reading: a part of the second-level cache of a core.
const STEP: u64 = 512 << 10;
/// Bytes of a batch at least, however little may be read ahead.
const SHORTEST_BATCH: u64 = 64 << 10;

/// Reads everything to its target. Gives the tensors whose data could not be decrypted in chunks, and
/// were neither decrypted nor verified.
pub fn read<T: Target>(
    what: &Reading<'_>,
    target: &mut T,
    counters: &Counters,
    cancel: &dyn Cancel,
) -> Result<Vec<usize>> {
    read_while(what, target, counters, cancel, &mut || Ok(false))
}

/// The same. Calls `meanwhile` on the calling thread while others read, until it says that there is no
/// more to do.
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
    // Tensors that come in one chunk are hashed at once.
    let whole = hash::SMALL.min(limits.len).min(target.unit());
    let sha = what.verify == Verify::All;
    // Tensors that are handed out while others are read come in the order of the file.
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
    // Bytes that are hashed, decrypted or handed out in an order of their own are read in turns.
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

/// Cuts what is read into batches, each for one device.
fn batches<T: Target>(what: &Reading<'_>, target: &T, limits: &Limits) -> Result<Vec<Batch>> {
    let device_of = |tensor| target.device_of(tensor);
    partition_by_device(what.extents, limits, (target.devices(), &device_of))
}

/// The CPUs of readers. One that reads on the calling thread runs where that does.
fn affinity<T: Target>(target: &T, range: WorkerRange) -> Affinity {
    let devices = if range.most > 1 { target.devices() } else { 0 };
    Affinity::of((0..devices).map(|device| target.node(device)))
}

/// Has readers do the work. Returns the tensors that could not be decrypted in chunks.
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

/// Limits of batches where tensors are handed out while others are read: several batches are on their
/// way within what may be read ahead.
fn bounded(limits: Limits, what: &Reading<'_>) -> Limits {
    let Some((receiver, _)) = what.receiver else { return limits };
    let most = receiver.batch_len();
    let len = limits.len.min(most.max(SHORTEST_BATCH));
    Limits { len, apart: limits.apart.min(most), tapers: false, ..limits }
}

/// Hands out tensors as they land, if anything takes them.
fn landing<'r>(what: &Reading<'r>) -> Result<Option<Landing<'r>>> {
    let new = |(receiver, tensors)| Landing::new(receiver, tensors, what.extents, what.verify);
    what.receiver.map(new).transpose()
}

/// Bytes of all headers and data.
fn total(what: &Reading<'_>) -> Result<u64> {
    let header_len = |extent: &Extent| extent.data_offset.saturating_sub(extent.header_offset);
    if what.verify != Verify::Nothing && what.extents.iter().any(|extent| header_len(extent) == 0) {
        return Err(Error::Bug("hashes of a format that has none".to_owned()));
    }
    let lens = what.extents.iter().map(|extent| extent.data_len.saturating_add(header_len(extent)));
    Ok(lens.fold(0, u64::saturating_add))
}

/// True if large tensors are read first: where bytes stay for their hash without being waited for, neither
/// by readers that need the memory nor for the header to decrypt them, which may come later then.
fn begins_with_large<T: Target>(what: &Reading<'_>, source: &Capabilities, target: &T) -> bool {
    let any_order = !what.decrypts && what.receiver.is_none();
    what.verify == Verify::All && source.max_readers > 1 && any_order && target.takes_steps()
}

/// True if the calling thread reads everything. Many answers that are waited for take longer than their
/// bytes, however few.
fn is_inline(what: &Reading<'_>, source: &Capabilities, total: u64) -> bool {
    let hashed = what.decrypts || what.verify != Verify::Nothing;
    let most = if hashed { INLINE_HASHED } else { INLINE_LEN };
    total < most && !source.has_long_requests()
}

/// Bytes that are read at a time.
fn step(what: &Reading<'_>, sources: &Sources) -> u64 {
    match (what.decrypts, what.verify) {
        // Long requests are not cut: each one waits for its answer. Direct reads of a batch are under
        // way together.
        _ if sources.traits.has_long_requests() || sources.direct => u64::MAX,
        (true, _) => PIECE_LEN,
        (false, Verify::Nothing) => u64::MAX,
        (false, _) => STEP,
    }
}

/// The hashes of tensors that come in more than one chunk.
fn pool<B: AsRef<[u8]>>(what: &Reading<'_>, whole: u64) -> Result<HashPool<B>> {
    let lens = what.extents.iter().map(|extent| {
        let pooled = what.verify != Verify::Nothing && extent.data_len > whole;
        pooled.then_some(extent.data_len)
    });
    HashPool::new(lens, what.verify == Verify::All)
}
