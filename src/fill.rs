//! One pass over a file that fills the slots of the tensors wanted, on several threads.

use std::io::IoSliceMut;
use std::sync::{Mutex, OnceLock, PoisonError};

use crate::crypt::PIECE_LEN;
use crate::error::{Error, Result};
use crate::format::header::Header;
use crate::format::index::Entry;
use crate::job::{BITE, Destination, Job};
use crate::load::{LoadOptions, Verify};
use crate::plan::{Extent, Part, PieceKind, partition};
use crate::source::{ReadAt, Traits, read_exact_at};
use crate::tensor_file::TensorFile;
use crate::transform::HashPool;
use crate::transform::decrypt::{Opener, Plain, how, refused};
use crate::transform::hash::{Digests, SMALL, digest_all, digest_crc, verify};
use crate::workers::{self, Control, Interrupt};

/// Where the bytes of a tensor go.
pub enum Slot<'a> {
    /// They are to be read into this.
    Read(&'a mut [u8]),
    /// They are here already; only the header is read.
    InPlace(&'a [u8]),
}

/// Requests of more bytes than this are those of sources that wait for an answer.
const LONG_REQUEST: u64 = 8 << 20;
/// Less than this is read on the calling thread.
const INLINE_LEN: u64 = 1 << 20;
/// When hashes are verified, a tensor of this size is begun before smaller ones, because its
/// SHA-256 cannot be shared out and would otherwise be waited for at the end.
const LARGE_LEN: u64 = 64 << 20;
/// Longest header that is believed of a source whose size is unknown: names, shape, hashes and
/// padding, and one authentication tag of 16 bytes for each piece of at least 1 KiB of data.
const fn longest_header(data_len: u64) -> u64 {
    (4 << 20) + data_len / 64
}

/// Reads headers and data of tensors into their slots. Headers come back in the same order.
///
/// `source` has the bytes of the file: the file's own source, or a mapping of it. `touched` are
/// mapped bytes to be brought into memory.
pub fn fill<'a>(
    file: &TensorFile,
    source: &dyn ReadAt,
    entries: &[&Entry],
    slots: Vec<Slot<'a>>,
    touched: Vec<&[u8]>,
    options: &LoadOptions,
    interrupt: Interrupt<'_>,
) -> Result<Vec<Header>> {
    let traits = source.traits();
    let pass = Pass {
        file,
        source,
        entries,
        verify: options.verify,
        opener: file.decryption().map(|options| Opener::new(options, file.uri(), entries)),
        headers: entries.iter().map(|_| OnceLock::new()).collect(),
        hashes: HashPool::new(
            entries.iter().map(|entry| {
                (options.verify != Verify::Nothing && entry.data_len > SMALL)
                    .then_some(entry.data_len)
            }),
            options.verify == Verify::All,
        ),
    };
    let wanted = options.readers.unwrap_or(traits.default_readers).clamp(1, traits.max_readers);
    let part_len = part_len(entries, &slots, wanted, traits.request_len);
    let jobs = pass.jobs(slots, traits.merge_gap, part_len, traits.max_readers > 1)?;
    let total = jobs.iter().map(|job| job.len).sum::<u64>() + touched.len() as u64 * INLINE_LEN;
    let threads = if total < INLINE_LEN { 0 } else { wanted.min(jobs.len() + touched.len()) };

    check_key(&pass, traits.len.is_some())?;
    // Long requests are not cut: each one waits for its answer.
    let step = match (&pass.opener, options.verify) {
        _ if traits.request_len > LONG_REQUEST => 0,
        (Some(_), _) => PIECE_LEN,
        (None, Verify::Nothing) => 0,
        (None, _) => BITE,
    };
    let touched = Mutex::new(touched.into_iter());
    let queue = Mutex::new(jobs.into_iter());
    workers::run(threads, interrupt, |control| {
        let mut gap = Vec::new();
        while !control.stopped() {
            if pass.hash(true, control)? {
                continue;
            }
            // Bound first, so that the queue is free again while the job runs.
            let job = queue.lock().unwrap_or_else(PoisonError::into_inner).next();
            match job {
                Some(job) if step > 0 => {
                    job.bites(step)
                        .into_iter()
                        .try_for_each(|bite| pass.read(bite, &mut gap, control))?;
                }
                Some(job) => pass.read(job, &mut gap, control)?,
                None if pass.hash(false, control)? => {}
                None => break,
            }
        }
        while !control.stopped() {
            let chunk = touched.lock().unwrap_or_else(PoisonError::into_inner).next();
            let Some(chunk) = chunk else { break };
            crate::sys::populate(chunk).map_err(|e| Error::io("mapping", file.uri(), e))?;
        }
        Ok(())
    })?;
    pass.headers
        .into_iter()
        .zip(entries)
        .map(|(header, entry)| {
            header
                .into_inner()
                .ok_or_else(|| Error::Bug(format!("tensor `{}` was not read", entry.name)))
        })
        .collect()
}

