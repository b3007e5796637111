//! The work of the readers of one call.
//!
//! A reader takes a batch from the work queue and memory for it from the target, and reads the
//! batch with one request. It passes headers to the codec, decrypts and hashes data in place, and
//! commits the memory to the target.

use std::sync::atomic::{AtomicBool, Ordering};
use std::sync::{Arc, PoisonError};
use std::time::Duration;

use super::completion::{Arrival, CompletionTracker};
use super::file_handles::FileHandles;
use super::plan::{Batch, Next, PLAN, Segment, SegmentKind, WorkQueue};
use super::read_jobs::{LARGE, ReadJob, only_tensor, outer_tensors};
use super::read_request::{HeaderInfo, ReadRequest};
use super::target::direct::DirectStorage;
use super::target::{BatchMemory, SegmentBytes, Target};
use super::workers::Control;
use crate::codec::hash::{Digests, Verify, digest_all};
use crate::codec::{self, HashPool};
use crate::error::{Error, Result};
use crate::fallible::{try_collect, try_push, try_zeroed};
use crate::io::{ReadAt, read_exact_at};
use crate::mem::Buffers;
use crate::mem::device::Event;
use crate::mem::numa::Affinity;
use crate::stats::{Counters, Stage, times_first_touch};
use crate::sys::sync::Mutex;

/// Sleep of a reader that may not read ahead, before it checks again for bytes to hash.
const IDLE: Duration = Duration::from_millis(20);

/// State that the readers of one call share.
pub struct ReadTask<'r, T: Target> {
    pub request: &'r ReadRequest<'r>,
    pub target: &'r T,
    pub counters: &'r Counters,
    /// Tensors of at most this length come in one chunk.
    pub max_single_chunk: u64,
    /// See [`Target::max_unhashed`].
    pub max_unhashed: Option<u64>,
    pub hashes: HashPool<T::Bytes>,
    /// For each tensor, true if its data could not be decrypted in chunks.
    pub undecrypted: Vec<AtomicBool>,
    pub queue: WorkQueue<ReadJob<T>>,
    pub dispatch_lock: Mutex<()>,
    /// Hands out tensors as they are complete.
    pub completion: Option<CompletionTracker<'r>>,
    /// The CPUs of readers.
    pub affinity: Affinity,
}

/// A tensor that is hashed at once: its number, the header bytes that its hash covers, and its
/// chunk.
struct SingleChunkTensor {
    tensor: usize,
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
    /// Tensors that cannot be decrypted in chunks.
    undecrypted: Vec<usize>,
    /// Parts of tensors that have arrived, if tensors are handed out as they are complete.
    arrivals: Vec<Arrival>,
    /// Bytes of data.
    data_len: u64,
}

/// Data that go to the hash pool: their chunk, their tensor, and their position.
type PooledChunk = (usize, usize, u64);

