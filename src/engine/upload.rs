//! The read path to a device: source → plan → staging memory → transform → device.
//!
//! Each reader leases staging memory, reads a part of the file into it so that what is adjacent on
//! the device is adjacent there, decrypts and hashes it where it is, begins the copies, and goes
//! on with other memory. The copies of one part run while others are read. Nothing waits for the
//! device unless all staging memory is in use; in the end the consumer's stream is told to.

mod cold;
mod host;
mod reader;
mod storage;

use std::collections::BTreeMap;
use std::sync::atomic::{AtomicBool, AtomicUsize, Ordering};
use std::sync::{Arc, Condvar, Mutex, OnceLock, PoisonError};
use std::time::Duration;

pub use host::copy;
use reader::Reader;

use crate::api::file::TensorFile;
use crate::api::load::{LoadOptions, Verify, check_selection};
use crate::cancel::Cancel;
use crate::codec::KeptHeader;
use crate::codec::crypt::{Key, PIECE_LEN, Pieces};
use crate::codec::hash::{Digests, SMALL};
use crate::engine::fill::check_key;
use crate::engine::plan::{Batch, Extent, SegmentKind, Shares, Target, partition};
use crate::engine::workers::{self, Control};
use crate::error::{Error, Result};
use crate::format::index::Entry;
use crate::io::source::ReadAt;
use crate::mem::device::{Consumer, Device, DeviceMemory, Streams};
use crate::mem::pinned::Pool;
use crate::stats::Counters;

/// How long a reader waits for another's header before it looks whether the call was given up.
const IDLE: Duration = Duration::from_millis(20);

/// Where a load's data go.
pub struct Destination<'a> {
    /// The device.
    pub device: &'a Arc<dyn Device>,
    /// Who uses its memory before and after.
    pub consumer: Consumer,
    /// Its memory.
    pub blocks: &'a [DeviceMemory],
    /// The place of each tensor.
    pub targets: &'a [Target],
    /// Whether to have the device read local files by itself, if it can.
    pub direct_storage: bool,
}

/// Loads tensors, given by number, to their places on a device. Copies may still be under way when
/// it returns; the consumer's stream waits for them. Tensors without data are left alone.
///
/// None if the file is encrypted in pieces that staging memory cannot hold: then it has to be
/// decrypted in host memory, and go from there with [`copy`].
pub fn upload(
    file: &TensorFile,
    selection: &[usize],
    to: &Destination<'_>,
    pool: &Pool,
    options: &LoadOptions,
    counters: &Counters,
    cancel: &dyn Cancel,
) -> Result<Option<Uploaded>> {
    check_selection(file, selection)?;
    if selection.len() != to.targets.len() {
        return Err(Error::Bug(format!("{} targets", to.targets.len())));
    }
    let entries = selection.iter().map(|&number| file.entry(number)).collect::<Result<Vec<_>>>()?;
    let source = file.source();
    let traits = source.traits();
    if file.decryption().is_some() && traits.len.is_none() {
        // It can be read only once, so that nothing may turn out to be impossible later.
        return Ok(None);
    }
    check_key(file, &*source, &entries, cancel)?;
    let streams = Streams::open(to.device, to.consumer)?;
    let mut order: Vec<usize> = (0..entries.len()).collect();
    order.sort_by_key(|&tensor| entries.get(tensor).map(|entry| entry.header_offset));
    let pass = Pass {
        file,
        to,
        pool,
        counters,
        verify: options.verify,
        in_order: traits.max_readers == 1 || options.verify == Verify::All,
        lanes: entries.iter().map(|_| Lane::default()).collect(),
        entries,
        order,
        header_came: (Mutex::new(()), Condvar::new()),
        unsuitable: AtomicBool::new(false),
    };
    let readers = options.readers.unwrap_or(traits.default_readers).clamp(1, traits.max_readers);
    let runs = pass.runs(&*source, readers)?;
    let total: u64 = pass.entries.iter().map(|entry| entry.data_len).sum();
    // A quarter of a unit is read on the calling thread.
    let inline = pool.unit_len() as u64 / 4;
    let threads = if total < inline { 0 } else { readers.min(runs.len()) };
    counters.threads(threads.max(1));
    // Neighbouring parts for each reader of a file, unless one has to wait for another's header.
    let own = source.file().is_some() && !pass.in_order && file.decryption().is_none();
    let runs = Shares::new(runs, if own { threads } else { 1 });
    let turn = Mutex::new(());
    let numbers = AtomicUsize::new(0);
    let direct = cold::wants_direct_reads(&*source, &pass.entries)?;
    counters.reading(if source.file().is_some() { "page cache" } else { "" });
    let by_device = storage::open(&pass, &*source, &streams, cancel)?;
    let outcome = workers::run(threads, cancel, |control| {
        let number = numbers.fetch_add(1, Ordering::Relaxed);
        let stream = streams.next();
        let handle = if direct { cold::around_the_cache(&*source, counters) } else { None };
        let handle = handle.or_else(|| source.for_one_reader());
        let source = handle.as_deref().unwrap_or(&*source);
        let mut reader = Reader::new(&pass, source, stream, control);
        let by_device = by_device.as_deref();
        while !control.stopped() {
            let next = {
                // Who has the earlier part is the first to get memory, so that nobody holds memory
                // who waits for somebody without.
                let _turn = turn.lock().unwrap_or_else(PoisonError::into_inner);
                runs.next(number).map(|run| (run, pool.enter()))
            };
            let Some((run, ticket)) = next else { break };
            reader.run(run, ticket, by_device)?;
        }
        Ok(())
    });
    match outcome {
        // Only the marker of what cannot go on this way; what else went wrong is told.
        Err(Error::Bug(_)) if pass.unsuitable.load(Ordering::Relaxed) => return Ok(None),
        outcome => outcome?,
    }
    streams.hand_over()?;
    Ok(Some(Uploaded { headers: pass.headers()? }))
}

