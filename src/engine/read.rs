//! The read engine: sources → batches in memory of a destination → decryption and hashes → the
//! destination.

use std::sync::atomic::{AtomicUsize, Ordering};
use std::time::Instant;

use super::completion::CompletionTracker;
use super::destination::gather::{self, Gather};
use super::destination::{Destination, Fit, ReadFacts};
use super::file_handles::{FileHandles, HandleKind};
use super::page_cache::DirectReads;
use super::plan::{BatchLimits, Extent, WorkQueue};
use super::read_jobs::{LARGE, ReadJob, plan_jobs};
pub use super::read_request::ReadRequest;
use super::read_task::ReadTask;
use super::sources::Sources;
use super::worker_range;
use super::workers::{self, Control, WorkerRange};
use crate::cancel::Cancel;
use crate::codec::HashPool;
use crate::codec::crypt::PIECE_LEN;
use crate::codec::hash::{self, Verify};
use crate::error::{Error, Result};
use crate::mem::DISK_BLOCK;
use crate::mem::numa::Affinity;
use crate::memory_limit::MemoryLimit;
use crate::stats::{Counters, Stage};
use crate::sys::sync::Mutex;

/// Bytes of one read step when hashes are verified. They stay in a core's L2 cache until they are
/// hashed.
const STEP: u64 = 512 << 10;
/// Minimum length of a batch, however small the read-ahead is.
const SHORTEST_BATCH: u64 = 64 << 10;

/// Reads a plan into a destination, and returns the destination. While the readers work, the calling
/// thread calls `meanwhile` until it returns false.
pub fn read<D: Destination>(
    request: &ReadRequest<'_>,
    to: D,
    counters: &Counters,
    cancel: &dyn Cancel,
    meanwhile: &mut dyn FnMut() -> Result<bool>,
) -> Result<D> {
    let started = Instant::now();
    let (plan, options) = (request.plan, request.options);
    let memory = worker_range::limit(options.memory, request.files)?;
    let total = total(request)?;
    // Bytes that are there already are work only where they are hashed.
    let unhashed = options.verify == Verify::Nothing;
    let present = if unhashed { to.present(&plan.extents) } else { 0 };
    let sources = Sources::examine(request, total.saturating_sub(present), memory)?;
    let Some(sources) = sources.filter(|_| !plan.extents.is_empty()) else {
        while meanwhile()? {}
        return Ok(to);
    };
    if sources.are_local() && request.direct.is_none() {
        counters.reading("page cache");
    }
    let mut to = Gather::new(plan, to);
    let fit = fit(request, &mut to, &sources, (total, memory))?;
    let (jobs, max_single_chunk, max_unhashed) = batches(request, &mut to, &sources, &fit)?;
    let (decrypts, sha) = (request.codec.decrypts(), options.verify == Verify::All);
    let (in_order, facts) = (request.receiver.is_some(), to.facts());
    let range = fit.readers.limited_to(if sources.inline { 1 } else { jobs.len() });
    let range = WorkerRange { bytes: Some(total), ..range };
    // SHA-256, decryption and a receiver depend on the order of reads: then readers share a queue.
    let any_order = !sha && !decrypts && !in_order;
    // A single reader runs on the calling thread, which is not bound.
    let bound = range.max > 1;
    let affinity = Affinity::of(facts.nodes.iter().copied().filter(|_| bound));
    let own_share = any_order && range.max > 1 && sources.are_local() && affinity.node(0).is_none();
    let task = ReadTask {
        request,
        to: &to,
        counters,
        max_single_chunk,
        max_unhashed,
        hashes: pool(request, max_single_chunk),
        queue: WorkQueue::new(jobs, if own_share { range.initial } else { 1 }),
        dispatch_lock: Mutex::new(()),
        completion: request.receiver.map(|to| CompletionTracker::new(to, plan, options.verify)),
        affinity,
        nodes: facts.nodes,
        device: facts.device,
    };
    counters.since(Stage::Plan, started);
    carry_out(&task, range, sources.direct, cancel, meanwhile)?;
    Ok(to.into_inner())
}

/// Adapts the destination to a read of `total` bytes, and the limits on batches to its receiver.
fn fit<D: Destination>(
    request: &ReadRequest<'_>,
    to: &mut D,
    sources: &Sources,
    (total, memory): (u64, MemoryLimit),
) -> Result<Fit> {
    let (plan, decrypts) = (request.plan, request.codec.decrypts());
    let source = &sources.capabilities;
    let cut = if decrypts { PIECE_LEN } else { 1 };
    // Hashes and decryption take all cores.
    let computes = decrypts || request.options.verify != Verify::Nothing;
    let readers = worker_range::range(
        source,
        (sources.residency, sources.direct),
        if computes { 0 } else { to.facts().spared_cores },
        request.options.readers,
    )?;
    let fit = to.fit(&ReadFacts {
        source,
        readers,
        total,
        unit: if plan.uncut { u64::MAX } else { cut },
        gather_bytes: if plan.gathers() { gather::min_memory(decrypts) } else { 0 },
        memory,
    })?;
    let block = if sources.direct { DISK_BLOCK as u64 } else { 1 };
    let limits = limited_by_receiver(BatchLimits { block, ..fit.limits }, request);
    Ok(Fit { limits, ..fit })
}