/// Bytes a part: as many as suit the source, in rounds in which every reader has the same to do.
fn part_len(entries: &[&Entry], slots: &[Slot<'_>], readers: usize, request_len: u64) -> u64 {
    let lens = entries.iter().zip(slots).map(|(entry, slot)| {
        let data = if let Slot::Read(bytes) = slot { bytes.len() as u64 } else { 0 };
        data.saturating_add(entry.data_offset - entry.header_offset)
    });
    let total = lens.fold(0, u64::saturating_add);
    let readers = readers as u64;
    let rounds = total.div_ceil(readers.saturating_mul(request_len)).max(1);
    let even = total.div_ceil(readers.saturating_mul(rounds));
    // Parts end where tensors do, if that is near: a little more, so that there are not more.
    even.saturating_add(even / 32).max(INLINE_LEN)
}

/// Reads the headers of tensors, given by number, and not their data.
pub fn read_headers(
    file: &TensorFile,
    numbers: &[usize],
    interrupt: Interrupt<'_>,
) -> Result<Vec<Header>> {
    let entries = numbers.iter().map(|&number| file.entry(number)).collect::<Result<Vec<_>>>()?;
    let slots = entries.iter().map(|_| Slot::InPlace(&[])).collect();
    let options = LoadOptions::default();
    fill(file, &*file.source(), &entries, slots, Vec::new(), &options, interrupt)
}

/// What the threads of one pass share.
struct Pass<'f, 'a> {
    file: &'f TensorFile,
    source: &'f dyn ReadAt,
    entries: &'f [&'f Entry],
    verify: Verify,
    opener: Option<Opener<'f, 'a>>,
    headers: Vec<OnceLock<Header>>,
    hashes: HashPool<'a>,
}