/// What is known after a load to a device.
pub struct Uploaded {
    /// The header of each tensor.
    pub headers: Vec<KeptHeader>,
}

/// Parts that one reader reads one after another.
struct Run {
    parts: Vec<Batch>,
}

/// What is known of one tensor.
#[derive(Default)]
struct Lane {
    header: OnceLock<KeptHeader>,
    /// How it is decrypted.
    how: OnceLock<Option<(Pieces, Key)>>,
    crc: Mutex<Crc>,
}

/// The CRC-32 of a tensor whose pieces come in any order.
#[derive(Default)]
struct Crc {
    header: Option<crc32fast::Hasher>,
    segments: BTreeMap<u64, crc32fast::Hasher>,
    /// Bytes of data that came.
    done: u64,
}

struct Pass<'p> {
    file: &'p TensorFile,
    to: &'p Destination<'p>,
    pool: &'p Pool,
    counters: &'p Counters,
    entries: Vec<&'p Entry>,
    /// Tensors in the order of the file; parts count in it.
    order: Vec<usize>,
    lanes: Vec<Lane>,
    verify: Verify,
    /// Whether one reader gets all of a tensor, front to back.
    in_order: bool,
    header_came: (Mutex<()>, Condvar),
    unsuitable: AtomicBool,
}

impl<'p> Pass<'p> {
    /// The tensor that a part means.
    fn tensor(&self, place: usize) -> Result<usize> {
        let tensor = self.order.get(place).copied();
        tensor.ok_or_else(|| Error::Bug(format!("no tensor at {place}")))
    }