/// Plans the batches of a read, in the order in which they are read. Also returns the length up to
/// which tensors come in one chunk, and are hashed at once, and the adapted `max_unhashed`.
fn batches<D: Destination>(
    request: &ReadRequest<'_>,
    to: &mut D,
    sources: &Sources,
    fit: &Fit,
) -> Result<(Vec<ReadJob<D>>, u64, Option<u64>)> {
    let (plan, facts, source) = (request.plan, to.facts(), &sources.capabilities);
    // Data of a tensor that is encrypted in one piece are not cut.
    let step = if facts.in_steps && !plan.uncut { step(request, sources) } else { u64::MAX };
    let max_single_chunk = hash::SMALL.min(fit.limits.len).min(facts.unit);
    let sha = request.options.verify == Verify::All;
    // Tensors that are handed out while others are read come in file order.
    let any_order = request.receiver.is_none();
    let max_unhashed = fit.max_unhashed.filter(|_| sha && any_order);
    let separate_len = if max_unhashed.is_some() { LARGE } else { fit.limits.separate_len };
    let limits = BatchLimits { separate_len, ..fit.limits };
    // Large tensors are read first only if nothing waits for these bytes, which may wait long for
    // their hash: readers must not need their memory, and their decryption no header that is read
    // later.
    let several = source.max_readers > 1;
    let is_pinned = request.files.iter().any(|file| file.facts().pin.is_some());
    let in_any_order = any_order && !is_pinned && !request.codec.decrypts();
    let large_first = sha && several && in_any_order && facts.in_steps;
    let seekable = request.files.iter().all(|file| file.facts().len.is_some());
    let batches = plan.batches(&limits, seekable)?;
    let jobs = plan_jobs(plan, batches, to, (step, max_single_chunk), large_first)?;
    Ok((jobs, max_single_chunk, max_unhashed))
}

/// Runs the readers until all work is done. `direct`: they read with direct I/O.
fn carry_out<D: Destination>(
    task: &ReadTask<'_, D>,
    range: WorkerRange,
    direct: bool,
    cancel: &dyn Cancel,
    meanwhile: &mut dyn FnMut() -> Result<bool>,
) -> Result<()> {
    let reads = direct.then(|| DirectReads::new(range.max, task.counters));
    let handle_kind = match &reads {
        Some(reads) => HandleKind::Direct(reads),
        None if range.max > 1 => HandleKind::Own,
        None => HandleKind::Shared,
    };
    let started = AtomicUsize::new(1);
    let work = |control: &Control<'_>, number: usize| {
        started.fetch_max(number + 1, Ordering::Relaxed);
        let handles = FileHandles::new(task.request.files, handle_kind);
        task.work(number, handles, control)
    };
    workers::run_while(range, cancel, work, meanwhile)?;
    task.counters.threads(started.into_inner().min(range.max), range.max);
    Ok(())
}

/// Shortens batches if tensors are handed out while others are read, so that several batches fit
/// into the read-ahead.
fn limited_by_receiver(limits: BatchLimits, request: &ReadRequest<'_>) -> BatchLimits {
    let Some(receiver) = request.receiver else { return limits };
    let max_len = receiver.batch_len();
    let len = limits.len.min(max_len.max(SHORTEST_BATCH));
    BatchLimits { len, separate_len: limits.separate_len.min(max_len), tapers: false, ..limits }
}

/// Returns the bytes of all headers and data.
fn total(request: &ReadRequest<'_>) -> Result<u64> {
    let header_len = |extent: &Extent| extent.data_offset.saturating_sub(extent.header_offset);
    let extents = &request.plan.extents;
    if request.options.verify != Verify::Nothing
        && extents.iter().any(|extent| header_len(extent) == 0)
    {
        return Err(Error::Bug("hashes of a format that has none".to_owned()));
    }
    let lens = extents.iter().map(|extent| extent.data_len.saturating_add(header_len(extent)));
    Ok(lens.fold(0, u64::saturating_add))
}

/// Returns the bytes of one read step.
fn step(request: &ReadRequest<'_>, sources: &Sources) -> u64 {
    match (request.codec.decrypts(), request.options.verify) {
        // Long requests are not cut, as each request costs a round trip. Nor are direct reads:
        // those of one batch run at the same time.
        _ if sources.capabilities.has_long_requests() || sources.direct => u64::MAX,
        // Slices have few bytes: to read them in steps takes more calls, and saves no CPU time.
        (true, _) if !request.plan.slices.is_empty() => u64::MAX,
        (true, _) => PIECE_LEN,
        (false, Verify::Nothing) => u64::MAX,
        (false, _) => STEP,
    }
}

/// Returns the hash pool for tensors that come in more than one chunk.
fn pool<B: AsRef<[u8]>>(request: &ReadRequest<'_>, max_single_chunk: u64) -> HashPool<B> {
    let verify = request.options.verify;
    let lens = request.plan.extents.iter().map(|extent| {
        let pooled = verify != Verify::Nothing && extent.data_len > max_single_chunk;
        pooled.then_some(extent.data_len)
    });
    HashPool::new(lens, verify == Verify::All)
}
