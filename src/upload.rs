//! The read path to a device: source → plan → staging memory → transform → device.
//!
//! Each reader leases staging memory, reads a part of the file into it so that what is adjacent on
//! the device is adjacent there, decrypts and hashes it where it is, begins the copies, and goes
//! on with other memory. The copies of one part run while others are read. Nothing waits for the
//! device unless all staging memory is in use; in the end the consumer's stream is told to.

use std::collections::BTreeMap;
use std::io::IoSliceMut;
use std::sync::atomic::{AtomicBool, AtomicUsize, Ordering};
use std::sync::{Arc, Condvar, Mutex, OnceLock, PoisonError};
use std::time::Duration;

use crate::buffer::pinned::{Lease, Pool, Ticket};
use crate::crypt::{Key, PIECE_LEN, Pieces};
use crate::device::{Consumer, Device, DeviceMemory, Stream, Streams};
use crate::environment::DIRECT_IO;
use crate::error::{Error, Result};
use crate::fill::{Stoppable, check_key, parse_header};
use crate::format::header::Header;
use crate::format::index::Entry;
use crate::job::longest_header;
use crate::load::{LoadOptions, Verify, check_selection};
use crate::plan::{Extent, Grain, Part, PieceKind, Shares, Staging, Target, partition, stage};
use crate::source::{ReadAt, read_exact_at};
use crate::stats::{Counters, Stage};
use crate::tensor_file::TensorFile;
use crate::transform::decrypt::{how, refused};
use crate::transform::hash::{Digests, SMALL, StreamHash, verify};
use crate::workers::{self, Control, Interrupt};

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
    interrupt: Interrupt<'_>,
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
    check_key(file, &*source, &entries)?;
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
    let threads = readers.min(runs.len());
    counters.threads(threads);
    // Neighbouring parts for each reader of a file, unless one has to wait for another's header.
    let own = source.file().is_some() && !pass.in_order && file.decryption().is_none();
    let runs = Shares::new(runs, if own { threads } else { 1 });
    let turn = Mutex::new(());
    let numbers = AtomicUsize::new(0);
    let direct = DIRECT_IO.value()? != 0 && is_cold(&*source, &pass.entries);
    counters.reading(if source.file().is_some() { "page cache" } else { "" });
    let outcome = workers::run(threads, interrupt, |control| {
        let number = numbers.fetch_add(1, Ordering::Relaxed);
        let stream = streams.of(number);
        let handle = if direct { around_the_cache(&*source, counters) } else { None };
        let handle = handle.or_else(|| source.for_one_reader());
        let source = handle.as_deref().unwrap_or(&*source);
        let mut reader = Reader { pass: &pass, source, stream, control, gap: Vec::new() };
        while !control.stopped() {
            let next = {
                // Who has the earlier part is the first to get memory, so that nobody holds memory
                // who waits for somebody without.
                let _turn = turn.lock().unwrap_or_else(PoisonError::into_inner);
                runs.next(number).map(|run| (run, pool.enter()))
            };
            let Some((run, ticket)) = next else { break };
            reader.run(run, ticket)?;
        }
        Ok(())
    });
    if pass.unsuitable.load(Ordering::Relaxed) {
        return Ok(None);
    }
    outcome?;
    Ok(Some(Uploaded { streams: streams.hand_over()?, headers: pass.headers()? }))
}

/// Whether most of what is to be read of a file is not in the page cache.
fn is_cold(source: &dyn ReadAt, entries: &[&Entry]) -> bool {
    /// Places that are looked at, in equal distances.
    const SAMPLES: u64 = 32;
    let Some(file) = source.file() else { return false };
    let total: u64 = entries.iter().map(|entry| entry.data_len).sum();
    let step = (total / SAMPLES).max(1);
    let (mut next, mut sampled, mut cold) = (step / 2, 0, 0);
    for entry in entries {
        while next < entry.data_len {
            sampled += 1;
            cold += u64::from(!crate::sys::is_cached(file, entry.data_offset + next));
            next += step;
        }
        next -= entry.data_len;
    }
    cold * 2 > sampled
}

/// A reader that goes around the page cache, where there can be one.
fn around_the_cache(source: &dyn ReadAt, counters: &Counters) -> Option<Box<dyn ReadAt>> {
    #[cfg(target_os = "linux")]
    if let Some(reader) = crate::source::DirectReader::open(source) {
        counters.reading(reader.name());
        return Some(Box::new(reader));
    }
    let _ = source;
    counters
        .fallback("the file system has no direct reads: a cold file goes through the page cache");
    None
}

/// What is known after a load to a device.
pub struct Uploaded {
    /// The header of each tensor.
    pub headers: Vec<Header>,
    /// The streams on which copies may be under way, as the driver knows them.
    pub streams: Vec<usize>,
}

