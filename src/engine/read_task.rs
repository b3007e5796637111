//! The work of the readers of one call.
//!
//! A reader takes a batch from the work queue and memory for it from the destination, and reads the
//! batch with one request. It passes headers to the codec, decrypts and hashes data in place, and
//! commits the memory to the destination.

use std::sync::Arc;
use std::time::Duration;

use super::completion::{Arrival, CompletionTracker};
use super::destination::direct_storage::DirectStorage;
use super::destination::gather::Gather;
use super::destination::{BatchMemory, Destination, SegmentBytes};
use super::file_handles::FileHandles;
use super::plan::{Batch, Next, Segment, SegmentKind, WorkQueue};
use super::read_jobs::{LARGE, ReadJob, only_extent, outer_extents};
use super::read_request::ReadRequest;
use super::workers::Control;
use crate::codec::hash::{Digests, Verify, digest_all};
use crate::codec::{self, HashPool};
use crate::error::Result;
use crate::fallible::try_zeroed;
use crate::io::{ReadAt, read_exact_at};
use crate::mem::Buffers;
use crate::mem::device::{Device, Event};
use crate::mem::numa::Affinity;
use crate::numbers::{ExtentNumber, TensorNumber};
use crate::stats::{Counters, Stage, times_first_touch};
use crate::sys::sync::{Mutex, unpoisoned};
use crate::sys::to_usize;

/// Sleep of a reader that may not read ahead, before it checks again for bytes to hash.
const IDLE: Duration = Duration::from_millis(20);

/// State that the readers of one call share.
pub struct ReadTask<'r, D: Destination> {
    pub request: &'r ReadRequest<'r>,
    pub to: &'r Gather<'r, D>,
    pub counters: &'r Counters,
    /// Tensors of at most this length come in one chunk.
    pub max_single_chunk: u64,
    /// See [`super::destination::Fit::max_unhashed`].
    pub max_unhashed: Option<u64>,
    pub hashes: HashPool<BatchBytes<'r, D>>,
    pub queue: WorkQueue<Job<'r, D>>,
    pub dispatch_lock: Mutex<()>,
    /// Hands out tensors as they are complete.
    pub completion: Option<CompletionTracker<'r>>,
    /// The CPUs of readers.
    pub affinity: Affinity,
    /// The NUMA node of each device, where it is known.
    pub nodes: Vec<Option<usize>>,
    /// The device that readers enter once, if there is only one.
    pub device: Option<Arc<dyn Device>>,
}

type Job<'r, D> = ReadJob<Gather<'r, D>>;
type Ticket<'r, D> = <Gather<'r, D> as Destination>::Ticket;
type BatchBytes<'r, D> = <Gather<'r, D> as Destination>::Bytes;

/// A tensor that is hashed at once: its extent, the header bytes that its hash covers, and its
/// chunk.
struct SingleChunkTensor {
    extent: ExtentNumber,
    covered: Vec<u8>,
    chunk: Option<usize>,
}

/// Headers and data of one batch.
#[derive(Default)]
struct BatchContents {
    /// Tensors that are hashed at once.
    single_chunk: Vec<SingleChunkTensor>,
    /// Data that go to the hash pool.
    pooled: Vec<PooledChunk>,
    /// Parts of tensors that have arrived, if tensors are handed out as they are complete.
    arrivals: Vec<Arrival>,
    /// Bytes of data.
    data_len: u64,
}

/// Data that go to the hash pool: their chunk, their extent, and their position in it.
type PooledChunk = (usize, ExtentNumber, u64);

impl<'r, D: Destination> ReadTask<'r, D> {
    /// Runs one reader, with its file handles, until there is no more work.
    pub fn work(
        &self,
        number: usize,
        mut handles: FileHandles<'_>,
        control: &Control<'_>,
    ) -> Result<()> {
        if !control.is_inline() {
            self.affinity.bind_thread(number);
        }
        let device = self.device.as_ref().filter(|_| !control.is_inline());
        let _entered = device.map(|device| device.enter()).transpose()?;
        while !control.stopped() && !control.is_retired() {
            if self.hash(true, control)? {
                continue;
            }
            let next = {
                // Memory is granted in queue order; this prevents deadlock.
                let _order = unpoisoned(self.dispatch_lock.lock());
                match self.next(number)? {
                    Some(Next::Work(job)) => {
                        let ticket = job.first().map(|(batch, _)| self.to.enqueue(batch));
                        Some(Next::Work((job, ticket.transpose()?)))
                    }
                    Some(Next::Later) => Some(Next::Later),
                    None => None,
                }
            };
            match next {
                Some(Next::Work((job, ticket))) => {
                    self.run_job(job, ticket, &mut handles, control)?
                }
                Some(Next::Later) if self.hash_now()? => {}
                Some(Next::Later) => {
                    if let Some(completion) = &self.completion {
                        completion.receiver.wait(IDLE);
                    }
                }
                None if self.hash(false, control)? => {}
                None => break,
            }
        }
        Ok(())
    }

