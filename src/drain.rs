//! One pass that hashes tensors and writes them to a sink, on several threads.
//!
//! The mirror image of `fill`: the same parts, with bytes going the other way.

use std::io::IoSlice;
use std::sync::{Mutex, PoisonError};

use crate::error::{Error, Result};
use crate::format::header::Draft;
use crate::format::index::Entry;
use crate::plan::{Extent, Part, PieceKind, partition};
use crate::save::{Data, HostCopy};
use crate::sink::{WriteAt, write_all_at};
use crate::transform::hash::{PiecewiseHash, digest};
use crate::workers::{self, Interrupt};

/// A tensor with its place in the file.
pub struct Item<'a> {
    /// Its place.
    pub entry: &'a Entry,
    /// Number of the owning module.
    pub module_index: u16,
    /// Its bytes.
    pub data: Data<'a>,
}

/// Bytes a write; long enough for a disk to stream and short enough to stay in the cache.
const PART_LEN: u64 = 4 << 20;
/// Less than this is written on the calling thread.
const INLINE_LEN: u64 = 1 << 20;

/// Writes headers and data of the items to their places.
pub fn drain(
    sink: &dyn WriteAt,
    items: Vec<Item<'_>>,
    threads: Option<usize>,
    interrupt: Interrupt<'_>,
) -> Result<()> {
    for item in &items {
        if let Data::Bytes(bytes) = item.data
            && bytes.len() as u64 != item.entry.data_len
        {
            return Err(Error::InvalidArgument(format!(
                "tensor `{}` of {} {:?} has {} bytes, found {}",
                item.entry.name,
                item.entry.dtype,
                item.entry.shape,
                item.entry.data_len,
                bytes.len()
            )));
        }
    }
    let extents: Vec<Extent> = items
        .iter()
        .map(|item| Extent {
            header_offset: item.entry.header_offset,
            data_offset: item.entry.data_offset,
            data_len: item.entry.data_len,
        })
        .collect();
    let jobs = jobs(&items, &extents);
    let total: u64 = extents.iter().map(|extent| extent.data_len).sum();
    let wanted = threads.unwrap_or_else(crate::cpu_count).clamp(1, sink.max_writers().max(1));
    let threads = if total < INLINE_LEN { 0 } else { wanted.min(jobs.len()) };
    let pass = Pass {
        sink,
        hashes: items.iter().map(|item| PiecewiseHash::new(item.entry.data_len)).collect(),
        items: &items,
    };
    let queue = Mutex::new(jobs.into_iter());
    workers::run(threads, interrupt, |control| {
        while !control.stopped() {
            let job = queue.lock().unwrap_or_else(PoisonError::into_inner).next();
            match job {
                Some(Job::Part(part)) => pass.write(&part)?,
                Some(Job::Deferred(tensor)) => pass.write_deferred(tensor)?,
                None => break,
            }
        }
        Ok(())
    })
}

enum Job {
    Part(Part),
    /// A tensor that must be brought into memory first, by itself.
    Deferred(usize),
}

/// In file order. Runs of tensors in memory are cut into parts; the others are jobs of their own.
fn jobs(items: &[Item<'_>], extents: &[Extent]) -> Vec<Job> {
    let mut jobs = Vec::new();
    let mut first = 0;
    let flush = |from: usize, to: usize, jobs: &mut Vec<Job>| {
        let run = extents.get(from..to).unwrap_or_default();
        for mut part in partition(run, PART_LEN, 0, crate::sys::MAX_VECTORS) {
            for piece in &mut part.pieces {
                match &mut piece.kind {
                    PieceKind::Header { tensor } | PieceKind::Data { tensor, .. } => *tensor += from,
                    PieceKind::Gap => {}
                }
            }
            jobs.push(Job::Part(part));
        }
    };
    for (tensor, item) in items.iter().enumerate() {
        if matches!(item.data, Data::Deferred(_)) {
            flush(first, tensor, &mut jobs);
            jobs.push(Job::Deferred(tensor));
            first = tensor + 1;
        }
    }
    flush(first, items.len(), &mut jobs);
    jobs
}

struct Pass<'p> {
    sink: &'p dyn WriteAt,
    items: &'p [Item<'p>],
    hashes: Vec<PiecewiseHash<'p>>,
}

impl<'p> Pass<'p> {
    fn item(&self, tensor: usize) -> Result<&'p Item<'p>> {
        self.items.get(tensor).ok_or_else(|| Error::Bug(format!("no tensor {tensor}")))
    }