/// Copies bytes of host memory to a device, each to its target.
pub fn copy<'b>(
    from: impl Iterator<Item = &'b [u8]>,
    to: &Destination<'_>,
    pool: &Pool,
    counters: &Counters,
    interrupt: Interrupt<'_>,
) -> Result<Vec<usize>> {
    let streams = Streams::open(to.device, to.consumer)?;
    let stream = streams.of(0);
    for (bytes, target) in from.zip(to.targets) {
        let block = to.blocks.get(target.block);
        let block = block.ok_or_else(|| Error::Bug("no block".to_owned()))?;
        for (offset, now) in
            (target.offset..).step_by(pool.unit_len()).zip(bytes.chunks(pool.unit_len()))
        {
            interrupt()?;
            let lease = counters
                .time(Stage::Memory, || pool.enter().lease(1, to.device, &|| true))?
                .as_mut()
                .map(|lease| {
                    if let Some(unit) =
                        lease.units().first_mut().and_then(|u| u.get_mut(..now.len()))
                    {
                        unit.copy_from_slice(now);
                    }
                    lease.upload(stream, (0, 0, now.len()), block, offset)
                });
            lease.unwrap_or(Err(Error::Cancelled))?;
            counters.bytes(now.len() as u64);
        }
    }
    streams.hand_over()
}

/// Parts that one reader reads one after another.
struct Run {
    parts: Vec<Part>,
}

/// What is known of one tensor.
#[derive(Default)]
struct Lane {
    header: OnceLock<Header>,
    /// How it is decrypted.
    how: OnceLock<Option<(Pieces, Key)>>,
    crc: Mutex<Crc>,
}

/// The CRC-32 of a tensor whose pieces come in any order.
#[derive(Default)]
struct Crc {
    header: Option<crc32fast::Hasher>,
    pieces: BTreeMap<u64, crc32fast::Hasher>,
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

    fn target(&self, place: usize) -> Result<Target> {
        let target = self.to.targets.get(self.tensor(place)?).copied();
        target.ok_or_else(|| Error::Bug("no target".to_owned()))
    }

    fn headers(self) -> Result<Vec<Header>> {
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
            for piece in parts.iter_mut().flat_map(|part| &mut part.pieces) {
                if let PieceKind::Header { tensor } | PieceKind::Data { tensor, .. } =
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
        runs.sort_by_key(|run| std::cmp::Reverse(run.parts.iter().map(Part::len).sum::<u64>()));
        Ok(runs)
    }

    /// Bytes of a part: one unit, or as many as suit a source that waits for answers and leave
    /// each reader two parts. Parts get longer than this by a third, and may fill units by half.
    fn part_len(&self, request_len: u64, readers: usize) -> u64 {
        let (unit, limit) = (self.pool.unit_len() as u64, self.pool.limit() as u64);
        let most = (limit / (2 * readers as u64)).min(limit.saturating_sub(1) / 3).max(1);
        let long = request_len > crate::fill::LONG_REQUEST;
        let units = if long { (request_len / unit).clamp(1, most) } else { 1 };
        units * (unit - unit / 16)
    }

    /// How a tensor is decrypted, as soon as its header is there. None if the call was given up.
    fn wait_for_how(&self, tensor: usize, control: &Control) -> Result<Option<&(Pieces, Key)>> {
        let lane = self.lane(tensor)?;
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
        verify(digests, header, self.entry(tensor)?, self.file.uri(), self.verify)
    }
}

/// One thread of a load.
struct Reader<'r, 'p> {
    pass: &'r Pass<'p>,
    source: &'r dyn ReadAt,
    stream: &'r Arc<dyn Stream>,
    control: &'r Control,
    gap: Vec<u8>,
}

/// A tensor that this reader sees front to back.
struct Watched {
    tensor: usize,
    hash: StreamHash,
    left: u64,
}

impl Reader<'_, '_> {
    fn run(&mut self, run: Run, ticket: Ticket<'_>) -> Result<()> {
        let pass = self.pass;
        let mut ticket = Some(ticket);
        let mut watched = None;
        for part in run.parts {
            let staging =
                stage(&part, pass.pool.unit_len(), pass.grain()?, |place| pass.target(place))?;
            let ticket = ticket.take().unwrap_or_else(|| pass.pool.enter());
            let go_on = || !self.control.stopped();
            let lease = pass
                .counters
                .time(Stage::Memory, || ticket.lease(staging.units, pass.to.device, &go_on))?;
            let Some(lease) = lease else { return Ok(()) };
            self.part(part, &staging, lease, &mut watched)?;
        }
        Ok(())
    }