    /// Takes the next job of a reader.
    fn next(&self, number: usize) -> Result<Option<Next<Job<'r, D>>>> {
        let Some(completion) = &self.completion else {
            let (mut last_answer, node) = (None, self.affinity.node(number));
            // Readers of a node serve its devices alone.
            let full = if node.is_none() { self.to.full_devices() } else { Vec::new() };
            let is_full = |job: &Job<'r, D>| {
                let device =
                    outer_extents(job).map(|(first, _)| self.request.plan.device_of(first));
                device.is_some_and(|device| full.get(device) == Some(&true))
            };
            let next = self.queue.next(number, |job| {
                self.is_crowded(job, &mut last_answer) || !self.is_near(job, node) || is_full(job)
            });
            return Ok(next.map(Next::Work));
        };
        self.queue.next_if(|job| match outer_extents(job) {
            Some((first, last)) => {
                let (first, last) = (completion.tensors(first)?, completion.tensors(last)?);
                completion.receiver.admits(first.start, TensorNumber(last.end.0.saturating_sub(1)))
            }
            None => Ok(true),
        })
    }

    /// Counts parts of tensors that have arrived, and hands out tensors that are complete.
    fn arrived(&self, arrivals: &[Arrival], copy_events: &[Arc<dyn Event>]) -> Result<()> {
        self.completion
            .as_ref()
            .map_or(Ok(()), |completion| completion.arrived(arrivals, copy_events))
    }

    /// True if a job is for a device of this NUMA node, or if readers have no node.
    fn is_near(&self, job: &Job<'r, D>, node: Option<usize>) -> bool {
        let near = |node| {
            let (extent, _) = outer_extents(job)?;
            let device = self.request.plan.device_of(extent);
            Some(self.nodes.get(device).copied().flatten() == Some(node))
        };
        node.and_then(near).unwrap_or(true)
    }

    /// True if a job should be deferred, because it belongs to a large tensor of which too many
    /// bytes wait for their hash.
    ///
    /// Such a tensor shares no job with others, and its jobs stay in order. So bytes in memory
    /// never wait for a job that is still in the queue. `last_answer` caches the result, as
    /// adjacent jobs are mostly of the same tensor.
    fn is_crowded(&self, job: &Job<'r, D>, last_answer: &mut Option<(ExtentNumber, bool)>) -> bool {
        let Some(max_unhashed) = self.max_unhashed else { return false };
        let extents = &self.request.plan.extents;
        let large = |extent: &ExtentNumber| extent.of(extents).is_ok_and(|of| of.data_len >= LARGE);
        let Some(extent) = only_extent(job).filter(large) else { return false };
        let (_, crowded) = match *last_answer {
            Some(cached) if cached.0 == extent => cached,
            _ => *last_answer.insert((extent, self.hashes.retained_len(extent.0) >= max_unhashed)),
        };
        crowded
    }

    fn run_job(
        &self,
        job: Job<'r, D>,
        mut ticket: Option<Ticket<'r, D>>,
        handles: &mut FileHandles<'_>,
        control: &Control<'_>,
    ) -> Result<()> {
        for (batch, planned) in job {
            let source = handles.handle(batch.file)?;
            let direct = self.request.direct.filter(|direct| direct.is_usable());
            if let Some(direct) = direct.filter(|_| !self.to.is_gathered(&batch)) {
                // No staging buffers are needed, and the ticket would block the queue for them.
                ticket = None;
                if self.read_directly(&batch, source, direct, control)? {
                    continue;
                }
            }
            let ticket = match ticket.take() {
                Some(ticket) => ticket,
                None => self.to.enqueue(&batch)?,
            };
            self.read_batch(batch, planned, ticket, source, control)?;
        }
        Ok(())
    }

    fn read_batch(
        &self,
        batch: Batch,
        planned: <Gather<'r, D> as Destination>::BatchPlan,
        ticket: Ticket<'r, D>,
        source: &dyn ReadAt,
        control: &Control<'_>,
    ) -> Result<()> {
        let offset = batch.offset;
        let idle = || self.hash_now();
        let mut lease = self
            .counters
            .time(Stage::Memory, || self.to.acquire(ticket, batch, planned, &idle, control))?;
        let observer = |bytes| {
            control.arrived(bytes);
            self.counters.bytes_arrived(bytes);
        };
        self.counters.time(Stage::Read, || {
            lease.fill(&|from, buffers| {
                let at = offset.saturating_add(from);
                if times_first_touch() {
                    self.counters.time(Stage::FirstTouch, || buffers.prefault());
                }
                buffers
                    .with_observer(&observer, |b| read_exact_at(source, at, b, "tensors", control))
            })
        })?;
        let BatchContents { single_chunk, pooled, arrivals, data_len } =
            self.chunks(lease.chunks()?, control)?;
        self.counters.bytes(data_len);
        let keep = !single_chunk.is_empty() || !pooled.is_empty();
        let commit = || self.to.commit(lease, keep, &idle, control);
        let committed = self.counters.time(Stage::Copy, commit)?;
        self.arrived(&arrivals, &committed.copy_events)?;
        if !keep {
            return Ok(());
        }
        self.counters.time(Stage::Hash, || self.verify(committed.bytes, &single_chunk, pooled))?;
        let verified =
            single_chunk.iter().map(|single| Arrival { extent: single.extent, parts: 1 });
        self.arrived(&verified.collect::<Vec<_>>(), &[])
    }

    /// Adds a part that has arrived, if tensors are handed out as they are complete.
    fn add_arrival(&self, arrivals: &mut Vec<Arrival>, extent: ExtentNumber, parts: u64) {
        if self.completion.is_some() {
            arrivals.push(Arrival { extent, parts });
        }
    }

    /// Passes headers to the codec, and decrypts data in place.
    fn chunks(
        &self,
        chunks: Vec<SegmentBytes<'_>>,
        control: &Control<'_>,
    ) -> Result<BatchContents> {
        let mut contents = BatchContents::default();
        for (number, chunk) in chunks.into_iter().enumerate() {
            match chunk.kind {
                SegmentKind::Gap => {}
                SegmentKind::Header { extent } => {
                    let single = self.header(extent, chunk.bytes, control)?;
                    contents.single_chunk.extend(single);
                    self.add_arrival(&mut contents.arrivals, extent, 1);
                }
                SegmentKind::Data { extent, start } => {
                    let len = chunk.bytes.len() as u64;
                    self.decrypt(extent, start, chunk.bytes, control)?;
                    self.add_arrival(&mut contents.arrivals, extent, len);
                    contents.data_len += self.wanted_len(extent, start, len)?;
                    if self.request.options.verify == Verify::Nothing {
                        continue;
                    }
                    let last = contents.single_chunk.last_mut();
                    match last.filter(|single: &&mut SingleChunkTensor| single.extent == extent) {
                        Some(single) => single.chunk = Some(number),
                        None => contents.pooled.push((number, extent, start)),
                    }
                }
            }
        }
        Ok(contents)
    }

    /// Returns how many of some bytes are wanted.
    fn wanted_len(&self, extent: ExtentNumber, start: u64, len: u64) -> Result<u64> {
        let plan = self.request.plan;
        let of = plan.use_of(extent)?;
        let from = of.start.saturating_add(start);
        let wanted =
            |tensor| plan.place(tensor, from + len).offset - plan.place(tensor, from).offset;
        Ok(of.each_tensor().map(wanted).sum())
    }

    /// Passes a header to the codec. Returns the tensor if it is hashed at once.
    fn header(
        &self,
        extent: ExtentNumber,
        raw: &[u8],
        control: &Control<'_>,
    ) -> Result<Option<SingleChunkTensor>> {
        let plan = self.request.plan;
        let covered =
            self.request.codec.header(plan.use_of(extent)?.tensors.start, raw, control)?;
        if self.request.options.verify == Verify::Nothing {
            return Ok(None);
        }
        let data_len = extent.of(&plan.extents)?.data_len;
        if data_len <= self.max_single_chunk {
            return Ok(Some(SingleChunkTensor { extent, covered, chunk: None }));
        }
        self.hashes.header(extent.0, &covered);
        Ok(None)
    }

    fn decrypt(
        &self,
        extent: ExtentNumber,
        start: u64,
        bytes: &mut [u8],
        control: &Control<'_>,
    ) -> Result<()> {
        let codec = self.request.codec;
        if !codec.decrypts() {
            return Ok(());
        }
        let of = self.request.plan.use_of(extent)?;
        self.counters.time(Stage::Decrypt, || {
            codec.decrypt(of.tensors.start, of.start.saturating_add(start), bytes, control)
        })
    }

    /// Compares the hashes of an extent's tensor.
    fn compare(&self, extent: ExtentNumber, digests: &Digests) -> Result<()> {
        let of = self.request.plan.use_of(extent)?;
        self.request.codec.compare(of.tensors.start, digests)
    }

    /// Hashes the tensors that are complete in the batch, and passes other data to the hash pool.
    fn verify(
        &self,
        bytes: Vec<BatchBytes<'r, D>>,
        single_chunk: &[SingleChunkTensor],
        pooled: Vec<PooledChunk>,
    ) -> Result<()> {
        let bytes_of = |single: &SingleChunkTensor| single.chunk.and_then(|chunk| bytes.get(chunk));
        let inputs = single_chunk.iter().map(|single| {
            (single.covered.as_slice(), bytes_of(single).map_or(&[][..], AsRef::as_ref))
        });
        let sha = self.request.options.verify == Verify::All;
        let digests = digest_all(&inputs.collect::<Vec<_>>(), sha);
        for (single, digests) in single_chunk.iter().zip(digests) {
            self.compare(single.extent, &digests)?;
        }
        let mut pooled = pooled.into_iter().peekable();
        for (number, bytes) in bytes.into_iter().enumerate() {
            if let Some((_, extent, start)) = pooled.next_if(|(chunk, ..)| *chunk == number) {
                self.hashes.data(extent.0, start, bytes);
            }
        }
        Ok(())
    }

    /// Hashes some bytes of the pool. False if there are none, or too few while more is to be read.
    fn hash(&self, more_to_read: bool, control: &Control<'_>) -> Result<bool> {
        self.hash_batch(self.hashes.take(|| more_to_read, || control.stopped()))
    }

    /// Hashes bytes that are ready, without waiting.
    fn hash_now(&self) -> Result<bool> {
        self.hash_batch(self.hashes.take_ready())
    }

    fn hash_batch(&self, batch: Option<codec::HashBatch<BatchBytes<'r, D>>>) -> Result<bool> {
        let Some(batch) = batch else { return Ok(false) };
        let mut outcome = Ok(());
        self.counters.time(Stage::Hash, || {
            self.hashes.hash(batch, |extent, digests| {
                if outcome.is_ok() {
                    let extent = ExtentNumber(extent);
                    let compared = self.compare(extent, &digests);
                    let arrival = Arrival { extent, parts: 1 };
                    outcome = compared.and_then(|()| self.arrived(&[arrival], &[]));
                }
            });
        });
        outcome.map(|()| true)
    }

    /// Lets the device read the data of a batch; headers are read on the host. False if the device
    /// fails to read.
    fn read_directly(
        &self,
        batch: &Batch,
        source: &dyn ReadAt,
        direct: &DirectStorage<'_>,
        control: &Control<'_>,
    ) -> Result<bool> {
        let (mut position, mut data_len) = (batch.offset, 0);
        let mut arrivals: Vec<Arrival> = Vec::new();
        for segment in &batch.segments {
            let Segment { kind, len, place } = *segment;
            let size = to_usize(len);
            if matches!(kind, SegmentKind::Header { .. }) {
                let mut raw = try_zeroed(size, "headers of tensors")?;
                Buffers::from_slice(&mut raw)
                    .with_observer(&|bytes| control.arrived(bytes), |buffers| {
                        read_exact_at(source, position, buffers, "tensors", control)
                    })?;
                if let Some(extent) = segment.extent() {
                    self.header(extent, &raw, control)?;
                    self.add_arrival(&mut arrivals, extent, 1);
                }
            } else if let (Some(place), Some(extent)) = (place, segment.extent()) {
                let read = || direct.read(batch.file, place, size, position, control);
                if !self.counters.time(Stage::Read, read)? {
                    self.counters.fallback(
                        "GPUDirect Storage failed during the load: the rest came by plain reads",
                    );
                    self.counters.reading("page cache");
                    return Ok(false);
                }
                data_len += len;
                self.add_arrival(&mut arrivals, extent, len);
            }
            position += len;
        }
        self.counters.bytes(data_len);
        self.arrived(&arrivals, &[])?;
        Ok(true)
    }
}
