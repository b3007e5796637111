//! What one reader does with its parts: reads them into staging memory, decrypts and hashes them
//! there, and begins the copies.

use std::io::IoSliceMut;
use std::sync::atomic::Ordering;
use std::sync::{Arc, PoisonError};

use super::{Crc, Pass, Run};
use crate::api::load::Verify;
use crate::codec::KeptHeader;
use crate::codec::decrypt::{how, refused};
use crate::codec::hash::{Digests, StreamHash};
use crate::engine::fill::{header_memory, parse_header};
use crate::engine::plan::{Batch, Grain, SegmentKind, Staging, stage};
use crate::engine::workers::Control;
use crate::error::{Error, Result};
use crate::io::source::{ReadAt, read_exact_at};
use crate::mem::device::{DeviceFile, Stream};
use crate::mem::pinned::{Lease, Ticket};
use crate::stats::Stage;

/// One thread of a load.
pub struct Reader<'r, 'p> {
    pub(super) pass: &'r Pass<'p>,
    pub(super) source: &'r dyn ReadAt,
    stream: &'r Arc<dyn Stream>,
    pub(super) control: &'r Control<'r>,
    gap: Vec<u8>,
}

/// A tensor that this reader sees front to back.
pub struct Watched {
    tensor: usize,
    hash: StreamHash,
    left: u64,
}

impl<'r, 'p> Reader<'r, 'p> {
    pub fn new(
        pass: &'r Pass<'p>,
        source: &'r dyn ReadAt,
        stream: &'r Arc<dyn Stream>,
        control: &'r Control<'r>,
    ) -> Self {
        Reader { pass, source, stream, control, gap: Vec::new() }
    }

    /// Brings some parts, in their order.
    pub fn run(
        &mut self,
        run: Run,
        ticket: Ticket<'_>,
        by_device: Option<&dyn DeviceFile>,
    ) -> Result<()> {
        let pass = self.pass;
        if let Some(file) = by_device {
            drop(ticket);
            return run.parts.iter().try_for_each(|part| self.part_by_device(part, file));
        }
        let mut ticket = Some(ticket);
        let mut watched = None;
        for part in run.parts {
            let staging =
                stage(&part, pass.pool.unit_len(), pass.grain()?, |place| pass.target(place))?;
            let ticket = ticket.take().unwrap_or_else(|| pass.pool.enter());
            let lease = pass.counters.time(Stage::Memory, || {
                ticket.lease(staging.units, pass.to.device, self.control)
            })?;
            self.part(part, &staging, lease, &mut watched)?;
        }
        Ok(())
    }

    fn part(
        &mut self,
        part: Batch,
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
        for piece in &part.segments {
            match piece.kind {
                SegmentKind::Gap => {}
                SegmentKind::Header { tensor } => {
                    let raw = headers.next();
                    let raw = raw.ok_or_else(|| Error::Bug("a header of a part".to_owned()))?;
                    *watched = self.header(pass.tensor(tensor)?, raw)?;
                }
                SegmentKind::Data { tensor, start } => {
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
                let block = pass.block(&step.target)?;
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
        part: &Batch,
        staging: &Staging,
        lease: &mut Lease<'_>,
    ) -> Result<Vec<Box<[u8]>>> {
        let pass = self.pass;
        let bug = |what: &str| Error::Bug(format!("{what} of a part"));
        let mut headers = Vec::new();
        let mut gaps = 0;
        for piece in &part.segments {
            let len = usize::try_from(piece.len).map_err(|_| bug("the length"))?;
            match piece.kind {
                SegmentKind::Gap => gaps += len,
                SegmentKind::Data { .. } => {}
                SegmentKind::Header { tensor } => {
                    headers.push(header_memory(len, pass.entry(pass.tensor(tensor)?)?)?);
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
        let mut buffers = Vec::with_capacity(part.segments.len() + staging.grains.len());
        for piece in &part.segments {
            match piece.kind {
                SegmentKind::Header { .. } => {
                    let raw = left.next().ok_or_else(|| bug("a header"))?;
                    buffers.push(IoSliceMut::new(raw));
                }
                SegmentKind::Gap => {
                    let len = usize::try_from(piece.len).map_err(|_| bug("the length"))?;
                    let (now, later) = unwanted.split_at_mut(len);
                    unwanted = later;
                    buffers.push(IoSliceMut::new(now));
                }
                SegmentKind::Data { tensor, start } => {
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
        let what = || "tensors".to_owned();
        pass.counters.time(Stage::Read, || {
            read_exact_at(self.source, part.offset, &mut buffers, &what, self.control)
        })?;
        drop(buffers);
        Ok(headers)
    }

    /// Takes a header; gives what is to be hashed behind it front to back.
    pub(super) fn header(&self, tensor: usize, raw: Box<[u8]>) -> Result<Option<Watched>> {
        let pass = self.pass;
        let entry = pass.entry(tensor)?;
        let parsed = parse_header(pass.file, entry, raw)?;
        let lane = pass.lane(tensor)?;
        if let Some(options) = pass.file.decryption() {
            let how = how(&parsed, entry, options, pass.file.uri(), self.control)?;
            let _ = lane.how.set(how);
            let _came = pass.header_came.0.lock().unwrap_or_else(PoisonError::into_inner);
            pass.header_came.1.notify_all();
        }
        let (kept, covered) = KeptHeader::of(parsed);
        lane.header.get_or_init(|| kept);
        if pass.verify == Verify::Nothing {
            return Ok(None);
        }
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
                    return Err(Error::Bug("pieces that do not fit staging memory".to_owned()));
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
                    crc.segments.insert(start, piece);
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
        for piece in std::mem::take(&mut crc.segments).values() {
            whole.combine(piece);
        }
        self.pass.compare(tensor, &Digests { crc: whole.finalize(), sha: [0; 32] })
    }
}
