//! One pass over a file that fills the slots of the tensors wanted, on several threads.

use std::io::IoSliceMut;
use std::sync::OnceLock;
use std::sync::atomic::{AtomicUsize, Ordering};

use crate::api::file::TensorFile;
use crate::api::load::{LoadOptions, Verify};
use crate::cancel::Cancel;
use crate::codec::crypt::PIECE_LEN;
use crate::codec::decrypt::{Opener, Plain, how, refused};
use crate::codec::hash::{Digests, SMALL, digest_all};
use crate::codec::{HashPool, KeptHeader};
pub use crate::engine::job::Slot;
use crate::engine::job::{BITE, Cut, Destination, Job};
use crate::engine::plan::Shares;
use crate::engine::workers::{self, Control};
use crate::error::{Error, Result};
use crate::format::header::Header;
use crate::format::index::Entry;
use crate::io::source::{ReadAt, read_exact_at};
use crate::mem::zeroed;

/// Requests of more bytes than this are those of sources that wait for an answer.
pub const LONG_REQUEST: u64 = 8 << 20;
/// Less than this is read on the calling thread.
const INLINE_LEN: u64 = 1 << 20;

/// Reads headers and data of tensors into their slots. Headers come back in the same order.
///
/// `source` has the bytes of the file: the file's own source, or a mapping of it.
pub fn fill(
    file: &TensorFile,
    source: &dyn ReadAt,
    entries: &[&Entry],
    slots: Vec<Slot<'_>>,
    options: &LoadOptions,
    cancel: &dyn Cancel,
) -> Result<Vec<KeptHeader>> {
    fill_and_see(file, source, entries, slots, options, cancel, &|_, _| Ok(()))
}

/// Sees whole headers, each with the place of its tensor among those asked for, in any order.
type See<'s> = &'s (dyn Fn(usize, &Header) -> Result<()> + Sync);

