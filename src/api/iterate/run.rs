//! The load of an iterator, on a thread of its own, in the order of the file. Tensors that can be
//! read straight to their destination come in one read, others in groups by way of host memory.

use std::collections::HashSet;
use std::sync::atomic::{AtomicBool, Ordering};
use std::thread;
use std::time::Duration;

use super::shared::{Shared, ToDevice};
use super::window::{Asker, Item, Memory, Window};
use crate::api::headers::{Headers, try_key};
use crate::api::load::load_counted;
use crate::api::load_options::LoadOptions;
use crate::api::selection::Selection;
use crate::api::slice_rules::RunRules;
use crate::api::slices::{are_plain, direct_runs};
use crate::api::upload::{Destination, OneDevice, Upload};
use crate::cancel::Cancel;
use crate::codec::hash::{Digests, Verify};
use crate::engine::landing::{Marks, Receiver};
use crate::engine::plan::{Extent, Place, SMALL};
use crate::engine::read::{Begun, Codec, Reading, read};
use crate::engine::target::owned::{Location, Owned, Store};
use crate::error::{Error, Result};
use crate::fallible::{LISTS, collected, listed, push};
use crate::format::catalog::Entry;
use crate::io::as_refs;
use crate::mem::HostBuffer;
use crate::mem::device::{DeviceBlocks, Streams};
use crate::stats::{PAGEABLE, Stage};

/// Poll interval of a group that waits for room: the iterator may have been closed.
const TICK: Duration = Duration::from_millis(20);

/// Loads all tensors.
pub fn run(shared: &Shared, streams: Option<&Streams>) -> Result<()> {
    let cancel = || match shared.window.is_closed() {
        true => Err(Error::Cancelled),
        false => Ok(()),
    };
    let verify = shared.file.prove(&shared.options, &cancel)?;
    let options = LoadOptions { verify, ..shared.options };
    let rules = RunRules::of(&Selection::new(&shared.file, &shared.numbers)?, &options)?;
    shared.file.with_sound_copies(&cancel, || {
        let run = Run { shared, options: &options, rules, cancel: &cancel };
        // Run again after damage to a cached copy, this skips tensors that have landed.
        match (&shared.device, streams) {
            (Some((to, blocks)), Some(streams)) => run.on_device(to, blocks, streams),
            _ => run.all(&shared.window.missing(), None),
        }
    })
}

#[derive(Clone, Copy)]
struct Run<'r> {
    shared: &'r Shared,
    options: &'r LoadOptions,
    rules: RunRules,
    cancel: &'r dyn Cancel,
}

/// Tensors by place, each with its number in the file.
type Places = Vec<(usize, usize)>;

