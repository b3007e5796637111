//! One pass over a file that fills the slots of the tensors wanted, on several threads.

use std::io::IoSliceMut;
use std::sync::{Mutex, OnceLock, PoisonError};

use crate::error::{Error, Result};
use crate::format::header::Header;
use crate::format::index::Entry;
use crate::load::LoadOptions;
use crate::plan::{Extent, Part, PieceKind, partition};
use crate::source::{ReadAt, read_exact_at};
use crate::tensor_file::TensorFile;
use crate::transform::hash::{Digests, PiecewiseHash, digest, verify};
use crate::workers::{self, Interrupt};

/// Where the bytes of a tensor go.
pub enum Slot<'a> {
    /// They are to be read into this.
    Read(&'a mut [u8]),
    /// They are here already; only the header is read.
    InPlace(&'a [u8]),
}

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
pub fn fill<'a>(
    file: &TensorFile,
    entries: &[&Entry],
    slots: Vec<Slot<'a>>,
    options: &LoadOptions,
    interrupt: Interrupt<'_>,
) -> Result<Vec<Header>> {
    let source = file.source();
    let traits = source.traits();
    let pass = Pass {
        file,
        source: &*source,
        entries,
        verify: options.verify,
        headers: entries.iter().map(|_| OnceLock::new()).collect(),
        hashes: entries.iter().map(|entry| PiecewiseHash::new(entry.data_len)).collect(),
    };
    let jobs = pass.jobs(slots, traits.merge_gap, traits.request_len, traits.max_readers > 1)?;
    let total: u64 = jobs.iter().map(|job| job.len).sum();
    let wanted = options.readers.unwrap_or(traits.default_readers).clamp(1, traits.max_readers);
    let threads = if total < INLINE_LEN { 0 } else { wanted.min(jobs.len()) };

    let queue = Mutex::new(jobs.into_iter());
    workers::run(threads, interrupt, |control| {
        let mut gap = Vec::new();
        while !control.stopped() {
            // Bound first, so that the queue is free again while the job runs.
            let job = queue.lock().unwrap_or_else(PoisonError::into_inner).next();
            let Some(job) = job else { break };
            pass.read(job, &mut gap)?;
        }
        Ok(())
    })?;
    pass.headers
        .into_iter()
        .zip(entries)
        .map(|(header, entry)| {
            header.into_inner().ok_or_else(|| Error::Bug(format!("tensor `{}` was not read", entry.name)))
        })
        .collect()
}

/// Reads the headers of tensors, given by number, and not their data.
pub fn read_headers(file: &TensorFile, numbers: &[usize], interrupt: Interrupt<'_>) -> Result<Vec<Header>> {
    let entries = numbers.iter().map(|&number| file.entry(number)).collect::<Result<Vec<_>>>()?;
    let slots = entries.iter().map(|_| Slot::InPlace(&[])).collect();
    fill(file, &entries, slots, &LoadOptions::default(), interrupt)
}

/// What the threads of one pass share.
struct Pass<'f, 'a> {
    file: &'f TensorFile,
    source: &'f dyn ReadAt,
    entries: &'f [&'f Entry],
    verify: bool,
    headers: Vec<OnceLock<Header>>,
    hashes: Vec<PiecewiseHash<'a>>,
}

/// One contiguous range of the file and where its bytes go.
struct Job<'a> {
    offset: u64,
    len: u64,
    pieces: Vec<Destination<'a>>,
}

enum Destination<'a> {
    Header {
        tensor: usize,
        raw: Box<[u8]>,
        in_place: Option<&'a [u8]>,
    },
    Data {
        tensor: usize,
        start: u64,
        bytes: &'a mut [u8],
    },
    Gap(usize),
}

