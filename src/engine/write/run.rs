//! One call: tensors with their places in the file go to a sink, on several threads.

use std::sync::atomic::AtomicU64;
use std::sync::{Mutex, PoisonError};

use super::chunk::Backlog;
use super::copies::{Copies, CopyTurns};
use super::feed::Feeder;
use super::item::Item;
use super::jobs::{BATCH_LEN, Job, UPLOAD_BATCH_LEN, jobs};
use super::origin::Origin;
use super::pass::Pass;
use crate::cancel::Cancel;
use crate::codec::HashPool;
use crate::codec::crypt::{EncryptionOptions, Manifest, PIECE_LEN};
use crate::codec::encrypt::Seal;
use crate::engine::workers;
use crate::error::Result;
use crate::fallible::{collected, repeated};
use crate::format::tensors::header::Hashes;
use crate::io::WriteAt;
use crate::mem::device::StreamsByDevice;
use crate::mem::pinned::{Pool, Share, buffer_len};
use crate::memory_limit::{CONNECTION, MemoryLimit, SaveNeeds, SaveShares};
use crate::stats::{Counters, PAGEABLE};

/// Less than this is written on the calling thread.
const INLINE_LEN: u64 = 1 << 20;

/// Threads that send for each one that copies what is uploaded: it copies and hashes 1 to 2 GB/s, and a
/// connection sends some 100 MB/s.
const SENDING_FOR_ONE_COPYING: usize = 8;

/// How to write.
pub struct WriteOptions<'o> {
    /// Threads that hash and write at once.
    pub threads: Option<usize>,
    /// Which hashes to store; None for a format whose tensors have no headers.
    pub hashes: Option<Hashes>,
    /// Encrypt the tensors' data.
    pub encryption: Option<&'o EncryptionOptions>,
    /// Whether the headers together are to name the file.
    pub named: bool,
    /// What they may have in flight beside the tensors.
    pub memory: MemoryLimit,
}