impl<T: Target> ReadTask<'_, T> {
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
        while !control.stopped() && !control.is_retired() {
            if self.hash(true, control)? {
                continue;
            }
            let next = {
                // Memory is granted in queue order; this prevents deadlock.
                let _order = self.dispatch_lock.lock().unwrap_or_else(PoisonError::into_inner);
                match self.next(number)? {
                    Some(Next::Work(mut job)) => {
                        self.target.prepare(&mut job)?;
                        let ticket = job.first().map(|(batch, _)| self.target.enqueue(batch));
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
                        completion.receiver().wait(IDLE);
                    }
                }
                None if self.hash(false, control)? => {}
                None => break,
            }
        }
        Ok(())
    }

    /// Takes the next job of a reader.
    fn next(&self, number: usize) -> Result<Option<Next<ReadJob<T>>>> {
        let Some(completion) = &self.completion else {
            let (mut last_answer, node) = (None, self.affinity.node(number));
            let next = self.queue.next(number, |job| {
                self.is_crowded(job, &mut last_answer) || !self.is_near(job, node)
            });
            return Ok(next.map(Next::Work));
        };
        self.queue.next_if(|job| match outer_tensors(job) {
            Some((first, last)) => {
                completion.receiver().admits(completion.tensor(first)?, completion.tensor(last)?)
            }
            None => Ok(true),
        })
    }

    /// Counts parts of tensors that have arrived, and hands out tensors that are complete.
    fn arrived(&self, arrivals: &[Arrival], copy_event: Option<&Arc<dyn Event>>) -> Result<()> {
        self.completion
            .as_ref()
            .map_or(Ok(()), |completion| completion.arrived(arrivals, copy_event))
    }

    /// True if a job is for a device of this NUMA node, or if readers have no node.
    fn is_near(&self, job: &ReadJob<T>, node: Option<usize>) -> bool {
        let tensor = || outer_tensors(job).map(|(first, _)| first);
        let near = |node| {
            let tensor = tensor()?;
            Some(self.target.numa_node(self.target.device_of(tensor)) == Some(node))
        };
        node.and_then(near).unwrap_or(true)
    }

    /// True if a job should be deferred, because it belongs to a large tensor of which too many
    /// bytes wait for their hash.
    ///
    /// Such a tensor shares no job with others, and its jobs stay in order. So bytes in memory
    /// never wait for a job that is still in the queue. `last_answer` caches the result, as
    /// adjacent jobs are mostly of the same tensor.
    fn is_crowded(&self, job: &ReadJob<T>, last_answer: &mut Option<(usize, bool)>) -> bool {
        let Some(max_unhashed) = self.max_unhashed else { return false };
        let large = |tensor: &usize| {
            self.request.extents.get(*tensor).is_some_and(|extent| extent.data_len >= LARGE)
        };
        let Some(tensor) = only_tensor(job).filter(large) else { return false };
        let (_, crowded) = match *last_answer {
            Some(cached) if cached.0 == tensor => cached,
            _ => *last_answer.insert((tensor, self.hashes.retained_len(tensor) >= max_unhashed)),
        };
        crowded
    }

    fn run_job<'t>(
        &'t self,
        job: ReadJob<T>,
        mut ticket: Option<T::QueueTicket<'t>>,
        handles: &mut FileHandles<'_>,
        control: &Control<'_>,
    ) -> Result<()> {
        for (batch, planned) in job {
            let source = handles.handle(batch.file)?;
            let direct = self.target.direct().filter(|direct| direct.is_usable());
            if let Some(direct) = direct {
                // No staging buffers are needed, and the ticket would block the queue for them.
                ticket = None;
                if self.read_directly(&batch, source, direct, control)? {
                    continue;
                }
            }
            let ticket = match ticket.take() {
                Some(ticket) => ticket,
                None => self.target.enqueue(&batch)?,
            };
            self.read_batch(batch, planned, ticket, source, control)?;
        }
        Ok(())
    }

    fn read_batch<'t>(
        &'t self,
        batch: Batch,
        planned: T::BatchPlan,
        ticket: T::QueueTicket<'t>,
        source: &dyn ReadAt,
        control: &Control<'_>,
    ) -> Result<()> {
        let offset = batch.offset;
        let idle = || self.hash_now();
        let mut lease = self
            .counters
            .time(Stage::Memory, || self.target.acquire(ticket, batch, planned, &idle, control))?;
        let what = || "tensors".to_owned();
        self.counters.time(Stage::Read, || {
            lease.fill(&|from, buffers| {
                let at = offset.saturating_add(from);
                if times_first_touch() {
                    self.counters.time(Stage::FirstTouch, || buffers.prefault());
                }
                buffers.with_observer(control, |b| read_exact_at(source, at, b, &what, control))
            })
        })?;
        let BatchContents { single_chunk, pooled, undecrypted, arrivals, data_len } =
            self.chunks(lease.chunks()?, control)?;
        self.counters.bytes(data_len);
        undecrypted.into_iter().for_each(|tensor| self.target.withhold(&mut lease, tensor));
        let keep = !single_chunk.is_empty() || !pooled.is_empty();
        let commit = || self.target.commit(lease, keep, control);
        let committed = self.counters.time(Stage::Copy, commit)?;
        self.arrived(&arrivals, committed.copy_event.as_ref())?;
        if !keep {
            return Ok(());
        }
        self.counters.time(Stage::Hash, || self.verify(committed.bytes, &single_chunk, pooled))?;
        let verified = single_chunk.iter().map(|single| Arrival::of_hash(single.tensor));
        self.arrived(&try_collect(verified, PLAN)?, None)
    }

    /// Adds a part that has arrived, if tensors are handed out as they are complete.
    fn add_arrival(&self, arrivals: &mut Vec<Arrival>, arrival: Arrival) -> Result<()> {
        if self.completion.is_some() { try_push(arrivals, arrival, PLAN) } else { Ok(()) }
    }

    /// Returns the number of parts that a tensor's hash counts as: 1 if hashes are verified, else
    /// 0.
    fn hash_part(&self) -> u64 {
        u64::from(self.request.verify != Verify::Nothing)
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
                SegmentKind::Header { tensor } => {
                    let (in_chunks, single) = self.header(tensor, chunk.bytes, control)?;
                    if let Some(single) = single {
                        try_push(&mut contents.single_chunk, single, PLAN)?;
                    }
                    self.add_arrival(
                        &mut contents.arrivals,
                        Arrival {
                            extent: tensor,
                            parts: if in_chunks { 1 } else { 1 + self.hash_part() },
                            undecrypted: !in_chunks,
                        },
                    )?;
                }
                SegmentKind::Data { tensor, start } => {
                    let parts = chunk.bytes.len() as u64;
                    let arrival = Arrival { extent: tensor, parts, undecrypted: false };
                    self.add_arrival(&mut contents.arrivals, arrival)?;
                    if !self.decrypt(tensor, start, chunk, control)? {
                        try_push(&mut contents.undecrypted, tensor, PLAN)?;
                        continue;
                    }
                    contents.data_len += parts;
                    if self.request.verify == Verify::Nothing {
                        continue;
                    }
                    let last = contents.single_chunk.last_mut();
                    match last.filter(|single: &&mut SingleChunkTensor| single.tensor == tensor) {
                        Some(single) => single.chunk = Some(number),
                        None => try_push(&mut contents.pooled, (number, tensor, start), PLAN)?,
                    }
                }
            }
        }
        Ok(contents)
    }

    /// Passes a header to the codec. Returns true if the tensor's data can be decrypted in chunks,
    /// and the tensor if it is hashed at once.
    fn header(
        &self,
        tensor: usize,
        raw: &[u8],
        control: &Control<'_>,
    ) -> Result<(bool, Option<SingleChunkTensor>)> {
        let HeaderInfo { covered, in_chunks } = self.request.codec.header(tensor, raw, control)?;
        if !in_chunks {
            if let Some(undecrypted) = self.undecrypted.get(tensor)
                && !undecrypted.swap(true, Ordering::Relaxed)
            {
                self.hashes.skip(tensor);
            }
            return Ok((false, None));
        }
        if self.request.verify == Verify::Nothing {
            return Ok((true, None));
        }
        if self
            .request
            .extents
            .get(tensor)
            .is_some_and(|extent| extent.data_len <= self.max_single_chunk)
        {
            return Ok((true, Some(SingleChunkTensor { tensor, covered, chunk: None })));
        }
        self.hashes.header(tensor, &covered);
        Ok((true, None))
    }

    fn decrypt(
        &self,
        tensor: usize,
        start: u64,
        chunk: SegmentBytes<'_>,
        control: &Control<'_>,
    ) -> Result<bool> {
        if !self.request.decrypts {
            return Ok(true);
        }
        self.counters.time(Stage::Decrypt, || {
            self.request.codec.decrypt(tensor, start, chunk.bytes, control)
        })
    }

    /// Hashes the tensors that are complete in the batch, and passes other data to the hash pool.
    fn verify(
        &self,
        bytes: Vec<T::Bytes>,
        single_chunk: &[SingleChunkTensor],
        pooled: Vec<PooledChunk>,
    ) -> Result<()> {
        let bytes_of = |single: &SingleChunkTensor| single.chunk.and_then(|chunk| bytes.get(chunk));
        let inputs = single_chunk.iter().map(|single| {
            (single.covered.as_slice(), bytes_of(single).map_or(&[][..], T::Bytes::as_ref))
        });
        let digests = digest_all(&try_collect(inputs, PLAN)?, self.request.verify == Verify::All)?;
        for (single, digests) in single_chunk.iter().zip(digests) {
            self.request.codec.compare(single.tensor, &digests)?;
        }
        let mut pooled = pooled.into_iter().peekable();
        for (number, bytes) in bytes.into_iter().enumerate() {
            if let Some((_, tensor, start)) = pooled.next_if(|(chunk, ..)| *chunk == number) {
                self.hashes.data(tensor, start, bytes);
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

    fn hash_batch(&self, batch: Option<codec::HashBatch<T::Bytes>>) -> Result<bool> {
        let Some(batch) = batch else { return Ok(false) };
        let outcome = Mutex::new(Ok(()));
        let hash = || self.hashes.hash(batch, self.comparing(&outcome));
        self.counters.time(Stage::Hash, hash);
        outcome.into_inner().unwrap_or_else(PoisonError::into_inner).map(|()| true)
    }

    fn comparing<'o>(&'o self, outcome: &'o Mutex<Result<()>>) -> impl Fn(usize, Digests) + 'o {
        |tensor, digests| {
            let mut outcome = outcome.lock().unwrap_or_else(PoisonError::into_inner);
            if outcome.is_ok() {
                let compared = self.request.codec.compare(tensor, &digests);
                *outcome = compared.and_then(|()| self.arrived(&[Arrival::of_hash(tensor)], None));
            }
        }
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
        for Segment { kind, len } in &batch.segments {
            let size = usize::try_from(*len).map_err(|_| Error::Bug(format!("{len} bytes")))?;
            match *kind {
                SegmentKind::Gap => {}
                SegmentKind::Header { tensor } => {
                    let mut raw = try_zeroed(size, || "headers of tensors".to_owned())?;
                    let what = || "tensors".to_owned();
                    Buffers::from_slice(&mut raw).with_observer(control, |buffers| {
                        read_exact_at(source, position, buffers, &what, control)
                    })?;
                    self.header(tensor, &raw, control)?;
                    self.add_arrival(
                        &mut arrivals,
                        Arrival { extent: tensor, parts: 1, undecrypted: false },
                    )?;
                }
                SegmentKind::Data { tensor, start } => {
                    let at = (tensor, start);
                    let read = || direct.read(batch.file, at, size, position, control);
                    if !self.counters.time(Stage::Read, read)? {
                        self.counters.fallback(
                            "GPUDirect Storage failed during the load: the rest came by plain \
                             reads",
                        );
                        self.counters.reading("page cache");
                        return Ok(false);
                    }
                    data_len += len;
                    let arrival = Arrival { extent: tensor, parts: *len, undecrypted: false };
                    self.add_arrival(&mut arrivals, arrival)?;
                }
            }
            position += len;
        }
        self.counters.bytes(data_len);
        self.arrived(&arrivals, None)?;
        Ok(true)
    }
}