    fn part(
        &mut self,
        part: Part,
        staging: &Staging,
        mut lease: Lease<'_>,
        watched: &mut Option<Watched>,
    ) -> Result<()> {
        let pass = self.pass;
        let headers = self.read(&part, staging, &mut lease)?;
        let mut units = lease.units();
        let mut headers = headers.into_iter();
        let mut grains = staging.grains.iter().peekable();
        let mut data_len = 0;
        for piece in &part.pieces {
            match piece.kind {
                PieceKind::Gap => {}
                PieceKind::Header { tensor } => {
                    let raw = headers.next().unwrap_or_default();
                    *watched = self.header(pass.tensor(tensor)?, raw)?;
                }
                PieceKind::Data { tensor, start } => {
                    let end = start + piece.len;
                    let here = |grain: &&Grain| grain.tensor == tensor && grain.start < end;
                    while let Some(grain) = grains.next_if(|grain| here(grain)) {
                        let unit = units.get_mut(grain.unit);
                        let bytes = unit.and_then(|u| u.get_mut(grain.at..grain.at + grain.len));
                        let bytes = bytes.ok_or_else(|| Error::Bug("a grain".to_owned()))?;
                        if !self.decrypt(pass.tensor(tensor)?, grain.start, bytes)? {
                            return Ok(());
                        }
                        self.hash(pass.tensor(tensor)?, grain.start, bytes, watched)?;
                    }
                    data_len += piece.len;
                }
            }
        }
        pass.counters.time(Stage::Copy, || {
            staging.moves.iter().try_for_each(|step| {
                let block = pass.to.blocks.get(step.target.block);
                let block = block.ok_or_else(|| Error::Bug("no block".to_owned()))?;
                let from = (step.unit, step.at, step.len);
                lease.upload(self.stream, from, block, step.target.offset)
            })
        })?;
        pass.counters.bytes(data_len);
        Ok(())
    }

    /// Reads a part: data to their places in the units, headers into memory of their own.
    fn read(
        &mut self,
        part: &Part,
        staging: &Staging,
        lease: &mut Lease<'_>,
    ) -> Result<Vec<Box<[u8]>>> {
        let pass = self.pass;
        let bug = |what: &str| Error::Bug(format!("{what} of a part"));
        let mut headers = Vec::new();
        let mut gaps = 0;
        let sized = self.source.traits().len.is_some();
        for piece in &part.pieces {
            let len = usize::try_from(piece.len).map_err(|_| bug("the length"))?;
            match piece.kind {
                PieceKind::Gap => gaps += len,
                PieceKind::Data { .. } => {}
                PieceKind::Header { tensor } => {
                    let entry = pass.entry(pass.tensor(tensor)?)?;
                    if piece.len > longest_header(entry.data_len) && !sized {
                        return Err(Error::Format {
                            uri: pass.file.uri().to_owned(),
                            offset: entry.header_offset,
                            what: format!("tensor `{}`: a header of {len} bytes", entry.name),
                        });
                    }
                    headers.push(vec![0; len].into_boxed_slice());
                }
            }
        }
        if self.gap.len() < gaps {
            self.gap.resize(gaps, 0);
        }
        let mut unwanted = self.gap.as_mut_slice();
        // What is left of each unit, and where that begins.
        let mut units: Vec<(usize, &mut [u8])> =
            lease.units().into_iter().map(|unit| (0, unit)).collect();
        let mut grains = staging.grains.iter().peekable();
        let mut left = headers.iter_mut();
        let mut buffers = Vec::with_capacity(part.pieces.len() + staging.grains.len());
        for piece in &part.pieces {
            match piece.kind {
                PieceKind::Header { .. } => {
                    let raw = left.next().ok_or_else(|| bug("a header"))?;
                    buffers.push(IoSliceMut::new(raw));
                }
                PieceKind::Gap => {
                    let len = usize::try_from(piece.len).map_err(|_| bug("the length"))?;
                    let (now, later) = unwanted.split_at_mut_checked(len).unwrap_or_default();
                    unwanted = later;
                    buffers.push(IoSliceMut::new(now));
                }
                PieceKind::Data { tensor, start } => {
                    let end = start + piece.len;
                    let here = |grain: &&Grain| grain.tensor == tensor && grain.start < end;
                    while let Some(grain) = grains.next_if(|grain| here(grain)) {
                        let (at, rest) = units.get_mut(grain.unit).ok_or_else(|| bug("a unit"))?;
                        let unit = std::mem::take(rest);
                        let skip = grain.at.checked_sub(*at).ok_or_else(|| bug("the order"))?;
                        let cut = unit.split_at_mut_checked(skip).ok_or_else(|| bug("a grain"))?;
                        let cut = cut.1.split_at_mut_checked(grain.len);
                        let (now, later) = cut.ok_or_else(|| bug("a grain"))?;
                        (*at, *rest) = (grain.at + grain.len, later);
                        buffers.push(IoSliceMut::new(now));
                    }
                }
            }
        }
        let source = Stoppable { source: self.source, control: self.control };
        pass.counters.time(Stage::Read, || {
            read_exact_at(&source, part.offset, &mut buffers, &|| "tensors".to_owned())
        })?;
        drop(buffers);
        Ok(headers)
    }

