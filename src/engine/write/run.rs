//! One save: tensors with their locations in the file are written to a sink, on several threads.

use std::sync::Mutex;
use std::sync::atomic::AtomicU64;

use super::chunk::HashBacklog;
use super::copy_pool::{CopyPool, CopySlots};
use super::feed::Feeder;
use super::save_task::SaveTask;
use super::tensor_data::TensorData;
use super::write_jobs::{BATCH_LEN, UPLOAD_BATCH_LEN, WriteJob, plan_jobs};
use super::write_tensor::WriteTensor;
use crate::cancel::Cancel;
use crate::codec::HashPool;
use crate::codec::crypt::{EncryptionOptions, Manifest, PIECE_LEN};
use crate::codec::encrypt::Encryptor;
use crate::codec::hash::SMALL;
use crate::engine::workers;
use crate::error::Result;
use crate::format::tensors::header::Hashes;
use crate::io::{Reservation, SinkFacts, WriteAt};
use crate::mem::device::{DeviceBytes, StreamsByDevice};
use crate::mem::pinned::{Pool, Share, buffer_len};
use crate::memory_limit::{CONNECTION, MemoryLimit, SaveNeeds, SaveShares};
use crate::stats::{Counters, PAGEABLE};
use crate::sys::sync::unpoisoned;
use crate::sys::to_usize;

/// Saves of fewer bytes are written on the calling thread.
const INLINE_LEN: u64 = 1 << 20;

/// Number of sending threads for each copying thread of an upload. One thread copies and hashes 1
/// to 2 GB/s; one connection sends some 100 MB/s.
const SENDING_FOR_ONE_COPYING: usize = 8;

/// Options of [`write_tensors`].
#[derive(Default)]
pub struct WriteOptions<'o> {
    /// Number of threads that hash and write, if the caller sets it.
    pub threads: Option<usize>,
    /// The hashes to store; None for a format whose tensors have no headers.
    pub hashes: Option<Hashes>,
    /// Encryption of the tensors' data, if they are encrypted.
    pub encryption: Option<&'o EncryptionOptions>,
    /// True if digests of the headers are needed for the file's identity.
    pub needs_digests: bool,
    /// The limit on memory in use besides that of the tensors.
    pub memory: MemoryLimit,
}

