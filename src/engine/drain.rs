//! One pass that hashes tensors and writes them to a sink, on several threads.
//!
//! The mirror image of `fill`: the same parts, with bytes going the other way.
// A broken invariant ends the call by a panic that its boundary catches.
#![allow(clippy::indexing_slicing)]

use std::io::IoSlice;
use std::sync::atomic::{AtomicU64, Ordering};
use std::sync::{Mutex, PoisonError};

mod copies;
mod jobs;
pub mod staged;

use crate::cancel::Cancel;
use copies::{Copies, Copy};
use jobs::{Job, jobs};

use crate::api::save::{Data, HostCopy, SaveOptions};
use crate::codec::HashPool;
use crate::codec::crypt::{Manifest, PIECE_LEN};
use crate::codec::encrypt::Seal;
use crate::codec::hash::{Digests, SMALL, StreamHash, digest_all, sha256};
use crate::engine::plan::{Batch, Extent, SegmentKind};
use crate::engine::workers::{self, Control};
use crate::error::{Error, Result};
use crate::format::header::{Draft, Hashes};
use crate::format::index::Entry;
use crate::io::sink::{WriteAt, write_all_at};
use crate::mem::device::StreamsByDevice;
use crate::stats::Counters;

/// A tensor with its place in the file.
pub struct Item<'a> {
    /// Its place.
    pub entry: &'a Entry,
    /// Number of the owning module.
    pub module_index: u16,
    /// Its bytes.
    pub data: Data<'a>,
}

impl Item<'_> {
    /// The length of data that are hashed piece by piece; None where they are hashed at once.
    fn len_for_pool(&self) -> Option<u64> {
        let len = self.entry.data_len;
        (len > SMALL && matches!(self.data, Data::Bytes(_))).then_some(len)
    }

    /// Some of the bytes in memory.
    fn bytes(&self, start: u64, len: u64) -> Result<&[u8]> {
        let bytes = match &self.data {
            Data::Bytes(bytes) => bytes,
            _ => &[][..],
        };
        usize::try_from(start)
            .ok()
            .zip(usize::try_from(len).ok())
            .and_then(|(start, len)| bytes.get(start..start.checked_add(len)?))
            .ok_or_else(|| Error::Bug(format!("{len} bytes from {start} of `{}`", self.entry.name)))
    }
}

/// Less than this is written on the calling thread.
const INLINE_LEN: u64 = 1 << 20;