impl<'a> Pass<'_, 'a> {
    /// Plans the reads: in file order, but large tensors first where their hashes are wanted.
    fn jobs(&self, slots: Vec<Slot<'a>>, merge_gap: u64, part_len: u64, any_order: bool) -> Result<Vec<Job<'a>>> {
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
        let parts = partition(&extents, part_len, merge_gap, crate::sys::MAX_VECTORS);
        let mut jobs = Vec::with_capacity(parts.len());
        for part in parts {
            let largest = part.pieces.iter().filter_map(|piece| match piece.kind {
                PieceKind::Data { tensor, .. } => extents.get(tensor).map(|e| e.data_len),
                _ => None,
            });
            let first = largest.max().filter(|&len| self.verify && any_order && len >= LARGE_LEN);
            // Slots are cut in file order, so the jobs are put into their own order after it.
            jobs.push((first, self.job(part, &mut wanted)?));
        }
        jobs.sort_by_key(|(first, _)| std::cmp::Reverse(*first));
        Ok(jobs.into_iter().map(|(_, job)| job).collect())
    }

    /// Gives a part its destinations, cutting the slots of tensors that several parts share.
    fn job(&self, part: Part, wanted: &mut [Wanted<'_, 'a>]) -> Result<Job<'a>> {
        let bug = || Error::Bug("a part without destinations".to_owned());
        let mut job = Job { offset: part.offset, len: part.len(), pieces: Vec::with_capacity(part.pieces.len()) };
        for piece in part.pieces {
            let len = usize::try_from(piece.len).map_err(|_| bug())?;
            job.pieces.push(match piece.kind {
                PieceKind::Gap => Destination::Gap(len),
                PieceKind::Header { tensor } => {
                    let wanted = wanted.get(tensor).ok_or_else(bug)?;
                    if piece.len > longest_header(wanted.entry.data_len) && self.source.traits().len.is_none() {
                        return Err(Error::Format {
                            uri: self.file.uri().to_owned(),
                            offset: part.offset,
                            what: format!("tensor `{}`: a header of {len} bytes", wanted.entry.name),
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
    fn read(&self, mut job: Job<'a>, gap: &mut Vec<u8>) -> Result<()> {
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
        read_exact_at(self.source, job.offset, &mut buffers, &|| "tensors".to_owned())?;
        drop(buffers);
        let mut pieces = job.pieces.into_iter().peekable();
        while let Some(piece) = pieces.next() {
            match piece {
                Destination::Gap(_) => {}
                Destination::Header { tensor, raw, in_place } => {
                    let header = self.header(tensor, raw)?;
                    let data_len = self.entry(tensor)?.data_len;
                    let whole = in_place.or_else(|| {
                        let next = pieces.next_if(|next| {
                            matches!(next, Destination::Data { bytes, .. } if bytes.len() as u64 == data_len)
                        });
                        match next {
                            Some(Destination::Data { bytes, .. }) => Some(&*bytes),
                            _ => (data_len == 0).then_some(&[][..]),
                        }
                    });
                    if self.verify {
                        let covered = header.hashed_bytes();
                        match whole {
                            Some(bytes) => self.compare(tensor, Some(digest(&covered, bytes)))?,
                            None => self.compare(tensor, self.hash(tensor)?.header(&covered))?,
                        }
                    }
                }
                Destination::Data { tensor, start, bytes } => {
                    if self.verify {
                        self.compare(tensor, self.hash(tensor)?.data(start, bytes))?;
                    }
                }
            }
        }
        Ok(())
    }

    fn entry(&self, tensor: usize) -> Result<&Entry> {
        self.entries.get(tensor).copied().ok_or_else(|| Error::Bug(format!("no tensor {tensor}")))
    }

    fn hash(&self, tensor: usize) -> Result<&PiecewiseHash<'a>> {
        self.hashes.get(tensor).ok_or_else(|| Error::Bug(format!("no hash {tensor}")))
    }

    fn header(&self, tensor: usize, raw: Box<[u8]>) -> Result<&Header> {
        let header = Header::parse(raw, self.entry(tensor)?, self.file.prologue().encrypted)
            .map_err(|e| e.of(self.file.uri()))?;
        let place = self.headers.get(tensor).ok_or_else(|| Error::Bug(format!("no header {tensor}")))?;
        Ok(place.get_or_init(|| header))
    }

    /// Checks digests, if they are complete.
    fn compare(&self, tensor: usize, digests: Option<Digests>) -> Result<()> {
        let Some(digests) = digests else { return Ok(()) };
        let header = self.headers.get(tensor).and_then(OnceLock::get);
        let header = header.ok_or_else(|| Error::Bug(format!("no header {tensor}")))?;
        verify(&digests, header, self.entry(tensor)?, self.file.uri())
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
