//! Tensors on a device, on their way to a sink: brought into staging memory, hashed, encrypted and
//! written there, while the next bytes are on their way.
// A broken invariant ends the call by a panic that its boundary catches.
#![allow(clippy::indexing_slicing)]

use std::io::IoSlice;
use std::ops::Range;
use std::sync::Arc;
use std::sync::atomic::Ordering;

use super::{Bytes, Item, Pass};
use crate::api::save::Data;
use crate::cancel::Cancel;
use crate::codec::hash::{StreamHash, digest_all};
use crate::engine::workers::Control;
use crate::error::{Error, Result};
use crate::io::sink::write_all_at;
use crate::mem::device::{OnDevice, Stream};
use crate::mem::pinned::{Lease, Pool, UNIT_LEN};
use crate::stats::{Counters, PAGEABLE, Stage};

/// Calls `each` with the bytes of a range, a unit at a time, front to back, each with its position.
pub fn each_unit(
    from: &OnDevice,
    range: Range<usize>,
    stream: &Arc<dyn Stream>,
    counters: &Counters,
    cancel: &dyn Cancel,
    mut each: impl FnMut(u64, &[u8]) -> Result<()>,
) -> Result<()> {
    let pool = Pool::of(&from.device)?;
    let (end, step) = (range.end, pool.unit_len());
    let begin = |mut lease: Lease<'static>, at: usize| -> Result<Lease<'static>> {
        let now = step.min(end - at);
        counters.time(Stage::Copy, || lease.download(stream, (0, 0, now), &from.memory, at))?;
        lease.begun()?;
        Ok(lease)
    };
    let mut next: Option<Lease<'static>> = None;
    for at in range.step_by(step) {
        let mut lease = match next.take() {
            Some(lease) => lease,
            None => {
                let lease =
                    counters.time(Stage::Memory, || pool.enter().lease(1, &from.device, cancel))?;
                begin(lease, at)?
            }
        };
        // Who waited for a second unit while it has one could wait for ever.
        if at + step < end
            && let Some(more) = pool.try_lease(1)
        {
            next = Some(begin(more, at + step)?);
        }
        counters.time(Stage::Copy, || lease.wait(cancel))?;
        let units = lease.units();
        let bytes = units.first().and_then(|unit| unit.get(..step.min(end - at)));
        each(at as u64, bytes.ok_or_else(|| Error::Bug("an empty unit".to_owned()))?)?;
    }
    Ok(())
}

impl<'p> Pass<'p> {
    /// Publishes what was counted.
    pub fn report(&self, threads: usize) {
        let devices = self.streams.names();
        let device = if devices.is_empty() { "cpu" } else { &devices };
        if !devices.is_empty() && Pool::all().into_iter().any(Pool::is_pageable) {
            self.counters.fallback(PAGEABLE);
        }
        self.counters.threads(threads);
        self.counters.bytes(self.items.iter().map(|item| item.entry.data_len).sum());
        self.counters.publish("save", self.sink.uri(), device, self.items.len());
    }

    fn on_device(&self, tensor: usize) -> Result<(&'p Item<'p>, &'p OnDevice)> {
        let item = self.item(tensor)?;
        match &item.data {
            Data::Device(bytes) => Ok((item, bytes)),
            _ => Err(Error::Bug(format!("tensor `{}` is on no device", item.entry.name))),
        }
    }

    /// Writes tensors that are on a device: one, or several that fit into one unit together.
    pub fn write_staged(&self, tensors: &[usize], control: &Control<'_>) -> Result<()> {
        match tensors {
            [] => Ok(()),
            [one] => self.write_large(*one, control),
            several => self.write_small(several, control),
        }
    }

    fn write_large(&self, tensor: usize, control: &Control<'_>) -> Result<()> {
        let (item, from) = self.on_device(tensor)?;
        let stream = self.streams.next(from)?;
        let draft = self.draft(tensor)?;
        let seal = self.seal(tensor)?;
        let mut hash = StreamHash::new(&draft.bytes, self.sha);
        let len = from.memory.size();
        each_unit(from, 0..len, stream, &self.counters, control, |start, bytes| {
            self.counters.time(Stage::Hash, || hash.update(bytes));
            let bytes = match seal {
                None => Bytes::Borrowed(bytes),
                Some(seal) => {
                    let sealed = self.counters.time(Stage::Decrypt, || seal.seal(start, bytes));
                    Bytes::Owned(sealed?)
                }
            };
            let offset = item.entry.data_offset + start;
            self.put(offset, &mut [IoSlice::new(bytes.as_ref())], control)?;
            self.progress.fetch_add(bytes.as_ref().len() as u64, Ordering::Relaxed);
            Ok(())
        })?;
        let header = self.finish(tensor, draft, &hash.finish())?;
        self.put(item.entry.header_offset, &mut [IoSlice::new(&header)], control)
    }

