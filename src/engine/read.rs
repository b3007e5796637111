//! The read engine: sources → batches in memory of a target → decryption and hashes → the target.

use std::sync::atomic::{AtomicBool, AtomicUsize, Ordering};
use std::time::Instant;

use super::completion::CompletionTracker;
use super::file_handles::{FileHandles, HandleKind};
use super::plan::{Batch, BatchLimits, Extent, PLAN, WorkQueue, partition_by_device};
use super::read_jobs::{LARGE, plan_jobs};
pub use super::read_request::{Codec, HeaderInfo, ReadRequest};
use super::read_task::ReadTask;
use super::sources::{Sources, handle_kind};
use super::target::Target;
use super::worker_range::{self, fit_readers};
use super::workers::{self, Control, WorkerRange};
use crate::cancel::Cancel;
use crate::codec::HashPool;
use crate::codec::crypt::PIECE_LEN;
use crate::codec::hash::{self, Verify};
use crate::error::{Error, Result};
use crate::fallible::try_collect;
use crate::io::Capabilities;
use crate::mem::DISK_BLOCK;
use crate::mem::numa::Affinity;
use crate::stats::{Counters, Stage};
use crate::sys::sync::Mutex;

/// Loads of fewer bytes are read on the calling thread, which takes less time than starting a
/// second one.
const INLINE_LEN: u64 = 4 << 20;
/// The same limit for loads that decrypt or hash.
const INLINE_HASHED: u64 = 1 << 20;
/// Bytes of one read step when hashes are verified. They stay in a core's L2 cache until they are
/// hashed.
const STEP: u64 = 512 << 10;
/// Minimum length of a batch, however small the read-ahead is.
const SHORTEST_BATCH: u64 = 64 << 10;

/// Reads all extents into the target. Returns the tensors whose data could not be decrypted in
/// chunks; these were neither decrypted nor verified.
pub fn read<T: Target>(
    request: &ReadRequest<'_>,
    target: &mut T,
    counters: &Counters,
    cancel: &dyn Cancel,
) -> Result<Vec<usize>> {
    read_while(request, target, counters, cancel, &mut || Ok(false))
}

/// Reads like [`read`]. While the readers work, the calling thread calls `meanwhile` until it
/// returns false.
pub fn read_while<T: Target>(
    request: &ReadRequest<'_>,
    target: &mut T,
    counters: &Counters,
    cancel: &dyn Cancel,
    meanwhile: &mut dyn FnMut() -> Result<bool>,
) -> Result<Vec<usize>> {
    let started = Instant::now();
    let memory = worker_range::limit(request.memory, request.files)?;
    let total = total(request)?;
    let Some(sources) = Sources::examine(request, total, memory)? else {
        while meanwhile()? {}
        return Ok(Vec::new());
    };
    if sources.are_local() && target.direct().is_none() {
        counters.reading("page cache");
    }
    let capabilities = sources.capabilities;
    let range = worker_range::range(&capabilities, sources.residency, request.readers)?;
    let (range, overhead) = fit_readers(memory, range, &capabilities, request.decrypts, target)?;
    target.expect_bytes(total);
    let limits = target.limits(&capabilities, range, total, request.decrypts);
    let block = if sources.direct { DISK_BLOCK as u64 } else { 1 };
    let mut limits = limited_by_receiver(BatchLimits { overhead, block, ..limits }, request);
    let step = if target.reads_in_steps() { step(request, &sources) } else { u64::MAX };
    // Tensors up to this length come in one chunk, and are hashed at once.
    let max_single_chunk = hash::SMALL.min(limits.len).min(target.unit());
    let sha = request.verify == Verify::All;
    // Tensors that are handed out while others are read come in file order.
    let in_order = request.receiver.is_some();
    let max_unhashed = target.max_unhashed(&capabilities, range).filter(|_| sha && !in_order);
    if max_unhashed.is_some() {
        limits.separate_len = LARGE;
    }
    let large_first = begins_with_large(request, &capabilities, target);
    let batches = batches(request, target, &limits)?;
    let jobs = plan_jobs(request.extents, batches, target, (step, max_single_chunk), large_first)?;
    let max_readers = if is_inline(request, &capabilities, total) { 1 } else { jobs.len() };
    let range = WorkerRange { bytes: Some(total), ..range.limited_to(max_readers) };
    // SHA-256, decryption and a receiver depend on the order of reads: then readers share a queue.
    let any_order = !sha && !request.decrypts && !in_order;
    let affinity = affinity(target, range);
    let own_share = any_order && range.max > 1 && sources.are_local() && affinity.node(0).is_none();
    let task = ReadTask {
        request,
        target: &*target,
        counters,
        max_single_chunk,
        max_unhashed,
        hashes: pool(request, max_single_chunk)?,
        undecrypted: try_collect(request.extents.iter().map(|_| AtomicBool::new(false)), PLAN)?,
        queue: WorkQueue::new(jobs, if own_share { range.initial } else { 1 })?,
        dispatch_lock: Mutex::new(()),
        completion: completion(request)?,
        affinity,
    };
    counters.since(Stage::Plan, started);
    let reads = sources.direct_reads(range.max, counters);
    carry_out(&task, range, handle_kind(reads.as_ref(), range.max), cancel, meanwhile)
}