/// Writes headers and data of the items to their places. Gives what stands for each header where
/// all of them together are to be sealed or named. `progress` grows by the data written.
pub fn write_tensors(
    sink: &dyn WriteAt,
    items: &[Item<'_>],
    options: &WriteOptions<'_>,
    progress: &AtomicU64,
    cancel: &dyn Cancel,
) -> Result<Vec<[u8; 32]>> {
    items.iter().try_for_each(Item::check)?;
    let (wanted, shares) = wanted(sink, items, options)?;
    let sha = options.hashes == Some(Hashes::All);
    let bounded = shares.parts < u64::MAX;
    let share = bounded.then(|| Share::new(usize::try_from(shares.staging).unwrap_or(usize::MAX)));
    let in_turns = if sha { wanted.min(sink.places()) } else { 1 };
    let part_len = sink.kept().1;
    let sends = part_len > 0;
    let batch_len = match options.encryption {
        None if sends => UPLOAD_BATCH_LEN,
        Some(_) if sends => PIECE_LEN,
        _ => BATCH_LEN,
    };
    let jobs = jobs(items, in_turns, buffer_len()?, batch_len)?;
    let total: u64 = items.iter().map(|item| item.entry.data_len).sum();
    let useful = if total < INLINE_LEN { 0 } else { wanted.min(useful_threads(&jobs, sha)) };
    let (threads, copying) =
        if sends { of_upload(useful, wanted, total / part_len) } else { (useful, useful) };
    let (copies, backlog) = (Copies::default(), Backlog::new(copying, batch_len, shares.waiting));
    let manifest = options.encryption.filter(|options| options.manifest);
    let pass = Pass {
        sink,
        items,
        seals: seals(items, options)?,
        manifest: manifest.map(|options| Manifest::new(&options.key)).transpose()?,
        named: options.named,
        hashes: options.hashes,
        pool: pool(items, options.hashes)?,
        backlog: &backlog,
        sends,
        digests: Mutex::new(repeated([0; 32], items.len(), "digests of headers")?),
        progress,
        counters: Counters::default(),
    };
    let streams = streams_of(items)?;
    let turns = sends.then(|| CopyTurns::new(copying));
    let (turns, share) = (turns.as_ref(), share.as_ref());
    let feeder = Feeder { pass: &pass, copies: &copies, turns, streams: &streams, share };
    let queue = Mutex::new(jobs.into_iter());
    workers::run(threads, cancel, |control| {
        while !control.stopped() {
            pass.hash_backlog(control)?;
            let job = queue.lock().unwrap_or_else(PoisonError::into_inner).next();
            match job {
                Some(job) => feeder.feed(job, control)?,
                None if pass.hash(&|| false, control)? => {}
                None => break,
            }
        }
        Ok(())
    })
    .map_err(|error| error.with_file("saving", sink.uri()))?;
    report(&pass, &streams, threads);
    Ok(std::mem::take(&mut pass.digests.lock().unwrap_or_else(PoisonError::into_inner)))
}

/// The most threads of a call, and their shares of memory.
fn wanted(
    sink: &dyn WriteAt,
    items: &[Item<'_>],
    options: &WriteOptions<'_>,
) -> Result<(usize, SaveShares)> {
    let most = sink.max_writers().max(1);
    let wanted = options.threads.unwrap_or_else(|| sink.default_writers()).clamp(1, most);
    let shares = shares(sink, items, options, wanted)?;
    let mut wanted = shares.threads.min(sink.max_writers().max(1));
    // Such a tensor is written by one thread from its beginning to its end, in a place of its own.
    if items.iter().any(|item| matches!(item.origin, Origin::Deferred(_) | Origin::Device(_))) {
        wanted = wanted.min(sink.places().max(1));
    }
    Ok((wanted, shares))
}

/// What the threads of a call may take, of which at most so many are wanted. Tells the sink.
fn shares(
    sink: &dyn WriteAt,
    items: &[Item<'_>],
    options: &WriteOptions<'_>,
    wanted: usize,
) -> Result<SaveShares> {
    let memory = options.memory.known()?;
    let (kept, part) = sink.kept();
    let brought = items.iter().filter(|item| matches!(item.origin, Origin::Deferred(_)));
    let brought = brought.map(|item| item.entry.data_len).max().unwrap_or(0);
    let copies = items.iter().any(|item| matches!(item.origin, Origin::Bytes(_)));
    let mut device = items.iter().filter_map(|item| match &item.origin {
        Origin::Device(bytes) => Some(Pool::of(&bytes.device)),
        _ => None,
    });
    let staging = device.next().transpose()?.map(|pool| (pool.buffer_len(), pool.limit()));
    let shares = memory.save(&SaveNeeds {
        threads: wanted,
        thread: brought.saturating_add(if part > 0 { CONNECTION } else { 0 }),
        copies: u64::from(copies) + u64::from(options.encryption.is_some()),
        hashes: options.hashes == Some(Hashes::All),
        kept,
        part,
        staging: staging.map(|(len, most)| (len as u64, most as u64)),
    })?;
    if memory.bytes().is_some() {
        sink.limit_parts(shares.parts);
    }
    Ok(shares)
}

/// How each tensor is encrypted.
fn seals<'o>(items: &[Item<'_>], options: &WriteOptions<'o>) -> Result<Vec<Option<Seal<'o>>>> {
    let seal = |item: &Item<'_>| {
        options.encryption.map(|options| Seal::new(item.entry.data_len, options)).transpose()
    };
    collected(items.iter().map(seal), "tags of encrypted pieces")
}

/// The hashes of tensors that are written in several chunks; none without headers.
fn pool<B: AsRef<[u8]>>(items: &[Item<'_>], hashes: Option<Hashes>) -> Result<HashPool<B>> {
    let large =
        |item: &Item<'_>| (hashes.is_some() && item.is_large()).then_some(item.entry.data_len);
    HashPool::new(items.iter().map(large), hashes == Some(Hashes::All))
}

/// One thread feeds a job, another can hash what it feeds.
fn useful_threads(jobs: &[Job], sha: bool) -> usize {
    let alone = |job: &&Job| sha && matches!(job, Job::Deferred(_) | Job::Device(_));
    jobs.len() + jobs.iter().filter(alone).count()
}

fn streams_of(items: &[Item<'_>]) -> Result<StreamsByDevice> {
    StreamsByDevice::open(items.iter().filter_map(|item| match &item.origin {
        Origin::Device(bytes) => Some(bytes),
        _ => None,
    }))
}

/// The threads of an upload of so many parts, and those of them that copy at once. More would neither have
/// a part to send nor copy.
fn of_upload(useful: usize, wanted: usize, parts: u64) -> (usize, usize) {
    let copying = wanted.div_ceil(SENDING_FOR_ONE_COPYING);
    let parts = usize::try_from(parts).unwrap_or(usize::MAX);
    (useful.min(parts.saturating_add(copying)), copying)
}

/// Publishes what was counted.
fn report(pass: &Pass<'_>, streams: &StreamsByDevice, threads: usize) {
    let devices = streams.names();
    let device = if devices.is_empty() { "cpu" } else { &devices };
    if !devices.is_empty() && Pool::all().into_iter().any(Pool::is_pageable) {
        pass.counters.fallback(PAGEABLE);
    }
    pass.counters.threads(threads, threads);
    pass.counters.bytes(pass.items.iter().map(|item| item.entry.data_len).sum());
    pass.counters.publish("save", pass.sink.uri(), device, pass.items.len());
}
