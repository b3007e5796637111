//! The read engine: sources → batches in memory of a target → decryption and hashes → the target.
//!
//! Each reader takes a batch from the work queue and memory for it from the target, reads it with one
//! request, hands headers to the codec, decrypts and hashes data where they lie, and gives the
//! memory back to the target.

use std::sync::PoisonError;
use std::sync::atomic::{AtomicBool, AtomicUsize, Ordering};
use std::time::Instant;

use super::crew;
use super::order::{Job, LARGE, jobs, only_tensor};
use super::plan::{Batch, Extent, PLAN, Segment, SegmentKind, WorkQueue, partition};
use super::target::direct::Direct;
use super::target::{Chunk, Lease, Target};
use super::way::Way;
use super::workers::{self, Control};
use crate::cancel::Cancel;
use crate::codec::crypt::PIECE_LEN;
use crate::codec::hash::{self, Digests, Verify, digest_all};
use crate::codec::{HashPool, Taken};
use crate::error::{Error, Result};
use crate::fallible::{listed, push, zeroed};
use crate::io::{Capabilities, ReadAt, read_exact_at};
use crate::mem::Buffers;
use crate::memory_limit::MemoryLimit;
use crate::stats::{Counters, Stage};
use crate::sys::sync::Mutex;

/// Less than this is read on the calling thread.
const INLINE_LEN: u64 = 1 << 20;
/// When hashes are verified, a step of reading: a part of the second-level cache of a core.
const STEP: u64 = 512 << 10;

/// What the engine asks of whoever knows the format. Tensors are numbered as their extents are.
pub trait Codec: Sync {
    /// Takes a tensor's header, which it checks.
    fn header(&self, tensor: usize, raw: &[u8], cancel: &dyn Cancel) -> Result<Begun>;

    /// Decrypts data from `start` on where they lie. False if that is not possible in chunks.
    fn decrypt(
        &self,
        tensor: usize,
        start: u64,
        bytes: &mut [u8],
        cancel: &dyn Cancel,
    ) -> Result<bool>;

    /// Compares the hashes of a tensor.
    fn compare(&self, tensor: usize, digests: &Digests) -> Result<()>;
}

/// What a header tells the engine.
pub struct Begun {
    /// The bytes of it that hashes cover, if they are to be verified.
    pub covered: Vec<u8>,
    /// Whether the tensor's data can be decrypted in chunks, or need not be.
    pub in_chunks: bool,
}

/// What is to be read, and how.
pub struct Reading<'r> {
    /// Where the bytes come from.
    pub files: &'r [&'r dyn ReadAt],
    /// The data of each tensor, in rising order of files and positions.
    pub extents: &'r [Extent],
    /// Who knows what they mean.
    pub codec: &'r dyn Codec,
    /// Which hashes are verified.
    pub verify: Verify,
    /// Whether data are decrypted.
    pub decrypts: bool,
    /// Readers at once, if the caller wants so many.
    pub readers: Option<usize>,
    /// What they may have in flight beside the memory of the tensors.
    pub memory: MemoryLimit,
}