    fn entry(&self, tensor: usize) -> Result<&'p Entry> {
        let entry = self.entries.get(tensor).copied();
        entry.ok_or_else(|| Error::Bug(format!("no tensor {tensor}")))
    }

    fn lane(&self, tensor: usize) -> Result<&Lane> {
        self.lanes.get(tensor).ok_or_else(|| Error::Bug(format!("no tensor {tensor}")))
    }

    /// The memory in which a place is.
    fn block(&self, target: &Target) -> Result<&'p DeviceMemory> {
        let block = self.to.blocks.get(target.block);
        block.ok_or_else(|| Error::Bug("no block".to_owned()))
    }

    fn target(&self, place: usize) -> Result<Target> {
        let target = self.to.targets.get(self.tensor(place)?).copied();
        target.ok_or_else(|| Error::Bug("no target".to_owned()))
    }

    fn headers(self) -> Result<Vec<KeptHeader>> {
        let headers = self.lanes.into_iter().zip(&self.entries).map(|(lane, entry)| {
            let header = lane.header.into_inner();
            header.ok_or_else(|| Error::Bug(format!("tensor `{}` was not read", entry.name)))
        });
        headers.collect()
    }

    /// Bytes of grains: pieces of encryption, or what suits them.
    fn grain(&self) -> Result<usize> {
        let piece = usize::try_from(PIECE_LEN).map_err(|_| Error::Bug("pieces".to_owned()))?;
        let grain = piece.min(self.pool.unit_len() / 2).max(1);
        if self.file.decryption().is_some() && grain < piece {
            return Err(Error::Bug("units shorter than pieces".to_owned()));
        }
        Ok(grain)
    }

    /// What is read, in shares for readers: parts in the order of the file; or, where SHA-256 has
    /// to see every tensor front to back, whole tensors, the largest first.
    fn runs(&self, source: &dyn ReadAt, readers: usize) -> Result<Vec<Run>> {
        let traits = source.traits();
        let extents = self.order.iter().map(|&tensor| {
            let entry = self.entry(tensor)?;
            Ok(Extent {
                header_offset: entry.header_offset,
                data_offset: entry.data_offset,
                data_len: entry.data_len,
            })
        });
        let extents = extents.collect::<Result<Vec<_>>>()?;
        let part_len = self.part_len(traits.request_len, readers);
        let unit = if self.file.decryption().is_some() { PIECE_LEN } else { 1 };
        let cut = |first: usize, extents: &[Extent]| {
            let vectors = crate::sys::MAX_VECTORS;
            let mut parts = partition(extents, part_len, traits.merge_gap, vectors, unit);
            for piece in parts.iter_mut().flat_map(|part| &mut part.segments) {
                if let SegmentKind::Header { tensor } | SegmentKind::Data { tensor, .. } =
                    &mut piece.kind
                {
                    *tensor += first;
                }
            }
            parts
        };
        let single = |part| Run { parts: vec![part] };
        if traits.max_readers == 1 {
            return Ok(vec![Run { parts: cut(0, &extents) }]);
        }
        if !self.in_order {
            return Ok(cut(0, &extents).into_iter().map(single).collect());
        }
        // The planner does not cut these.
        let small = SMALL.min(part_len);
        let mut runs = Vec::new();
        let mut first = 0;
        for group in extents.chunk_by(|a, b| a.data_len <= small && b.data_len <= small) {
            let parts = cut(first, group);
            first += group.len();
            match group {
                [large] if large.data_len > small => runs.push(Run { parts }),
                _ => runs.extend(parts.into_iter().map(single)),
            }
        }
        runs.sort_by_key(|run| std::cmp::Reverse(run.parts.iter().map(Batch::len).sum::<u64>()));
        Ok(runs)
    }

    /// Bytes of a part: one unit, or as many as suit a source that waits for answers and leave
    /// each reader two parts. Parts get longer than this by a third, and may fill units by half.
    fn part_len(&self, request_len: u64, readers: usize) -> u64 {
        let (unit, limit) = (self.pool.unit_len() as u64, self.pool.limit() as u64);
        let most = (limit / (2 * readers as u64)).min(limit.saturating_sub(1) / 3).max(1);
        let long = request_len > crate::engine::fill::LONG_REQUEST;
        let units = if long { (request_len / unit).clamp(1, most) } else { 1 };
        units * (unit - unit / 16)
    }

    /// How a tensor is decrypted, as soon as its header is there. None if the call was given up.
    fn wait_for_how(&self, tensor: usize, control: &Control<'_>) -> Result<Option<&(Pieces, Key)>> {
        let lane = self.lane(tensor)?;
        if let Some(how) = lane.how.get() {
            return Ok(how.as_ref());
        }
        let (lock, came) = &self.header_came;
        let mut guard = lock.lock().unwrap_or_else(PoisonError::into_inner);
        loop {
            if let Some(how) = lane.how.get() {
                return Ok(how.as_ref());
            }
            if control.stopped() {
                return Ok(None);
            }
            guard = came.wait_timeout(guard, IDLE).unwrap_or_else(PoisonError::into_inner).0;
        }
    }

    fn compare(&self, tensor: usize, digests: &Digests) -> Result<()> {
        let header = self.lane(tensor)?.header.get();
        let header = header.ok_or_else(|| Error::Bug(format!("no header {tensor}")))?;
        header.verify(digests, self.entry(tensor)?, self.file.uri(), self.verify)
    }
}

#[cfg(test)]
mod tests;