impl<'a> Pass<'_, 'a> {
    /// Plans the reads: in file order, but large tensors first where their hashes are wanted.
    fn jobs(
        &self,
        slots: Vec<Slot<'a>>,
        merge_gap: u64,
        part_len: u64,
        any_order: bool,
    ) -> Result<Vec<Job<'a>>> {
        let mut order: Vec<usize> = (0..self.entries.len()).collect();
        order.sort_by_key(|&tensor| self.entries.get(tensor).map(|entry| entry.header_offset));
        let mut slots: Vec<Option<Slot<'a>>> = slots.into_iter().map(Some).collect();
        let mut wanted = Vec::with_capacity(order.len());
        for &tensor in &order {
            let slot = slots.get_mut(tensor).and_then(Option::take);
            let (Some(&entry), Some(slot)) = (self.entries.get(tensor), slot) else {
                return Err(Error::Bug(format!("tensor number {tensor} has no slot")));
            };
            let (bytes, in_place) = match slot {
                Slot::Read(bytes) => (Some(bytes), None),
                Slot::InPlace(bytes) => (None, Some(bytes)),
            };
            wanted.push(Wanted { tensor, entry, bytes, in_place });
        }
        let extents: Vec<Extent> = wanted.iter().map(Wanted::extent).collect();
        let parts = {
            let unit = if self.opener.is_some() { PIECE_LEN } else { 1 };
            partition(&extents, part_len, merge_gap, crate::sys::MAX_VECTORS, unit)
        };
        let mut jobs = Vec::with_capacity(parts.len());
        for part in parts {
            let largest = part.pieces.iter().filter_map(|piece| match piece.kind {
                PieceKind::Data { tensor, .. } => extents.get(tensor).map(|e| e.data_len),
                _ => None,
            });
            let first = largest
                .max()
                .filter(|&len| self.verify == Verify::All && any_order && len >= LARGE_LEN);
            // Slots are cut in file order, so the jobs are put into their own order after it.
            jobs.push((first, self.job(part, &mut wanted)?));
        }
        jobs.sort_by_key(|(first, _)| std::cmp::Reverse(*first));
        Ok(jobs.into_iter().map(|(_, job)| job).collect())
    }

    /// Gives a part its destinations, cutting the slots of tensors that several parts share.
    fn job(&self, part: Part, wanted: &mut [Wanted<'_, 'a>]) -> Result<Job<'a>> {
        let bug = || Error::Bug("a part without destinations".to_owned());
        let mut job = Job {
            offset: part.offset,
            len: part.len(),
            pieces: Vec::with_capacity(part.pieces.len()),
        };
        for piece in part.pieces {
            let len = usize::try_from(piece.len).map_err(|_| bug())?;
            job.pieces.push(match piece.kind {
                PieceKind::Gap => Destination::Gap(len),
                PieceKind::Header { tensor } => {
                    let wanted = wanted.get(tensor).ok_or_else(bug)?;
                    if piece.len > longest_header(wanted.entry.data_len)
                        && self.source.traits().len.is_none()
                    {
                        return Err(Error::Format {
                            uri: self.file.uri().to_owned(),
                            offset: part.offset,
                            what: format!(
                                "tensor `{}`: a header of {len} bytes",
                                wanted.entry.name
                            ),
                        });
                    }
                    let raw = vec![0; len].into_boxed_slice();
                    Destination::Header { tensor: wanted.tensor, raw, in_place: wanted.in_place }
                }
                PieceKind::Data { tensor, start } => {
                    let wanted = wanted.get_mut(tensor).ok_or_else(bug)?;
                    let rest = wanted.bytes.take().ok_or_else(bug)?;
                    let (bytes, rest) = rest.split_at_mut_checked(len).ok_or_else(bug)?;
                    wanted.bytes = Some(rest);
                    Destination::Data { tensor: wanted.tensor, start, bytes }
                }
            });
        }
        Ok(job)
    }

    /// Reads one job's bytes, checks headers and hashes.
    fn read(&self, mut job: Job<'a>, gap: &mut Vec<u8>, control: &Control) -> Result<()> {
        let mut gaps: usize = 0;
        for piece in &job.pieces {
            if let Destination::Gap(len) = piece {
                gaps += len;
            }
        }
        if gap.len() < gaps {
            gap.resize(gaps, 0);
        }
        let mut unwanted = gap.as_mut_slice();
        let mut buffers = Vec::with_capacity(job.pieces.len());
        for piece in &mut job.pieces {
            buffers.push(IoSliceMut::new(match piece {
                Destination::Header { raw, .. } => raw,
                Destination::Data { bytes, .. } => bytes,
                Destination::Gap(len) => {
                    let (now, later) = unwanted.split_at_mut_checked(*len).unwrap_or_default();
                    unwanted = later;
                    now
                }
            }));
        }
        read_exact_at(
            &Stoppable { source: self.source, control },
            job.offset,
            &mut buffers,
            &|| "tensors".to_owned(),
        )?;
        drop(buffers);
        let mut whole: Vec<(usize, Vec<u8>, &'a [u8])> = Vec::new();
        let mut pieces = job.pieces.into_iter().peekable();
        while let Some(piece) = pieces.next() {
            match piece {
                Destination::Gap(_) => {}
                Destination::Header { tensor, raw, in_place } => {
                    let header = self.header(tensor, raw)?;
                    if let Some(opener) = &self.opener {
                        let plain = opener.header(tensor, header)?;
                        self.plain(tensor, plain);
                    }
                    if self.verify == Verify::Nothing {
                        continue;
                    }
                    let covered = header.hashed_bytes();
                    let data_len = self.entry(tensor)?.data_len;
                    if data_len > SMALL {
                        self.hashes.header(tensor, &covered);
                        if let Some(bytes) = in_place {
                            self.hashes.data(tensor, 0, bytes);
                        }
                        continue;
                    }
                    let of_tensor = |next: &Destination<'a>| matches!(next, Destination::Data { bytes, .. } if bytes.len() as u64 == data_len);
                    match (in_place, data_len, pieces.next_if(of_tensor)) {
                        (Some(bytes), ..) => whole.push((tensor, covered, bytes)),
                        (None, 0, _) => whole.push((tensor, covered, &[])),
                        (None, _, Some(Destination::Data { bytes, .. })) => {
                            let bytes = match &self.opener {
                                Some(opener) => opener.whole(tensor, bytes)?,
                                None => bytes,
                            };
                            whole.push((tensor, covered, bytes));
                        }
                        // The plan does not cut small tensors, unless parts are tiny.
                        _ => return Err(Error::Bug("a small tensor in two parts".to_owned())),
                    }
                }
                Destination::Data { tensor, start, bytes } => {
                    let plain = match &self.opener {
                        Some(opener) => opener.data(tensor, start, bytes)?,
                        None => vec![(start, &*bytes)],
                    };
                    self.plain(tensor, plain);
                }
            }
        }
        let inputs: Vec<(&[u8], &[u8])> =
            whole.iter().map(|(_, covered, bytes)| (covered.as_slice(), *bytes)).collect();
        let digests = match self.verify {
            Verify::All => digest_all(&inputs),
            _ => inputs.iter().map(|(covered, data)| digest_crc(covered, data)).collect(),
        };
        for ((tensor, ..), digests) in whole.iter().zip(digests) {
            self.compare(*tensor, &digests)?;
        }
        Ok(())
    }

    /// Takes bytes as the writer had them.
    fn plain(&self, tensor: usize, plain: Vec<Plain<'a>>) {
        if self.verify != Verify::Nothing {
            for (start, bytes) in plain {
                self.hashes.data(tensor, start, bytes);
            }
        }
    }

    /// Hashes something; false if there is nothing to do, or not enough while more is to be read.
    fn hash(&self, more_to_read: bool, control: &Control) -> Result<bool> {
        let mut outcome = Ok(());
        let busy = self.hashes.step(
            more_to_read,
            || control.stopped(),
            |tensor, digests| {
                if outcome.is_ok() {
                    outcome = self.compare(tensor, &digests);
                }
            },
        );
        outcome.map(|()| busy)
    }

    fn entry(&self, tensor: usize) -> Result<&Entry> {
        self.entries.get(tensor).copied().ok_or_else(|| Error::Bug(format!("no tensor {tensor}")))
    }

    fn header(&self, tensor: usize, raw: Box<[u8]>) -> Result<&Header> {
        self.file.check_header(self.entry(tensor)?, &raw)?;
        let header = Header::parse(raw, self.entry(tensor)?, self.file.prologue().encrypted)
            .map_err(|e| e.of(self.file.uri()))?;
        let place =
            self.headers.get(tensor).ok_or_else(|| Error::Bug(format!("no header {tensor}")))?;
        Ok(place.get_or_init(|| header))
    }

    fn compare(&self, tensor: usize, digests: &Digests) -> Result<()> {
        let header = self.headers.get(tensor).and_then(OnceLock::get);
        let header = header.ok_or_else(|| Error::Bug(format!("no header {tensor}")))?;
        verify(digests, header, self.entry(tensor)?, self.file.uri(), self.verify)
    }
}