impl Run<'_> {
    fn on_device(&self, to: &ToDevice, blocks: &DeviceBlocks, streams: &Streams) -> Result<()> {
        let device = OneDevice { device: &to.device, consumer: to.consumer, pool: to.pool };
        let destination = Destination {
            devices: std::slice::from_ref(&device),
            memory: blocks,
            direct_storage: to.direct_storage,
        };
        let counters = &self.shared.counters;
        let upload = Upload {
            to: &destination,
            device_of: &[],
            streams: std::slice::from_ref(streams),
            options: self.options,
            counters,
            cancel: self.cancel,
        };
        let done = self.all(&self.shared.window.missing(), Some(&upload));
        // Memory is freed, or written again, only after copies to it have ended.
        streams.finish()?;
        done?;
        if to.pool.is_pageable() {
            counters.fallback(PAGEABLE);
        }
        Ok(())
    }

    /// Loads tensors, given by their places in the order of the file: those that are read straight
    /// to their destination, and groups of others at the same time.
    fn all(&self, tensors: &[usize], upload: Option<&Upload<'_>>) -> Result<()> {
        let file = &self.shared.file;
        let numbers = tensors.iter().filter_map(|&tensor| self.shared.numbers.get(tensor).copied());
        let numbers = listed(numbers, LISTS)?;
        let selection = Selection::new(file, &numbers)?;
        try_key(&selection, self.cancel)?;
        let (mut direct, mut grouped) = (Places::new(), Places::new());
        for ((&tensor, &number), entry) in tensors.iter().zip(&numbers).zip(&selection.entries) {
            let is_direct = self.is_direct(entry, upload.is_some())?;
            let list = if is_direct { &mut direct } else { &mut grouped };
            push(list, (tensor, number), LISTS)?;
        }
        if !file.is_seekable() && !grouped.is_empty() {
            // A stream can be read only once, in its order.
            grouped.append(&mut direct);
            grouped.sort_unstable();
        }
        if direct.is_empty() || grouped.is_empty() {
            self.direct(&direct, upload)?;
            return self.grouped(&grouped, upload);
        }
        let failed = AtomicBool::new(false);
        let cancel = || match failed.load(Ordering::Relaxed) {
            true => Err(Error::Cancelled),
            false => self.cancel.check(),
        };
        let upload = upload.map(|upload| Upload { cancel: &cancel, ..*upload });
        let run = Run { cancel: &cancel, ..*self };
        let noted = |outcome: Result<()>| {
            failed.fetch_or(outcome.is_err(), Ordering::Relaxed);
            outcome
        };
        let (one, other) = thread::scope(|scope| {
            let name = "tensorizer".to_owned();
            let groups = || noted(run.grouped(&grouped, upload.as_ref()));
            let thread = thread::Builder::new().name(name).spawn_scoped(scope, groups);
            let readers = noted(run.direct(&direct, upload.as_ref()));
            let panicked = |_| Err(Error::Bug("a load has panicked".to_owned()));
            let groups = match thread {
                Ok(thread) => thread.join().unwrap_or_else(panicked),
                Err(error) => Err(Error::io("starting a thread for", file.uri(), error)),
            };
            (readers, groups)
        });
        match (one, other) {
            // One half was cancelled because the other failed: the other's error is reported.
            (Err(Error::Cancelled), Err(error)) => Err(error),
            (one, other) => one.and(other),
        }
    }

    /// True if a tensor is read straight to its destination.
    fn is_direct(&self, entry: &Entry, on_device: bool) -> Result<bool> {
        let file = &self.shared.file;
        if entry.whole.is_some() {
            return Ok(direct_runs(file, entry, self.options.verify, &self.rules)?.is_some());
        }
        // A stream cannot be read again, should decryption in chunks turn out to be impossible.
        Ok(!on_device || file.decryption().is_none() || file.is_seekable())
    }

    /// Reads tensors straight to their destination.
    fn direct(&self, tensors: &[(usize, usize)], upload: Option<&Upload<'_>>) -> Result<()> {
        let (shared, options) = (self.shared, self.options);
        let (file, window) = (&shared.file, &shared.window);
        let numbers = listed(tensors.iter().map(|&(_, number)| number), LISTS)?;
        let selection = Selection::new(file, &numbers)?;
        let plan = Plan::new(&selection, tensors, options.verify, &self.rules)?;
        for &tensor in &plan.unread {
            window.land(tensor, without_data(window, tensor, upload.is_some())?, Marks::new())?;
        }
        let headers = Headers::new(&selection, options.verify, &|_, _| Ok(()))?;
        let codec = OfExtents { headers: &headers, selected: &plan.selected };
        let sources = file.sources();
        let store = Store::default();
        let receiver = Landings {
            run: self,
            plan: &plan,
            numbers: &numbers,
            headers: &headers,
            store: &store,
            upload,
        };
        let what = Reading {
            files: &as_refs(&sources),
            extents: &plan.extents,
            codec: &codec,
            verify: options.verify,
            decrypts: headers.decrypts(),
            readers: options.readers,
            memory: options.memory,
            shares_cache: options.shares_cache,
            receiver: Some((&receiver, &plan.tensors)),
        };
        let Some(upload) = upload else {
            let mut target = Owned::new(&plan.locations, window.lens(), &store);
            return read(&what, &mut target, &shared.counters, self.cancel).map(drop);
        };
        let place = |location: &Location| Place { block: location.tensor, offset: location.offset };
        let places = listed(plan.locations.iter().map(place), LISTS)?;
        upload.read(&what, (&[], &places), &mut || Ok(false)).map(drop)
    }

    /// Loads tensors group by group, by way of host memory.
    fn grouped(&self, tensors: &[(usize, usize)], upload: Option<&Upload<'_>>) -> Result<()> {
        let window = &self.shared.window;
        let mut left = tensors;
        while let Some(&(first, _)) = left.first() {
            let (now, later) = left.split_at(self.group_len(left)?);
            left = later;
            let last = now.last().map_or(first, |&(tensor, _)| tensor);
            while !window.admits(Asker::Groups, first, last) {
                self.cancel.check()?;
                window.wait_for_room(Asker::Groups, TICK);
            }
            let numbers = listed(now.iter().map(|&(_, number)| number), LISTS)?;
            match upload {
                None => self.group_to_host(now, &numbers)?,
                Some(upload) => self.group_to_device(now, &numbers, upload)?,
            }
        }
        Ok(())
    }

    /// Returns how many of the first tensors form one group: all slices, or all whole. The span of
    /// a group, with other tensors that lie in it, is limited to a part of the bytes read ahead.
    fn group_len(&self, tensors: &[(usize, usize)]) -> Result<usize> {
        let (file, window) = (&self.shared.file, &self.shared.window);
        let most = window.part();
        let Some(&(first, number)) = tensors.first() else { return Ok(0) };
        let sliced = file.entry(number)?.whole.is_some();
        let (mut bytes, mut end, mut count) = (0u64, first, 0);
        for &(tensor, number) in tensors {
            let span = window.lens().get(end..=tensor).unwrap_or(&[]);
            bytes = span.iter().fold(bytes, |sum, len| sum.saturating_add(*len));
            end = tensor + 1;
            if count > 0 && (bytes > most || file.entry(number)?.whole.is_some() != sliced) {
                break;
            }
            count += 1;
        }
        Ok(count)
    }

    fn group_to_host(&self, tensors: &[(usize, usize)], numbers: &[usize]) -> Result<()> {
        let Run { shared, options, cancel, .. } = *self;
        let loaded = load_counted(&shared.file, numbers, options, &shared.counters, cancel)?;
        for (&(tensor, _), loaded) in tensors.iter().zip(loaded) {
            // Small tensors share blocks: a copy does not keep the whole block alive.
            let small = (loaded.memory.bytes().len() as u64) < SMALL;
            let own = if small { loaded.memory.copied()? } else { loaded.memory };
            shared.window.land(tensor, Memory::Host(own), Marks::new())?;
        }
        Ok(())
    }

    fn group_to_device(
        &self,
        tensors: &[(usize, usize)],
        numbers: &[usize],
        upload: &Upload<'_>,
    ) -> Result<()> {
        let (file, window) = (&self.shared.file, &self.shared.window);
        let places = listed(tensors.iter().map(|&(block, _)| Place { block, offset: 0 }), LISTS)?;
        let entries = collected(numbers.iter().map(|&number| file.entry(number)), LISTS)?;
        let sliced = entries.iter().all(|entry| entry.whole.is_some());
        if sliced && are_plain(file, upload.options.verify) {
            let slices = listed(entries.into_iter().zip(places), LISTS)?;
            upload.gather(file, &slices, &self.rules)?;
        } else {
            upload.through_host(file, numbers, &places)?;
        }
        let marks = upload.marks()?;
        for &(tensor, number) in tensors {
            let zeros = file.entry(number)?.is_meta();
            let memory = if zeros { Memory::Zeros } else { Memory::Block(tensor) };
            window.land(tensor, memory, marks.clone())?;
        }
        Ok(())
    }
}