    /// Takes a header; gives what is to be hashed behind it front to back.
    fn header(&self, tensor: usize, raw: Box<[u8]>) -> Result<Option<Watched>> {
        let pass = self.pass;
        let entry = pass.entry(tensor)?;
        let parsed = parse_header(pass.file, entry, raw)?;
        let lane = pass.lane(tensor)?;
        if let Some(options) = pass.file.decryption() {
            let how = how(&parsed, entry, options, pass.file.uri())?;
            let _ = lane.how.set(how);
            let _came = pass.header_came.0.lock().unwrap_or_else(PoisonError::into_inner);
            pass.header_came.1.notify_all();
        }
        let header = lane.header.get_or_init(|| parsed);
        if pass.verify == Verify::Nothing {
            return Ok(None);
        }
        let covered = header.hashed_bytes();
        if pass.in_order {
            let hash = StreamHash::new(&covered, pass.verify == Verify::All);
            if entry.data_len == 0 {
                pass.compare(tensor, &hash.finish())?;
                return Ok(None);
            }
            return Ok(Some(Watched { tensor, hash, left: entry.data_len }));
        }
        let mut hasher = crc32fast::Hasher::new();
        hasher.update(&covered);
        self.add_crc(tensor, |crc| crc.header = Some(hasher), 0)?;
        Ok(None)
    }

    /// Decrypts data where they are. False if the call was given up, or cannot go on this way.
    fn decrypt(&self, tensor: usize, start: u64, bytes: &mut [u8]) -> Result<bool> {
        let pass = self.pass;
        if pass.file.decryption().is_none() {
            return Ok(true);
        }
        let Some((pieces, key)) = pass.wait_for_how(tensor, self.control)? else {
            return Ok(false);
        };
        pass.counters.time(Stage::Decrypt, || {
            let (mut at, end) = (start, start + bytes.len() as u64);
            let mut rest = bytes;
            while at < end {
                let (number, piece_start, piece_end) = pieces.piece(at);
                if piece_start != at || piece_end > end {
                    pass.unsuitable.store(true, Ordering::Relaxed);
                    return Err(Error::Cancelled);
                }
                let len = usize::try_from(piece_end - at).unwrap_or(usize::MAX);
                let cut = rest.split_at_mut_checked(len);
                let (now, later) = cut.ok_or_else(|| Error::Bug("a piece".to_owned()))?;
                if !pieces.open(number, now, key) {
                    return Err(refused(pass.entry(tensor)?, pass.file.uri()));
                }
                (at, rest) = (piece_end, later);
            }
            Ok(true)
        })
    }

    fn hash(
        &self,
        tensor: usize,
        start: u64,
        bytes: &[u8],
        watched: &mut Option<Watched>,
    ) -> Result<()> {
        let pass = self.pass;
        if pass.verify == Verify::Nothing {
            return Ok(());
        }
        let len = bytes.len() as u64;
        pass.counters.time(Stage::Hash, || {
            if !pass.in_order {
                let mut piece = crc32fast::Hasher::new();
                piece.update(bytes);
                let keep = |crc: &mut Crc| {
                    crc.pieces.insert(start, piece);
                };
                return self.add_crc(tensor, keep, len);
            }
            let own = watched.as_mut().filter(|watched| watched.tensor == tensor);
            let own = own.ok_or_else(|| Error::Bug("data before their header".to_owned()))?;
            own.hash.update(bytes);
            own.left = own.left.saturating_sub(len);
            if own.left == 0
                && let Some(done) = watched.take()
            {
                pass.compare(tensor, &done.hash.finish())?;
            }
            Ok(())
        })
    }

    /// Adds to a CRC whose pieces come in any order, and compares it when all of them are there.
    fn add_crc(&self, tensor: usize, add: impl FnOnce(&mut Crc), len: u64) -> Result<()> {
        let data_len = self.pass.entry(tensor)?.data_len;
        let lane = self.pass.lane(tensor)?;
        let mut crc = lane.crc.lock().unwrap_or_else(PoisonError::into_inner);
        add(&mut crc);
        crc.done += len;
        if crc.done < data_len {
            return Ok(());
        }
        let Some(mut whole) = crc.header.take() else { return Ok(()) };
        for piece in std::mem::take(&mut crc.pieces).values() {
            whole.combine(piece);
        }
        self.pass.compare(tensor, &Digests { crc: whole.finalize(), sha: [0; 32] })
    }
}

#[cfg(test)]
#[path = "upload_tests.rs"]
mod tests;