/// Decrypts the first piece of the smallest tensor, so that a wrong key is found before everything
/// has been read. A key that has fitted once is not tried again.
fn check_key(pass: &Pass<'_, '_>, any_order: bool) -> Result<()> {
    let (Some(_), Some(options)) = (&pass.opener, pass.file.decryption()) else { return Ok(()) };
    let sealed = pass.entries.iter().filter(|entry| entry.data_len > 0);
    let first = sealed.min_by_key(|entry| entry.data_len).filter(|_| any_order);
    let Some(entry) = first.filter(|_| !pass.file.key_fits()) else { return Ok(()) };
    let uri = pass.file.uri();
    let len = usize::try_from(entry.data_offset - entry.header_offset).unwrap_or(usize::MAX);
    let mut raw = vec![0; len].into_boxed_slice();
    let what = || "tensors".to_owned();
    read_exact_at(pass.source, entry.header_offset, &mut [IoSliceMut::new(&mut raw)], &what)?;
    let header = Header::parse(raw, entry, true).map_err(|e| e.of(uri))?;
    let Some((pieces, key)) = how(&header, entry, options, uri)? else { return Ok(()) };
    let (_, _, end) = pieces.piece(0);
    if end > PIECE_LEN {
        // Longer than what is worth reading twice.
        return Ok(());
    }
    let mut bytes = vec![0; usize::try_from(end).unwrap_or(usize::MAX)];
    read_exact_at(pass.source, entry.data_offset, &mut [IoSliceMut::new(&mut bytes)], &what)?;
    if !pieces.open(0, &mut bytes, &key) {
        return Err(refused(entry, uri));
    }
    pass.file.set_key_fits();
    Ok(())
}

/// Ends a long series of short reads when the call is given up.
struct Stoppable<'s> {
    source: &'s dyn ReadAt,
    control: &'s Control,
}

impl ReadAt for Stoppable<'_> {
    fn uri(&self) -> &str {
        self.source.uri()
    }

    fn traits(&self) -> Traits {
        self.source.traits()
    }

    fn read_at(&self, offset: u64, buffers: &mut [IoSliceMut<'_>]) -> Result<usize> {
        if self.control.stopped() {
            return Err(Error::Cancelled);
        }
        self.source.read_at_while(offset, buffers, &|| !self.control.stopped())
    }
}

/// A tensor of the pass, in file order.
struct Wanted<'f, 'a> {
    /// Its place in the caller's order.
    tensor: usize,
    entry: &'f Entry,
    bytes: Option<&'a mut [u8]>,
    in_place: Option<&'a [u8]>,
}

impl Wanted<'_, '_> {
    fn extent(&self) -> Extent {
        Extent {
            header_offset: self.entry.header_offset,
            data_offset: self.entry.data_offset,
            data_len: if self.in_place.is_some() { 0 } else { self.entry.data_len },
        }
    }
}