/// Returns the memory of a tensor that has no data in the file.
fn without_data(window: &Window, tensor: usize, on_device: bool) -> Result<Memory> {
    if on_device {
        return Ok(Memory::Zeros);
    }
    let len = window.lens().get(tensor).copied().unwrap_or(0);
    let len = usize::try_from(len).map_err(|_| bug(tensor))?;
    HostBuffer::zeroed(len).map(Memory::Host)
}

fn bug(number: usize) -> Error {
    Error::Bug(format!("no tensor {number} in a plan"))
}

/// The plan of one read.
#[derive(Default)]
struct Plan {
    extents: Vec<Extent>,
    /// The destination of each extent's data.
    locations: Vec<Location>,
    /// The place of each extent's tensor in the order of the file.
    tensors: Vec<usize>,
    /// The number of each extent's tensor in the selection.
    selected: Vec<usize>,
    /// Tensors of which nothing is read, by their places in the order of the file.
    unread: Vec<usize>,
    /// Tensors without data, of which only the header is read.
    without_data: HashSet<usize>,
}

impl Plan {
    fn new(
        selection: &Selection<'_>,
        tensors: &[(usize, usize)],
        verify: Verify,
        rules: &RunRules,
    ) -> Result<Self> {
        let mut plan = Plan::default();
        let extents = selection.extents()?;
        for (at, (entry, whole)) in selection.entries.iter().zip(extents).enumerate() {
            let &(tensor, _) = tensors.get(at).ok_or_else(|| bug(at))?;
            if entry.whole.is_none() && whole.end() > whole.header_offset {
                if whole.data_len == 0 {
                    plan.without_data.insert(tensor);
                }
                let like = whole.data_offset;
                plan.add(at, whole, Location { tensor, offset: 0, like })?;
                continue;
            }
            let runs = match entry.whole {
                Some(_) => direct_runs(selection.file, entry, verify, rules)?,
                None => None,
            };
            let runs = runs.unwrap_or(Vec::new());
            if runs.is_empty() {
                push(&mut plan.unread, tensor, LISTS)?;
            }
            for (extent, offset) in runs {
                let like = extent.data_offset.wrapping_sub(offset);
                plan.add(at, extent, Location { tensor, offset, like })?;
            }
        }
        Ok(plan)
    }