/// Writes headers and data of the items to their locations. `progress` grows by the data written.
///
/// Returns a digest of each header, if there is a manifest of all headers or if they identify the
/// file; otherwise zeros.
pub fn write_tensors(
    sink: &dyn WriteAt,
    items: &[WriteTensor<'_>],
    options: &WriteOptions<'_>,
    progress: &AtomicU64,
    cancel: &dyn Cancel,
) -> Result<Vec<[u8; 32]>> {
    items.iter().try_for_each(WriteTensor::check)?;
    let (wanted, shares) = thread_count(sink, items, options)?;
    let sha = options.hashes == Some(Hashes::All);
    let bounded = shares.parts < usize::MAX;
    let share = bounded.then(|| Share::new(to_usize(shares.staging)));
    let SinkFacts { max_positions, part_len, .. } = sink.facts();
    let interleaved = if sha { wanted.min(max_positions) } else { 1 };
    let sends = part_len > 0;
    let batch_len = batch_len(sends, options.encryption.is_some());
    // Batches cut every tensor that is longer.
    let max_small = SMALL.min(batch_len);
    let jobs = plan_jobs(items, interleaved, buffer_len()?, batch_len);
    let total: u64 = items.iter().map(|item| item.entry.data_len).sum();
    let useful = if total < INLINE_LEN { 0 } else { wanted.min(useful_threads(&jobs, sha)) };
    let (threads, copying) =
        if sends { upload_threads(useful, wanted, total / part_len) } else { (useful, useful) };
    let (copies, backlog) =
        (CopyPool::default(), HashBacklog::new(copying, batch_len, shares.waiting));
    let manifest = options.encryption.filter(|options| options.manifest);
    let task = SaveTask {
        sink,
        items,
        encryptors: encryptors(items, options)?,
        manifest: manifest.map(|options| Manifest::new(&options.key)).transpose()?,
        needs_digests: options.needs_digests,
        hashes: options.hashes,
        max_small,
        hash_pool: hash_pool(items, max_small, options.hashes),
        backlog: &backlog,
        sends,
        digests: Mutex::new(vec![[0; 32]; items.len()]),
        progress,
        counters: Counters::default(),
    };
    let streams = StreamsByDevice::open(on_devices(items))?;
    let copy_slots = sends.then(|| CopySlots::new(copying));
    let (copy_slots, share) = (copy_slots.as_ref(), share.as_ref());
    let feeder = Feeder { task: &task, copies: &copies, copy_slots, streams: &streams, share };
    let queue = Mutex::new(jobs.into_iter());
    workers::run(threads, cancel, |control| {
        while !control.stopped() {
            task.hash_backlog(control)?;
            let job = unpoisoned(queue.lock()).next();
            match job {
                Some(job) => feeder.feed(job, control)?,
                None if task.hash(&|| false, control)? => {}
                None => break,
            }
        }
        Ok(())
    })
    .map_err(|error| error.with_file("saving", sink.uri()))?;
    report(&task, &streams, threads);
    Ok(std::mem::take(&mut *unpoisoned(task.digests.lock())))
}

/// The length of a batch. An upload copies it into a part, encrypted in whole pieces.
fn batch_len(sends: bool, encrypts: bool) -> u64 {
    match (sends, encrypts) {
        (false, _) => BATCH_LEN,
        (true, false) => UPLOAD_BATCH_LEN,
        (true, true) => PIECE_LEN,
    }
}

/// Returns the maximum number of threads, and their shares of the memory limit.
fn thread_count(
    sink: &dyn WriteAt,
    items: &[WriteTensor<'_>],
    options: &WriteOptions<'_>,
) -> Result<(usize, SaveShares)> {
    let SinkFacts { max_writers, default_writers, .. } = sink.facts();
    let wanted = options.threads.unwrap_or(default_writers).clamp(1, max_writers.max(1));
    let shares = shares(sink, items, options, wanted)?;
    let SinkFacts { max_writers, max_positions, .. } = sink.facts();
    let mut wanted = shares.threads.min(max_writers.max(1));
    // Such a tensor is written front to back by one thread, and the sink accepts a limited number
    // of such sequences at a time.
    if items.iter().any(|item| matches!(item.data, TensorData::Deferred(_) | TensorData::Device(_)))
    {
        wanted = wanted.min(max_positions.max(1));
    }
    Ok((wanted, shares))
}

/// Returns the shares of the memory limit for at most `wanted` threads, and limits the parts that
/// the sink keeps.
fn shares(
    sink: &dyn WriteAt,
    items: &[WriteTensor<'_>],
    options: &WriteOptions<'_>,
    wanted: usize,
) -> Result<SaveShares> {
    let memory = options.memory.or_environment()?;
    let SinkFacts { retained, part_len: part, .. } = sink.facts();
    let deferred_len = items.iter().filter(|item| matches!(item.data, TensorData::Deferred(_)));
    let deferred_len = deferred_len.map(|item| item.entry.data_len).max().unwrap_or(0);
    let in_memory = items.iter().any(|item| matches!(item.data, TensorData::Bytes(_)));
    let copies = in_memory && options.hashes.is_some();
    let pool = on_devices(items).next().map(|bytes| Pool::of(&bytes.device)).transpose()?;
    let shares = memory.save(&SaveNeeds {
        threads: wanted,
        thread_bytes: deferred_len.saturating_add(if part > 0 { CONNECTION } else { 0 }),
        copies: u64::from(copies) + u64::from(options.encryption.is_some()),
        hashes: options.hashes == Some(Hashes::All),
        retained,
        part,
        staging: pool.map(|pool| (pool.buffer_len() as u64, pool.limit() as u64)),
    })?;
    if memory.bytes().is_some() {
        sink.reserve(&Reservation { parts: Some(shares.parts), ..Reservation::default() })?;
    }
    Ok(shares)
}

/// Returns the encryption of each tensor, if there is one.
fn encryptors<'o>(
    items: &[WriteTensor<'_>],
    options: &WriteOptions<'o>,
) -> Result<Vec<Option<Encryptor<'o>>>> {
    let encryptor = |item: &WriteTensor<'_>| {
        options.encryption.map(|options| Encryptor::new(item.entry.data_len, options)).transpose()
    };
    items.iter().map(encryptor).collect::<Result<Vec<_>>>()
}

/// Returns the hash pool of the tensors that are written in several chunks; without headers it has
/// none.
fn hash_pool<B: AsRef<[u8]>>(
    items: &[WriteTensor<'_>],
    max_small: u64,
    hashes: Option<Hashes>,
) -> HashPool<B> {
    let large = |item: &WriteTensor<'_>| {
        Some(item.entry.data_len).filter(|len| hashes.is_some() && *len > max_small)
    };
    HashPool::new(items.iter().map(large), hashes == Some(Hashes::All))
}

/// Returns the number of threads that have something to do. Each job needs one thread; with
/// SHA-256, another can hash the bytes of a job that is a single tensor.
fn useful_threads(jobs: &[WriteJob], sha: bool) -> usize {
    let alone = |job: &&WriteJob| sha && matches!(job, WriteJob::Deferred(_) | WriteJob::Device(_));
    jobs.len() + jobs.iter().filter(alone).count()
}

/// Returns the bytes that are on devices.
fn on_devices<'i>(items: &'i [WriteTensor<'_>]) -> impl Iterator<Item = &'i DeviceBytes> {
    items.iter().filter_map(|item| match &item.data {
        TensorData::Device(bytes) => Some(bytes),
        _ => None,
    })
}

/// Returns the number of threads of an upload of `parts` parts, and how many of them may copy at
/// once. Further threads would have no part to send and no permission to copy.
fn upload_threads(useful: usize, wanted: usize, parts: u64) -> (usize, usize) {
    let copying = wanted.div_ceil(SENDING_FOR_ONE_COPYING);
    let parts = to_usize(parts);
    (useful.min(parts.saturating_add(copying)), copying)
}

/// Publishes the counters of the save.
fn report(task: &SaveTask<'_>, streams: &StreamsByDevice, threads: usize) {
    let devices = streams.names();
    let device = if devices.is_empty() { "cpu" } else { &devices };
    if !devices.is_empty() && Pool::all().into_iter().any(Pool::is_pageable) {
        task.counters.fallback(PAGEABLE);
    }
    task.counters.threads(threads, threads);
    task.counters.bytes(task.items.iter().map(|item| item.entry.data_len).sum());
    task.counters.publish("save", task.sink.uri(), device, task.items.len());
}