/// Reads everything to its target. Gives the tensors whose data could not be decrypted in chunks, and
/// were neither decrypted nor verified.
pub fn read<T: Target>(
    what: &Reading<'_>,
    target: &mut T,
    counters: &Counters,
    cancel: &dyn Cancel,
) -> Result<Vec<usize>> {
    let begun = Instant::now();
    let memory = crew::limit(what.memory, what.files)?;
    let Some(traits) = Capabilities::of_all(what.files) else { return Ok(Vec::new()) };
    let local = what.files.iter().all(|source| source.file().is_some());
    let crew = crew::crew(&traits, what.files, what.extents, what.readers)?;
    let (crew, passing) = crew::share(memory, crew, &traits, what.decrypts, target)?;
    let total = total(what)?;
    let mut limits = target.limits(&traits, crew, total, what.decrypts);
    limits.passing = passing;
    let step = if target.takes_steps() { step(what, &traits) } else { u64::MAX };
    // Tensors that come in one chunk are hashed at once.
    let whole = hash::SMALL.min(limits.len).min(target.unit());
    let sha = what.verify == Verify::All;
    let room = target.room(&traits, crew).filter(|_| sha);
    if room.is_some() {
        limits.apart = LARGE;
    }
    // Where bytes stay for their hash without being waited for, neither by others who need the memory
    // nor for the header to decrypt them, which may come later then.
    let large_first = sha && traits.max_readers > 1 && !what.decrypts && target.takes_steps();
    let jobs =
        jobs(what.extents, partition(what.extents, &limits)?, target, (step, whole), large_first)?;
    // Many answers that are waited for take longer than their bytes, however few.
    let inline = total < INLINE_LEN && !traits.has_long_requests();
    let crew = crew.at_most(if inline { 1 } else { jobs.len() });
    // What is hashed or decrypted in an order of its own, or can only be read in order, is taken in
    // turns.
    let own = local && !sha && !what.decrypts && crew.most > 1;
    let pass = Pass {
        what,
        target: &*target,
        counters,
        whole,
        room,
        hashes: pool(what, whole)?,
        left: listed(what.extents.iter().map(|_| AtomicBool::new(false)), PLAN)?,
        queue: WorkQueue::new(jobs, if own { crew.first } else { 1 })?,
        turn: Mutex::new(()),
    };
    let started = AtomicUsize::new(1);
    let target = pass.target;
    counters.since(Stage::Plan, begun);
    workers::run_adapting(crew, cancel, |control, number| {
        started.fetch_max(number + 1, Ordering::Relaxed);
        let way = Way::new(target, what.files, crew.most > 1);
        pass.work(number, way, control)
    })?;
    counters.threads(started.into_inner().min(crew.most), crew.most);
    let left = pass.left.iter().enumerate().filter(|(_, left)| left.load(Ordering::Relaxed));
    Ok(left.map(|(tensor, _)| tensor).collect())
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

/// Bytes that are read at a time.
fn step(what: &Reading<'_>, source: &Capabilities) -> u64 {
    match (what.decrypts, what.verify) {
        // Long requests are not cut: each one waits for its answer.
        _ if source.has_long_requests() => u64::MAX,
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

/// What the readers of one call share.
struct Pass<'r, T: Target> {
    what: &'r Reading<'r>,
    target: &'r T,
    counters: &'r Counters,
    /// Tensors of this size or less come in one chunk.
    whole: u64,
    /// See [`Target::room`].
    room: Option<u64>,
    hashes: HashPool<T::Bytes>,
    /// Tensors whose data could not be decrypted in chunks.
    left: Vec<AtomicBool>,
    queue: WorkQueue<Job<T>>,
    turn: Mutex<()>,
}

/// A tensor that is hashed at once: its number, its header's covered bytes, and its chunk.
struct Whole {
    tensor: usize,
    covered: Vec<u8>,
    chunk: Option<usize>,
}

/// Data that go to the hash pool: their chunk, their tensor, and their position.
type Pooled = (usize, usize, u64);

impl<T: Target> Pass<'_, T> {
    /// What one reader does, with its way to the files.
    fn work(&self, number: usize, mut way: Way<'_, T>, control: &Control<'_>) -> Result<()> {
        while !control.stopped() && !control.surplus() {
            if self.hash(true, control)? {
                continue;
            }
            let next = {
                // Who has the earlier batch is the first to get memory, so that nobody holds memory
                // who waits for somebody without.
                let _turn = self.turn.lock().unwrap_or_else(PoisonError::into_inner);
                let mut known = None;
                let next = self.queue.next(number, |job| self.is_crowded(job, &mut known));
                next.map(|job| (job, self.target.enter()))
            };
            match next {
                Some((job, turn)) => self.job(job, turn, &mut way, control)?,
                None if self.hash(false, control)? => {}
                None => break,
            }
        }
        Ok(())
    }

    /// Whether a job is of a large tensor of which so much waits for its hash that others had better
    /// be read. Such a tensor shares no job with others, and its jobs stay in order, so that nothing
    /// that is in memory ever waits for a job in the queue. `known` is the last answer, as neighbours
    /// have the same.
    fn is_crowded(&self, job: &Job<T>, known: &mut Option<(usize, bool)>) -> bool {
        let Some(room) = self.room else { return false };
        let large = |tensor: &usize| {
            self.what.extents.get(*tensor).is_some_and(|extent| extent.data_len >= LARGE)
        };
        let Some(tensor) = only_tensor(job).filter(large) else { return false };
        let (_, crowded) = match *known {
            Some(known) if known.0 == tensor => known,
            _ => *known.insert((tensor, self.hashes.waiting(tensor) >= room)),
        };
        crowded
    }

    fn job<'t>(
        &'t self,
        job: Job<T>,
        turn: T::Turn<'t>,
        way: &mut Way<'_, T>,
        control: &Control<'_>,
    ) -> Result<()> {
        let mut turn = Some(turn);
        for (batch, planned) in job {
            let source = way.to(batch.file)?;
            let direct = self.target.direct().filter(|direct| direct.is_of_use());
            if let Some(direct) = direct {
                // No staging buffers are needed, and nobody is to wait behind this place in their queue.
                turn = None;
                if self.by_device(&batch, source, direct, control)? {
                    continue;
                }
            }
            let turn = turn.take().unwrap_or_else(|| self.target.enter());
            self.batch(batch, planned, turn, source, control)?;
        }
        Ok(())
    }

    fn batch<'t>(
        &'t self,
        batch: Batch,
        planned: T::Job,
        turn: T::Turn<'t>,
        source: &dyn ReadAt,
        control: &Control<'_>,
    ) -> Result<()> {
        let offset = batch.offset;
        let idle = || self.hash_now();
        let mut lease = self
            .counters
            .time(Stage::Memory, || self.target.acquire(turn, batch, planned, &idle, control))?;
        let what = || "tensors".to_owned();
        self.counters.time(Stage::Read, || {
            lease.fill(&|from, buffers| {
                let at = offset.saturating_add(from);
                buffers.observed(control, |b| read_exact_at(source, at, b, &what, control))
            })
        })?;
        let mut wholes = Vec::new();
        let mut pooled = Vec::new();
        let mut sealed = Vec::new();
        let mut data_len = 0;
        for (number, chunk) in lease.chunks()?.into_iter().enumerate() {
            match chunk.kind {
                SegmentKind::Gap => {}
                SegmentKind::Header { tensor } => {
                    if let Some(whole) = self.header(tensor, chunk.bytes, control)? {
                        push(&mut wholes, whole, PLAN)?;
                    }
                }
                SegmentKind::Data { tensor, start } => {
                    let len = chunk.bytes.len() as u64;
                    if !self.decrypt(tensor, start, chunk, control)? {
                        push(&mut sealed, tensor, PLAN)?;
                        continue;
                    }
                    data_len += len;
                    if self.what.verify == Verify::Nothing {
                        continue;
                    }
                    match wholes.last_mut().filter(|whole: &&mut Whole| whole.tensor == tensor) {
                        Some(whole) => whole.chunk = Some(number),
                        None => push(&mut pooled, (number, tensor, start), PLAN)?,
                    }
                }
            }
        }
        self.counters.bytes(data_len);
        sealed.into_iter().for_each(|tensor| self.target.withhold(&mut lease, tensor));
        let keep = !wholes.is_empty() || !pooled.is_empty();
        let bytes = self.counters.time(Stage::Copy, || self.target.commit(lease, keep))?;
        if !keep {
            return Ok(());
        }
        self.counters.time(Stage::Hash, || self.verify(bytes, &wholes, pooled))
    }

    /// Takes a header; gives the tensor if it is hashed at once.
    fn header(&self, tensor: usize, raw: &[u8], control: &Control<'_>) -> Result<Option<Whole>> {
        let Begun { covered, in_chunks } = self.what.codec.header(tensor, raw, control)?;
        if !in_chunks {
            if let Some(left) = self.left.get(tensor)
                && !left.swap(true, Ordering::Relaxed)
            {
                self.hashes.skip(tensor);
            }
            return Ok(None);
        }
        if self.what.verify == Verify::Nothing {
            return Ok(None);
        }
        if self.what.extents.get(tensor).is_some_and(|extent| extent.data_len <= self.whole) {
            return Ok(Some(Whole { tensor, covered, chunk: None }));
        }
        self.hashes.header(tensor, &covered);
        Ok(None)
    }

    fn decrypt(
        &self,
        tensor: usize,
        start: u64,
        chunk: Chunk<'_>,
        control: &Control<'_>,
    ) -> Result<bool> {
        if !self.what.decrypts {
            return Ok(true);
        }
        self.counters
            .time(Stage::Decrypt, || self.what.codec.decrypt(tensor, start, chunk.bytes, control))
    }

    /// Hashes the bytes of a batch, or leaves them to the pool.
    fn verify(&self, bytes: Vec<T::Bytes>, wholes: &[Whole], pooled: Vec<Pooled>) -> Result<()> {
        let of = |whole: &Whole| whole.chunk.and_then(|chunk| bytes.get(chunk));
        let inputs = wholes
            .iter()
            .map(|whole| (whole.covered.as_slice(), of(whole).map_or(&[][..], T::Bytes::as_ref)));
        let digests = digest_all(&listed(inputs, PLAN)?, self.what.verify == Verify::All)?;
        for (whole, digests) in wholes.iter().zip(digests) {
            self.what.codec.compare(whole.tensor, &digests)?;
        }
        let mut pooled = pooled.into_iter().peekable();
        for (number, bytes) in bytes.into_iter().enumerate() {
            if let Some((_, tensor, start)) = pooled.next_if(|(chunk, ..)| *chunk == number) {
                self.hashes.data(tensor, start, bytes);
            }
        }
        Ok(())
    }

    /// Hashes something; false if there is nothing to do, or not enough while more is to be read.
    fn hash(&self, more_to_read: bool, control: &Control<'_>) -> Result<bool> {
        self.hash_taken(self.hashes.take(|| more_to_read, || control.stopped()))
    }

    /// Hashes what is there, and does not wait.
    fn hash_now(&self) -> Result<bool> {
        self.hash_taken(self.hashes.take_ready())
    }

    fn hash_taken(&self, taken: Option<Taken<T::Bytes>>) -> Result<bool> {
        let Some(taken) = taken else { return Ok(false) };
        let outcome = Mutex::new(Ok(()));
        let hash = || self.hashes.hash(taken, self.comparing(&outcome));
        self.counters.time(Stage::Hash, hash);
        outcome.into_inner().unwrap_or_else(PoisonError::into_inner).map(|()| true)
    }

    fn comparing<'o>(&'o self, outcome: &'o Mutex<Result<()>>) -> impl Fn(usize, Digests) + 'o {
        |tensor, digests| {
            let mut outcome = outcome.lock().unwrap_or_else(PoisonError::into_inner);
            if outcome.is_ok() {
                *outcome = self.what.codec.compare(tensor, &digests);
            }
        }
    }

    /// Has the device read the data of a batch; headers are read as ever. False if it does not.
    fn by_device(
        &self,
        batch: &Batch,
        source: &dyn ReadAt,
        direct: &Direct<'_>,
        control: &Control<'_>,
    ) -> Result<bool> {
        let (mut position, mut data_len) = (batch.offset, 0);
        for Segment { kind, len } in &batch.segments {
            let size = usize::try_from(*len).map_err(|_| Error::Bug(format!("{len} bytes")))?;
            match *kind {
                SegmentKind::Gap => {}
                SegmentKind::Header { tensor } => {
                    let mut raw = zeroed(size, || "headers of tensors".to_owned())?;
                    let what = || "tensors".to_owned();
                    Buffers::of(&mut raw).observed(control, |buffers| {
                        read_exact_at(source, position, buffers, &what, control)
                    })?;
                    self.header(tensor, &raw, control)?;
                }
                SegmentKind::Data { tensor, start } => {
                    let read = || direct.read(batch.file, tensor, start, size, position);
                    if !self.counters.time(Stage::Read, read)? {
                        self.counters
                            .fallback("GPUDirect Storage failed in the middle: plain reads since");
                        self.counters.reading("page cache");
                        return Ok(false);
                    }
                    data_len += len;
                }
            }
            position += len;
        }
        self.counters.bytes(data_len);
        Ok(true)
    }
}