    fn add(&mut self, selected: usize, extent: Extent, location: Location) -> Result<()> {
        push(&mut self.extents, extent, LISTS)?;
        push(&mut self.tensors, location.tensor, LISTS)?;
        push(&mut self.locations, location, LISTS)?;
        push(&mut self.selected, selected, LISTS)
    }
}

/// A codec for extents, of which several may be of one tensor: it passes them on by tensor.
struct OfExtents<'h> {
    headers: &'h Headers<'h>,
    /// The number of each extent's tensor in the selection.
    selected: &'h [usize],
}

impl OfExtents<'_> {
    fn of(&self, extent: usize) -> Result<usize> {
        self.selected.get(extent).copied().ok_or_else(|| bug(extent))
    }
}

impl Codec for OfExtents<'_> {
    fn header(&self, extent: usize, raw: &[u8], cancel: &dyn Cancel) -> Result<Begun> {
        self.headers.header(self.of(extent)?, raw, cancel)
    }

    fn decrypt(
        &self,
        extent: usize,
        start: u64,
        bytes: &mut [u8],
        cancel: &dyn Cancel,
    ) -> Result<bool> {
        self.headers.decrypt(self.of(extent)?, start, bytes, cancel)
    }

    fn compare(&self, extent: usize, digests: &Digests) -> Result<()> {
        self.headers.compare(self.of(extent)?, digests)
    }
}

/// The receiver that passes tensors from the engine to the window.
struct Landings<'l> {
    run: &'l Run<'l>,
    plan: &'l Plan,
    /// Numbers of the tensors of the selection.
    numbers: &'l [usize],
    headers: &'l Headers<'l>,
    /// Host memory that is being filled.
    store: &'l Store,
    upload: Option<&'l Upload<'l>>,
}

impl Landings<'_> {
    fn window(&self) -> &Window {
        &self.run.shared.window
    }
}

impl Receiver for Landings<'_> {
    fn batch_len(&self) -> u64 {
        self.window().part()
    }

    fn admits(&self, first: usize, last: usize) -> Result<bool> {
        Ok(self.window().admits(Asker::Readers, first, last))
    }

    fn wait(&self, time: Duration) {
        self.window().wait_for_room(Asker::Readers, time);
    }

    fn landed(&self, tensors: Vec<(usize, Marks)>) -> Result<()> {
        let on_device = self.upload.is_some();
        let items = tensors.into_iter().map(|(tensor, marks)| {
            let memory = if self.plan.without_data.contains(&tensor) {
                without_data(self.window(), tensor, on_device)?
            } else if on_device {
                Memory::Block(tensor)
            } else {
                Memory::Host(self.store.take(tensor)?)
            };
            Ok(Item { tensor, memory, marks })
        });
        self.window().land_together(collected(items, LISTS)?)
    }

    /// Decrypts a tensor as a whole.
    fn sealed(&self, tensor: usize, extent: usize) -> Result<()> {
        let Run { shared, cancel, .. } = self.run;
        let &selected = self.plan.selected.get(extent).ok_or_else(|| bug(extent))?;
        let Some(upload) = self.upload else {
            let mut buffer = self.store.take(tensor)?;
            let bytes = buffer.bytes_mut();
            let whole = || self.headers.whole(selected, bytes, *cancel);
            shared.counters.time(Stage::Decrypt, whole)?;
            shared.counters.bytes(buffer.bytes().len() as u64);
            return shared.window.land(tensor, Memory::Host(buffer), Marks::new());
        };
        let why = "decrypted in host memory: pieces of encryption of unusual length";
        shared.counters.fallback(why);
        // Copies that are under way must not overwrite these bytes later.
        upload.finish()?;
        let &number = self.numbers.get(selected).ok_or_else(|| bug(selected))?;
        upload.through_host(&shared.file, &[number], &[Place { block: tensor, offset: 0 }])?;
        shared.window.land(tensor, Memory::Block(tensor), upload.marks()?)
    }
}