    fn write_small(&self, tensors: &[usize], control: &Control<'_>) -> Result<()> {
        let all = tensors.iter().map(|&tensor| Ok((tensor, self.on_device(tensor)?)));
        let all = all.collect::<Result<Vec<_>>>()?;
        let Some((_, (_, first))) = all.first() else { return Ok(()) };
        let stream = self.streams.next(first)?;
        let mut lease = self.counters.time(Stage::Memory, || {
            Pool::of(&first.device)?.enter().lease(1, &first.device, control)
        })?;
        let mut ranges = Vec::with_capacity(all.len());
        let mut end = 0usize;
        self.counters.time(Stage::Copy, || {
            for (_, (_, from)) in &all {
                let len = from.memory.size();
                if len > 0 {
                    lease.download(stream, (0, end, len), &from.memory, 0)?;
                }
                ranges.push(end..end + len);
                end = (end + len).next_multiple_of(crate::mem::ALIGNMENT);
            }
            lease.wait(control)
        })?;
        let units = lease.units();
        let data: Vec<&[u8]> = ranges.into_iter().map(|range| &units[0][range]).collect();
        let drafts = tensors.iter().map(|&tensor| self.draft(tensor));
        let drafts = drafts.collect::<Result<Vec<_>>>()?;
        let inputs: Vec<(&[u8], &[u8])> =
            drafts.iter().zip(&data).map(|(draft, data)| (draft.bytes.as_slice(), *data)).collect();
        let digests = self.counters.time(Stage::Hash, || digest_all(&inputs, self.sha));
        let mut pieces: Vec<Bytes<'_>> = Vec::with_capacity(2 * all.len());
        let mut len = 0;
        let offset = all.first().map_or(0, |(_, (item, _))| item.entry.header_offset);
        for (((tensor, draft), digests), data) in tensors.iter().zip(drafts).zip(digests).zip(data)
        {
            let seal = self.seal(*tensor)?.filter(|_| !data.is_empty());
            let sealed = seal.map(|seal| seal.seal(0, data)).transpose()?;
            pieces.push(Bytes::Owned(self.finish(*tensor, draft, &digests)?));
            pieces.push(sealed.map_or(Bytes::Borrowed(data), Bytes::Owned));
            len += data.len() as u64;
        }
        let mut buffers: Vec<IoSlice<'_>> =
            pieces.iter().map(|bytes| IoSlice::new(bytes.as_ref())).collect();
        self.put(offset, &mut buffers, control)?;
        self.progress.fetch_add(len, Ordering::Relaxed);
        Ok(())
    }

    fn put(&self, offset: u64, buffers: &mut [IoSlice<'_>], control: &Control<'_>) -> Result<()> {
        self.counters.time(Stage::Write, || write_all_at(self.sink, offset, buffers, control))
    }
}

/// The most tensors that are written together: each has a header and data, and one call may name
/// only so many buffers.
const MOST: usize = crate::sys::MAX_VECTORS / 2;

/// Groups tensors that are on a device for [`Pass::write_staged`]: neighbours in the file that fit
/// into a unit together.
pub fn group(items: &[Item<'_>], from: usize) -> Result<Vec<usize>> {
    let unit = UNIT_LEN;
    let mut group: Vec<usize> = Vec::new();
    let (mut used, mut end) = (0usize, None);
    let mut device = None;
    for (tensor, item) in items.iter().enumerate().skip(from) {
        let Data::Device(bytes) = &item.data else { break };
        let len = bytes.memory.size().next_multiple_of(crate::mem::ALIGNMENT);
        let name = bytes.device.name();
        let fits = used + len <= unit
            && group.len() < MOST
            && end.is_none_or(|end| end == item.entry.header_offset)
            && device.is_none_or(|device| device == name);
        if !group.is_empty() && !fits {
            break;
        }
        group.push(tensor);
        (used, end, device) = (used + len, Some(item.entry.end()), Some(name));
        if used > unit {
            break;
        }
    }
    Ok(group)
}