/// Writes headers and data of the items to their places. Gives what stands for each header where
/// all of them together are to be sealed or named. `progress` grows by the data written.
pub fn drain(
    sink: &dyn WriteAt,
    items: Vec<Item<'_>>,
    options: &SaveOptions,
    progress: &AtomicU64,
    cancel: &dyn Cancel,
) -> Result<Vec<[u8; 32]>> {
    let encryption = options.encryption.as_deref();
    for item in &items {
        let found = match &item.data {
            Data::Bytes(bytes) => bytes.len() as u64,
            Data::Device(bytes) => bytes.memory.size() as u64,
            Data::Meta | Data::Deferred(_) => continue,
        };
        if found != item.entry.data_len {
            return Err(Error::InvalidArgument(format!(
                "tensor `{}` of {} {:?} has {} bytes, found {}",
                item.entry.name, item.entry.dtype, item.entry.shape, item.entry.data_len, found
            )));
        }
    }
    let extents: Vec<Extent> = items
        .iter()
        .map(|item| Extent {
            file: 0,
            header_offset: item.entry.header_offset,
            data_offset: item.entry.data_offset,
            data_len: item.entry.data_len,
        })
        .collect();
    let total: u64 = extents.iter().map(|extent| extent.data_len).sum();
    let wanted = options
        .threads
        .unwrap_or_else(|| sink.default_writers())
        .clamp(1, sink.max_writers().max(1));
    let sha = options.hashes == Hashes::All;
    let jobs = jobs(&items, &extents, if sha { wanted } else { 1 })?;
    let threads = if total < INLINE_LEN { 0 } else { wanted.min(jobs.len()) };
    let seals = items
        .iter()
        .map(|item| encryption.map(|options| Seal::new(item.entry.data_len, options)).transpose());
    let manifest = encryption.filter(|options| options.manifest);
    let copies = Copies::new(threads);
    let pass = Pass {
        sink,
        progress,
        copies: &copies,
        hashes: HashPool::new(items.iter().map(Item::len_for_pool), sha),
        items: &items,
        seals: seals.collect::<Result<Vec<_>>>()?,
        manifest: manifest.map(|options| Manifest::new(&options.key)).transpose()?,
        named: options.pair.is_some(),
        stored: options.hashes,
        sha,
        digests: Mutex::new(vec![[0; 32]; items.len()]),
        streams: StreamsByDevice::open(items.iter().filter_map(|item| match &item.data {
            Data::Device(bytes) => Some(bytes),
            _ => None,
        }))?,
        counters: Counters::default(),
    };
    let queue = Mutex::new(jobs.into_iter());
    workers::run(threads, cancel, |control| {
        while !control.stopped() {
            if pass.hash(&|| !copies.are_enough(), control)? {
                continue;
            }
            let job = queue.lock().unwrap_or_else(PoisonError::into_inner).next();
            match job {
                Some(Job::Batch(part)) => pass.write(&part, control)?,
                Some(Job::Staged(tensors)) => pass.write_staged(&tensors, control)?,
                Some(Job::Deferred(tensor)) => {
                    pass.write_deferred(tensor, control)?;
                    let data_len = pass.item(tensor)?.entry.data_len;
                    progress.fetch_add(data_len, Ordering::Relaxed);
                }
                None if pass.hash(&|| false, control)? => {}
                None => break,
            }
        }
        Ok(())
    })
    .map_err(|error| error.with_file("saving", sink.uri()))?;
    pass.report(threads);
    Ok(pass.digests.into_inner().unwrap_or_else(PoisonError::into_inner))
}

struct Pass<'p> {
    sink: &'p dyn WriteAt,
    progress: &'p AtomicU64,
    items: &'p [Item<'p>],
    copies: &'p Copies,
    hashes: HashPool<Copy<'p>>,
    seals: Vec<Option<Seal<'p>>>,
    manifest: Option<Manifest>,
    /// Whether headers get a digest where there is no manifest.
    named: bool,
    stored: Hashes,
    /// Whether SHA-256 is among them.
    sha: bool,
    digests: Mutex<Vec<[u8; 32]>>,
    streams: StreamsByDevice,
    counters: Counters,
}

/// A finished header, and its data as they are written.
type Small<'p> = (Vec<u8>, Bytes<'p>);

/// Adjacent bytes to be written together.
struct Run<'a> {
    offset: u64,
    end: u64,
    segments: Vec<Bytes<'a>>,
}

impl<'p> Pass<'p> {
    fn item(&self, tensor: usize) -> Result<&'p Item<'p>> {
        self.items.get(tensor).ok_or_else(|| Error::Bug(format!("no tensor {tensor}")))
    }