/// Cuts the extents into batches, each for one device.
fn batches<T: Target>(
    request: &ReadRequest<'_>,
    target: &T,
    limits: &BatchLimits,
) -> Result<Vec<Batch>> {
    let device_of = |tensor| target.device_of(tensor);
    partition_by_device(request.extents, limits, (target.devices(), &device_of))
}

/// Returns the CPUs of the readers. A single reader runs on the calling thread, which is not bound.
fn affinity<T: Target>(target: &T, range: WorkerRange) -> Affinity {
    let devices = if range.max > 1 { target.devices() } else { 0 };
    Affinity::of((0..devices).map(|device| target.numa_node(device)))
}

/// Runs the readers until all work is done. Returns the tensors that could not be decrypted in
/// chunks.
fn carry_out<T: Target>(
    task: &ReadTask<'_, T>,
    range: WorkerRange,
    handle_kind: HandleKind<'_>,
    cancel: &dyn Cancel,
    meanwhile: &mut dyn FnMut() -> Result<bool>,
) -> Result<Vec<usize>> {
    let started = AtomicUsize::new(1);
    let work = |control: &Control<'_>, number: usize| {
        started.fetch_max(number + 1, Ordering::Relaxed);
        let handles = FileHandles::new(task.request.files, handle_kind);
        task.work(number, handles, control)
    };
    workers::run_while(range, cancel, work, meanwhile)?;
    task.counters.threads(started.into_inner().min(range.max), range.max);
    let undecrypted = task
        .undecrypted
        .iter()
        .enumerate()
        .filter(|(_, undecrypted)| undecrypted.load(Ordering::Relaxed));
    Ok(undecrypted.map(|(tensor, _)| tensor).collect())
}

/// Shortens batches if tensors are handed out while others are read, so that several batches fit
/// into the read-ahead.
fn limited_by_receiver(limits: BatchLimits, request: &ReadRequest<'_>) -> BatchLimits {
    let Some((receiver, _)) = request.receiver else { return limits };
    let max_len = receiver.batch_len();
    let len = limits.len.min(max_len.max(SHORTEST_BATCH));
    BatchLimits { len, separate_len: limits.separate_len.min(max_len), tapers: false, ..limits }
}

/// Returns the delivery of complete tensors, if the call has a receiver.
fn completion<'r>(request: &ReadRequest<'r>) -> Result<Option<CompletionTracker<'r>>> {
    let new = |(receiver, tensors)| {
        CompletionTracker::new(receiver, tensors, request.extents, request.verify)
    };
    request.receiver.map(new).transpose()
}

/// Returns the bytes of all headers and data.
fn total(request: &ReadRequest<'_>) -> Result<u64> {
    let header_len = |extent: &Extent| extent.data_offset.saturating_sub(extent.header_offset);
    if request.verify != Verify::Nothing
        && request.extents.iter().any(|extent| header_len(extent) == 0)
    {
        return Err(Error::Bug("hashes of a format that has none".to_owned()));
    }
    let lens =
        request.extents.iter().map(|extent| extent.data_len.saturating_add(header_len(extent)));
    Ok(lens.fold(0, u64::saturating_add))
}

/// True if large tensors are read first. Their bytes may then wait long for their hash. This is
/// allowed only if nothing waits for these bytes: readers must not need their memory, and their
/// decryption must not need a header that is read later.
fn begins_with_large<T: Target>(
    request: &ReadRequest<'_>,
    source: &Capabilities,
    target: &T,
) -> bool {
    let any_order = !request.decrypts && request.receiver.is_none();
    request.verify == Verify::All && source.max_readers > 1 && any_order && target.reads_in_steps()
}

/// True if the calling thread reads everything. Never from servers: their latency exceeds the time
/// of the transfer, so requests must overlap however few the bytes.
fn is_inline(request: &ReadRequest<'_>, source: &Capabilities, total: u64) -> bool {
    let hashed = request.decrypts || request.verify != Verify::Nothing;
    let max_bytes = if hashed { INLINE_HASHED } else { INLINE_LEN };
    total < max_bytes && !source.has_long_requests()
}

/// Returns the bytes of one read step.
fn step(request: &ReadRequest<'_>, sources: &Sources) -> u64 {
    match (request.decrypts, request.verify) {
        // Long requests are not cut, as each request costs a round trip. Nor are direct reads:
        // those of one batch run at the same time.
        _ if sources.capabilities.has_long_requests() || sources.direct => u64::MAX,
        (true, _) => PIECE_LEN,
        (false, Verify::Nothing) => u64::MAX,
        (false, _) => STEP,
    }
}

/// Returns the hash pool for tensors that come in more than one chunk.
fn pool<B: AsRef<[u8]>>(request: &ReadRequest<'_>, max_single_chunk: u64) -> Result<HashPool<B>> {
    let lens = request.extents.iter().map(|extent| {
        let pooled = request.verify != Verify::Nothing && extent.data_len > max_single_chunk;
        pooled.then_some(extent.data_len)
    });
    HashPool::new(lens, request.verify == Verify::All)
}