fn fill_and_see<'a>(
    file: &TensorFile,
    source: &dyn ReadAt,
    entries: &[&Entry],
    slots: Vec<Slot<'a>>,
    options: &LoadOptions,
    cancel: &dyn Cancel,
    see: See<'_>,
) -> Result<Vec<KeptHeader>> {
    let traits = source.traits();
    let pass = Pass {
        file,
        entries,
        verify: options.verify,
        see,
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
    let cut = Cut {
        traits,
        part_len,
        unit: if pass.opener.is_some() { PIECE_LEN } else { 1 },
        large_first: options.verify == Verify::All && traits.max_readers > 1,
    };
    let jobs = cut.jobs(entries, slots)?;
    let total = jobs.iter().map(|job| job.len).sum::<u64>();
    let threads = if total < INLINE_LEN { 0 } else { wanted.min(jobs.len()) };

    check_key(file, source, entries, cancel)?;
    // Long requests are not cut: each one waits for its answer.
    let step = match (&pass.opener, options.verify) {
        _ if traits.request_len > LONG_REQUEST => 0,
        (Some(_), _) => PIECE_LEN,
        (None, Verify::Nothing) => 0,
        (None, _) => BITE,
    };
    // What is hashed in an order of its own, or can only be read in order, is taken in turns.
    let of_file = file.source();
    let own = of_file.file().is_some() && !cut.large_first && threads > 1;
    let shares = if own { threads } else { 1 };
    let jobs = Shares::new(jobs, shares);
    let readers = AtomicUsize::new(0);
    workers::run(threads, cancel, |control| {
        let reader = readers.fetch_add(1, Ordering::Relaxed);
        let handle = if own { of_file.for_one_reader() } else { None };
        let mut unwanted = Vec::new();
        let source = handle.as_deref().filter(|_| source.file().is_some()).unwrap_or(source);
        while !control.stopped() {
            if pass.hash(true, control)? {
                continue;
            }
            let job = jobs.next(reader);
            match job {
                Some(job) if step > 0 => {
                    job.bites(step)
                        .into_iter()
                        .try_for_each(|bite| pass.read(source, bite, &mut unwanted, control))?;
                }
                Some(job) => pass.read(source, job, &mut unwanted, control)?,
                None if pass.hash(false, control)? => {}
                None => break,
            }
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
    cancel: &dyn Cancel,
) -> Result<Vec<KeptHeader>> {
    see_headers(file, numbers, cancel, &|_, _| Ok(()))
}

/// The same, and shows each of them whole while it is in memory.
pub fn see_headers(
    file: &TensorFile,
    numbers: &[usize],
    cancel: &dyn Cancel,
    see: See<'_>,
) -> Result<Vec<KeptHeader>> {
    let entries = numbers.iter().map(|&number| file.entry(number)).collect::<Result<Vec<_>>>()?;
    let slots = entries.iter().map(|_| Slot::InPlace(&[])).collect();
    let options = LoadOptions::default();
    fill_and_see(file, &*file.source(), &entries, slots, &options, cancel, see)
}

/// What the threads of one pass share.
struct Pass<'f, 'a> {
    file: &'f TensorFile,
    entries: &'f [&'f Entry],
    verify: Verify,
    see: See<'f>,
    opener: Option<Opener<'f, 'a>>,
    headers: Vec<OnceLock<KeptHeader>>,
    hashes: HashPool<&'a [u8]>,
}

impl<'a> Pass<'_, 'a> {
    /// Reads one job's bytes, checks headers and hashes.
    fn read(
        &self,
        source: &dyn ReadAt,
        mut job: Job<'a>,
        gap: &mut Vec<u8>,
        control: &Control<'_>,
    ) -> Result<()> {
        let missing = || Error::Bug("a header without memory".to_owned());
        let mut gaps: usize = 0;
        let mut headers = Vec::new();
        for piece in &job.segments {
            match piece {
                Destination::Gap(len) => gaps += len,
                Destination::Header { tensor, len, .. } => {
                    headers.push(header_memory(*len, self.entry(*tensor)?)?);
                }
                Destination::Data { .. } => {}
            }
        }
        if gap.len() < gaps {
            gap.resize(gaps, 0);
        }
        let mut unwanted = gap.as_mut_slice();
        let mut left = headers.iter_mut();
        let mut buffers = Vec::with_capacity(job.segments.len());
        for piece in &mut job.segments {
            buffers.push(IoSliceMut::new(match piece {
                Destination::Header { .. } => left.next().ok_or_else(missing)?,
                Destination::Data { bytes, .. } => bytes,
                Destination::Gap(len) => {
                    let (now, later) = unwanted.split_at_mut(*len);
                    unwanted = later;
                    now
                }
            }));
        }
        let what = || "tensors".to_owned();
        read_exact_at(source, job.offset, &mut buffers, &what, control)?;
        drop(buffers);
        let mut headers = headers.into_iter();
        let mut whole: Vec<(usize, Vec<u8>, &'a [u8])> = Vec::new();
        let mut pieces = job.segments.into_iter().peekable();
        while let Some(piece) = pieces.next() {
            match piece {
                Destination::Gap(_) => {}
                Destination::Header { tensor, in_place, .. } => {
                    let covered =
                        self.header(tensor, headers.next().ok_or_else(missing)?, control)?;
                    if self.verify == Verify::Nothing {
                        continue;
                    }
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
        let digests = digest_all(&inputs, self.verify == Verify::All);
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
    fn hash(&self, more_to_read: bool, control: &Control<'_>) -> Result<bool> {
        let mut outcome = Ok(());
        let busy = self.hashes.step(
            || more_to_read,
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

    /// Takes a header; gives the bytes of it that hashes cover.
    fn header(&self, tensor: usize, raw: Box<[u8]>, control: &Control<'_>) -> Result<Vec<u8>> {
        let header = parse_header(self.file, self.entry(tensor)?, raw)?;
        (self.see)(tensor, &header)?;
        if let Some(opener) = &self.opener {
            let plain = opener.header(tensor, &header, control)?;
            self.plain(tensor, plain);
        }
        let place =
            self.headers.get(tensor).ok_or_else(|| Error::Bug(format!("no header {tensor}")))?;
        let (kept, covered) = KeptHeader::of(header);
        place.get_or_init(|| kept);
        Ok(covered)
    }

    fn compare(&self, tensor: usize, digests: &Digests) -> Result<()> {
        let header = self.headers.get(tensor).and_then(OnceLock::get);
        let header = header.ok_or_else(|| Error::Bug(format!("no header {tensor}")))?;
        header.verify(digests, self.entry(tensor)?, self.file.uri(), self.verify)
    }
}

/// Memory for a header of a length that the index gives.
pub fn header_memory(len: usize, entry: &Entry) -> Result<Box<[u8]>> {
    zeroed(len, || format!("the header of tensor `{}`", entry.name))
}

/// A header that agrees with the index, and with the seal if there is one.
pub fn parse_header(file: &TensorFile, entry: &Entry, raw: Box<[u8]>) -> Result<Header> {
    file.check_header(entry, &raw)?;
    Header::parse(raw, entry, file.prologue().encrypted).map_err(|e| e.of(file.uri()))
}

/// Decrypts the first piece of the smallest tensor, so that a wrong key is found before everything
/// has been read. A key that has fitted once is not tried again.
pub fn check_key(
    file: &TensorFile,
    source: &dyn ReadAt,
    entries: &[&Entry],
    cancel: &dyn Cancel,
) -> Result<()> {
    let any_order = source.traits().len.is_some();
    let Some(options) = file.decryption() else { return Ok(()) };
    let sealed = entries.iter().filter(|entry| entry.data_len > 0);
    let first = sealed.min_by_key(|entry| entry.data_len).filter(|_| any_order);
    let Some(entry) = first.filter(|_| !file.key_fits()) else { return Ok(()) };
    let uri = file.uri();
    let len = usize::try_from(entry.data_offset - entry.header_offset).unwrap_or(usize::MAX);
    let mut raw = header_memory(len, entry)?;
    let what = || "tensors".to_owned();
    read_exact_at(source, entry.header_offset, &mut [IoSliceMut::new(&mut raw)], &what, cancel)?;
    let header = Header::parse(raw, entry, true).map_err(|e| e.of(uri))?;
    let Some((pieces, key)) = how(&header, entry, options, uri, cancel)? else { return Ok(()) };
    let (_, _, end) = pieces.piece(0);
    if end > PIECE_LEN {
        // Longer than what is worth reading twice.
        return Ok(());
    }
    let mut bytes = vec![0; usize::try_from(end).unwrap_or(usize::MAX)];
    read_exact_at(source, entry.data_offset, &mut [IoSliceMut::new(&mut bytes)], &what, cancel)?;
    if !pieces.open(0, &mut bytes, &key) {
        return Err(refused(entry, uri));
    }
    file.set_key_fits();
    Ok(())
}