    /// Writes one part. Small tensors are hashed first, and their headers go with them; the
    /// header of a large one is written when its hash is complete.
    fn write(&self, part: &Batch, control: &Control<'_>) -> Result<()> {
        let mut small = self.small(part)?.into_iter();
        let mut data_of_small = None;
        let large = self.large(part)?;
        let mut left = large.iter();
        let mut runs: Vec<Run<'_>> = Vec::new();
        let mut begun: Vec<(usize, Vec<u8>)> = Vec::new();
        let (mut offset, mut data_len) = (part.offset, 0);
        for piece in &part.segments {
            let bytes = match piece.kind {
                SegmentKind::Gap => None,
                SegmentKind::Header { tensor } if self.item(tensor)?.len_for_pool().is_some() => {
                    begun.push((tensor, self.draft(tensor)?.bytes));
                    None
                }
                SegmentKind::Header { .. } => small.next().map(|(header, data)| {
                    data_of_small = Some(data);
                    Bytes::Owned(header)
                }),
                SegmentKind::Data { tensor, .. } => {
                    data_len += piece.len;
                    match (self.item(tensor)?.len_for_pool(), self.seal(tensor)?) {
                        (None, _) => data_of_small.take(),
                        (Some(_), seal) => {
                            let next = left.next();
                            let (_, start, copy) =
                                next.ok_or_else(|| Error::Bug("no copy".to_owned()))?;
                            Some(match seal {
                                Some(seal) => Bytes::Owned(seal.seal(*start, copy.as_ref())?),
                                None => Bytes::Borrowed(copy.as_ref()),
                            })
                        }
                    }
                }
            };
            if let Some(bytes) = bytes {
                match runs.last_mut().filter(|run| run.end == offset) {
                    Some(run) => run.segments.push(bytes),
                    None => runs.push(Run { offset, end: offset, segments: vec![bytes] }),
                }
                if let Some(run) = runs.last_mut() {
                    run.end += piece.len;
                }
            }
            offset += piece.len;
        }
        for run in &runs {
            let mut buffers: Vec<IoSlice<'_>> =
                run.segments.iter().map(|bytes| IoSlice::new(bytes.as_ref())).collect();
            write_all_at(self.sink, run.offset, &mut buffers, control)?;
        }
        drop(runs);
        self.progress.fetch_add(data_len, Ordering::Relaxed);
        for (tensor, covered) in begun {
            self.hashes.header(tensor, &covered);
        }
        for (tensor, start, copy) in large {
            self.hashes.data(tensor, start, copy.waiting());
        }
        Ok(())
    }

    /// The part's data of tensors that are hashed piece by piece, each with its tensor and its
    /// position.
    fn large(&self, part: &Batch) -> Result<Vec<(usize, u64, Copy<'p>)>> {
        let mut copies = Vec::new();
        for piece in &part.segments {
            if let SegmentKind::Data { tensor, start } = piece.kind {
                let item = self.item(tensor)?;
                if item.len_for_pool().is_some() {
                    copies.push((tensor, start, self.copies.of(item.bytes(start, piece.len)?)));
                }
            }
        }
        Ok(copies)
    }