    fn hash(&self, tensor: usize) -> Result<&PiecewiseHash<'p>> {
        self.hashes.get(tensor).ok_or_else(|| Error::Bug(format!("no hash {tensor}")))
    }

    /// Writes one part. A tensor that lies in it as a whole is hashed first, and its header goes
    /// with it; the header of one that several parts share is written when its hash is complete.
    fn write(&self, part: &Part) -> Result<()> {
        let mut runs: Vec<(u64, Vec<Bytes<'_>>)> = Vec::new();
        let mut pending: Vec<(usize, u64, &'p [u8])> = Vec::new();
        let mut begun: Vec<(usize, Vec<u8>)> = Vec::new();
        let mut offset = part.offset;
        let mut contiguous = false;
        let mut pieces = part.pieces.iter().peekable();
        while let Some(piece) = pieces.next() {
            let mut push = |bytes: Bytes<'p>, at: u64, contiguous: bool| {
                match runs.last_mut().filter(|_| contiguous) {
                    Some((_, run)) => run.push(bytes),
                    None => runs.push((at, vec![bytes])),
                }
            };
            match piece.kind {
                PieceKind::Gap => contiguous = false,
                PieceKind::Header { tensor } => {
                    let item = self.item(tensor)?;
                    let draft = Draft::new(item.entry, item.module_index)?;
                    let data: &'p [u8] = match &item.data {
                        Data::Bytes(bytes) => bytes,
                        _ => &[],
                    };
                    let data_len = item.entry.data_len;
                    let here = data_len == 0 || pieces.peek().is_some_and(|next| next.len == data_len);
                    if here {
                        let digests = digest(&draft.bytes, data);
                        push(Bytes::Owned(draft.finish(digests.crc, &digests.sha)), offset, contiguous);
                        contiguous = true;
                    } else {
                        begun.push((tensor, draft.bytes));
                        contiguous = false;
                    }
                }
                PieceKind::Data { tensor, start } => {
                    let item = self.item(tensor)?;
                    let Data::Bytes(data) = &item.data else {
                        return Err(Error::Bug(format!("tensor `{}` has no bytes", item.entry.name)));
                    };
                    let range = usize::try_from(start).ok().zip(usize::try_from(piece.len).ok());
                    let bytes: &'p [u8] = range
                        .and_then(|(start, len)| data.get(start..start.checked_add(len)?))
                        .ok_or_else(|| Error::Bug(format!("bytes of `{}`", item.entry.name)))?;
                    push(Bytes::Borrowed(bytes), offset, contiguous);
                    contiguous = true;
                    if piece.len != item.entry.data_len {
                        pending.push((tensor, start, bytes));
                    }
                }
            }
            offset += piece.len;
        }
        for (offset, run) in &runs {
            let mut buffers: Vec<IoSlice<'_>> = run.iter().map(|b| IoSlice::new(b.as_ref())).collect();
            write_all_at(self.sink, *offset, &mut buffers)?;
        }
        for (tensor, covered) in begun {
            self.finish(tensor, self.hash(tensor)?.header(&covered))?;
        }
        for (tensor, start, bytes) in pending {
            self.finish(tensor, self.hash(tensor)?.data(start, bytes))?;
        }
        Ok(())
    }

    /// Writes the header of a tensor whose hash has become complete.
    fn finish(&self, tensor: usize, digests: Option<crate::transform::hash::Digests>) -> Result<()> {
        let Some(digests) = digests else { return Ok(()) };
        let item = self.item(tensor)?;
        let header = Draft::new(item.entry, item.module_index)?.finish(digests.crc, &digests.sha);
        write_all_at(self.sink, item.entry.header_offset, &mut [IoSlice::new(&header)])
    }

    fn write_deferred(&self, tensor: usize) -> Result<()> {
        let item = self.item(tensor)?;
        let Data::Deferred(bring) = &item.data else {
            return Err(Error::Bug(format!("tensor `{}` is not deferred", item.entry.name)));
        };
        let copy: HostCopy = bring()?;
        let data = (*copy).as_ref();
        if data.len() as u64 != item.entry.data_len {
            return Err(Error::Bug(format!("tensor `{}` changed its size", item.entry.name)));
        }
        let draft = Draft::new(item.entry, item.module_index)?;
        let digests = digest(&draft.bytes, data);
        let header = draft.finish(digests.crc, &digests.sha);
        let mut buffers = [IoSlice::new(&header), IoSlice::new(data)];
        write_all_at(self.sink, item.entry.header_offset, &mut buffers)
    }
}

enum Bytes<'a> {
    Owned(Vec<u8>),
    Borrowed(&'a [u8]),
}

impl AsRef<[u8]> for Bytes<'_> {
    fn as_ref(&self) -> &[u8] {
        match self {
            Bytes::Owned(bytes) => bytes,
            Bytes::Borrowed(bytes) => bytes,
        }
    }
}
