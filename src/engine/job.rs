//! What one thread reads with one call, and in which steps.

use crate::codec::hash::SMALL;
use crate::engine::plan::{Batch, Extent, SegmentKind, partition};
use crate::error::{Error, Result};
use crate::format::index::Entry;
use crate::io::source::Traits;

/// When hashes are verified, a step of reading: a part of the second-level cache of a core.
pub const BITE: u64 = 512 << 10;

/// When hashes are verified, a tensor of this size is begun before smaller ones, because its
/// SHA-256 cannot be shared out and would otherwise be waited for at the end.
const LARGE_LEN: u64 = 64 << 20;

/// Where the bytes of a tensor go.
pub enum Slot<'a> {
    /// They are to be read into this.
    Read(&'a mut [u8]),
    /// They are here already; only the header is read.
    InPlace(&'a [u8]),
}

/// How the reads of a load are cut.
pub struct Cut {
    /// Of what is read.
    pub traits: Traits,
    /// Bytes of a job.
    pub part_len: u64,
    /// Data of a tensor are cut at multiples of this.
    pub unit: u64,
    /// Whether large tensors come before the others.
    pub large_first: bool,
}

impl Cut {
    /// Plans the reads: in file order, but large tensors first where their hashes are wanted.
    pub fn jobs<'a>(&self, entries: &[&Entry], slots: Vec<Slot<'a>>) -> Result<Vec<Job<'a>>> {
        let mut order: Vec<usize> = (0..entries.len()).collect();
        order.sort_by_key(|&tensor| entries.get(tensor).map(|entry| entry.header_offset));
        let mut slots: Vec<Option<Slot<'a>>> = slots.into_iter().map(Some).collect();
        let mut wanted = Vec::with_capacity(order.len());
        for &tensor in &order {
            let slot = slots.get_mut(tensor).and_then(Option::take);
            let (Some(&entry), Some(slot)) = (entries.get(tensor), slot) else {
                return Err(Error::Bug(format!("tensor number {tensor} has no slot")));
            };
            let (bytes, in_place) = match slot {
                Slot::Read(bytes) => (Some(bytes), None),
                Slot::InPlace(bytes) => (None, Some(bytes)),
            };
            wanted.push(Wanted { tensor, entry, bytes, in_place });
        }
        let extents: Vec<Extent> = wanted.iter().map(Wanted::extent).collect();
        let merge_gap = self.traits.merge_gap;
        let vectors = crate::sys::MAX_VECTORS;
        let parts = partition(&extents, self.part_len, merge_gap, vectors, self.unit);
        let mut jobs = Vec::with_capacity(parts.len());
        for part in parts {
            let largest = part.segments.iter().filter_map(|piece| match piece.kind {
                SegmentKind::Data { tensor, .. } => extents.get(tensor).map(|e| e.data_len),
                _ => None,
            });
            let first = largest.max().filter(|&len| self.large_first && len >= LARGE_LEN);
            // Slots are cut in file order, so the jobs are put into their own order after it.
            jobs.push((first, self.job(part, &mut wanted)?));
        }
        jobs.sort_by_key(|(first, _)| std::cmp::Reverse(*first));
        Ok(jobs.into_iter().map(|(_, job)| job).collect())
    }

    /// Gives a part its destinations, cutting the slots of tensors that several parts share.
    fn job<'a>(&self, part: Batch, wanted: &mut [Wanted<'_, 'a>]) -> Result<Job<'a>> {
        let bug = || Error::Bug("a part without destinations".to_owned());
        let mut job = Job {
            offset: part.offset,
            len: part.len(),
            segments: Vec::with_capacity(part.segments.len()),
        };
        for piece in part.segments {
            let len = usize::try_from(piece.len).map_err(|_| bug())?;
            job.segments.push(match piece.kind {
                SegmentKind::Gap => Destination::Gap(len),
                SegmentKind::Header { tensor } => {
                    let wanted = wanted.get(tensor).ok_or_else(bug)?;
                    Destination::Header { tensor: wanted.tensor, len, in_place: wanted.in_place }
                }
                SegmentKind::Data { tensor, start } => {
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
}

/// One contiguous range of the file and where its bytes go.
pub struct Job<'a> {
    /// File position of the first byte.
    pub offset: u64,
    /// How many bytes.
    pub len: u64,
    /// Where they go, in order.
    pub segments: Vec<Destination<'a>>,
}

impl<'a> Job<'a> {
    /// The same in shorter steps, so that the CRC of each finds its bytes in the cache. Only
    /// data of large tensors are cut.
    pub fn bites(self, step: u64) -> Vec<Job<'a>> {
        let mut bites: Vec<Job<'a>> = Vec::new();
        let mut offset = self.offset;
        let mut push = |piece: Destination<'a>, joined: bool| {
            let len = piece.len();
            match bites.last_mut().filter(|bite| joined || bite.len < step) {
                Some(bite) => {
                    bite.segments.push(piece);
                    bite.len += len;
                }
                None => bites.push(Job { offset, len, segments: vec![piece] }),
            }
            offset += len;
        };
        let mut behind_header = false;
        for piece in self.segments {
            let is_header = matches!(piece, Destination::Header { .. });
            match piece {
                Destination::Data { tensor, mut start, bytes } if bytes.len() as u64 > SMALL => {
                    for bytes in bytes.chunks_mut(usize::try_from(step).unwrap_or(usize::MAX)) {
                        let len = bytes.len() as u64;
                        push(Destination::Data { tensor, start, bytes }, false);
                        start += len;
                    }
                }
                // Data stay with their header, because a small tensor is hashed at once.
                other => push(other, behind_header),
            }
            behind_header = is_header;
        }
        bites
    }
}

impl Destination<'_> {
    fn len(&self) -> u64 {
        match self {
            Destination::Header { len, .. } | Destination::Gap(len) => *len as u64,
            Destination::Data { bytes, .. } => bytes.len() as u64,
        }
    }
}

/// Where some bytes of a job go.
pub enum Destination<'a> {
    /// Into memory that is taken when it is read.
    Header {
        tensor: usize,
        len: usize,
        in_place: Option<&'a [u8]>,
    },
    Data {
        tensor: usize,
        start: u64,
        bytes: &'a mut [u8],
    },
    Gap(usize),
}

/// A tensor that is wanted, in file order.
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