    fn seal(&self, tensor: usize) -> Result<Option<&Seal<'p>>> {
        let seal = self.seals.get(tensor);
        Ok(seal.ok_or_else(|| Error::Bug(format!("no tensor {tensor}")))?.as_ref())
    }

    fn draft(&self, tensor: usize) -> Result<Draft> {
        let item = self.item(tensor)?;
        let crypt_len = self.seal(tensor)?.map_or(0, Seal::encoded_len);
        Draft::new(item.entry, item.module_index, self.stored, crypt_len)
    }

    /// A header with everything in it.
    fn finish(&self, tensor: usize, draft: Draft, digests: &Digests) -> Result<Vec<u8>> {
        let crypt = self.seal(tensor)?.map_or(Vec::new(), Seal::encode);
        let header = draft.finish(digests.crc, &digests.sha, &crypt);
        let digest = match &self.manifest {
            Some(manifest) => Some(manifest.digest(&header)),
            None => self.named.then(|| sha256(&header)),
        };
        if let Some(digest) = digest {
            let mut all = self.digests.lock().unwrap_or_else(PoisonError::into_inner);
            if let Some(slot) = all.get_mut(tensor) {
                *slot = digest;
            }
        }
        Ok(header)
    }

    /// The finished headers of the part's tensors that are hashed at once, in order, each with its
    /// data if they are encrypted.
    fn small(&self, part: &Batch) -> Result<Vec<Small<'p>>> {
        let mut drafts = Vec::new();
        let mut data: Vec<Copy<'p>> = Vec::new();
        for piece in &part.segments {
            if let SegmentKind::Header { tensor } = piece.kind {
                let item = self.item(tensor)?;
                if item.len_for_pool().is_none() {
                    drafts.push((tensor, self.draft(tensor)?));
                    data.push(self.copies.of(item.bytes(0, item.entry.data_len)?));
                }
            }
        }
        let inputs: Vec<(&[u8], &[u8])> = drafts
            .iter()
            .zip(&data)
            .map(|((_, draft), data)| (draft.bytes.as_slice(), data.as_ref()))
            .collect();
        let digests = digest_all(&inputs, self.sha);
        drafts
            .into_iter()
            .zip(digests)
            .zip(data)
            .map(|(((tensor, draft), digests), data)| {
                let seal = self.seal(tensor)?.filter(|_| !data.as_ref().is_empty());
                let data = match seal {
                    Some(seal) => Bytes::Owned(seal.seal(0, data.as_ref())?),
                    None => Bytes::Copied(data),
                };
                Ok((self.finish(tensor, draft, &digests)?, data))
            })
            .collect()
    }

    /// Hashes something; false if there is nothing to do, or not enough while more is to be
    /// written, as `more_to_write` says. Writes the headers of tensors whose hashes have become complete.
    fn hash(&self, more_to_write: &dyn Fn() -> bool, control: &Control<'_>) -> Result<bool> {
        let mut outcome = Ok(());
        let busy = self.hashes.step(
            more_to_write,
            || control.stopped(),
            |tensor, digests| {
                if outcome.is_ok() {
                    outcome = self.write_header(tensor, &digests, control);
                }
            },
        );
        outcome.map(|()| busy)
    }

    fn write_header(&self, tensor: usize, digests: &Digests, control: &Control<'_>) -> Result<()> {
        let item = self.item(tensor)?;
        let header = self.finish(tensor, self.draft(tensor)?, digests)?;
        let mut buffers = [IoSlice::new(&header)];
        write_all_at(self.sink, item.entry.header_offset, &mut buffers, control)
    }

    fn write_deferred(&self, tensor: usize, control: &Control<'_>) -> Result<()> {
        let item = self.item(tensor)?;
        let Data::Deferred(bring) = &item.data else {
            return Err(Error::Bug(format!("tensor `{}` is not deferred", item.entry.name)));
        };
        let copy: HostCopy = bring()?;
        let data = (*copy).as_ref();
        if data.len() as u64 != item.entry.data_len {
            return Err(Error::Bug(format!("tensor `{}` changed its size", item.entry.name)));
        }
        let draft = self.draft(tensor)?;
        let mut hash = StreamHash::new(&draft.bytes, self.sha);
        hash.update_large(data, control)?;
        let digests = hash.finish();
        let Some(seal) = self.seal(tensor)? else {
            let header = self.finish(tensor, draft, &digests)?;
            let mut buffers = [IoSlice::new(&header), IoSlice::new(data)];
            return write_all_at(self.sink, item.entry.header_offset, &mut buffers, control);
        };
        let step = usize::try_from(PIECE_LEN).unwrap_or(usize::MAX);
        for (start, piece) in (0..).step_by(step).zip(data.chunks(step)) {
            let sealed = seal.seal(start, piece)?;
            let offset = item.entry.data_offset + start;
            write_all_at(self.sink, offset, &mut [IoSlice::new(&sealed)], control)?;
        }
        let header = self.finish(tensor, draft, &digests)?;
        let mut buffers = [IoSlice::new(&header)];
        write_all_at(self.sink, item.entry.header_offset, &mut buffers, control)
    }
}

enum Bytes<'a> {
    Owned(Vec<u8>),
    Copied(Copy<'a>),
    Borrowed(&'a [u8]),
}

impl AsRef<[u8]> for Bytes<'_> {
    fn as_ref(&self) -> &[u8] {
        match self {
            Bytes::Owned(bytes) => bytes,
            Bytes::Copied(bytes) => bytes.as_ref(),
            Bytes::Borrowed(bytes) => bytes,
        }
    }
}
