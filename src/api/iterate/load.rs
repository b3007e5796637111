//! The load of an iterator, on a thread of its own, in the order of the file. Tensors that can be
//! read straight to their destination are loaded by one read. Others are loaded in groups, through
//! host memory.

use std::sync::atomic::{AtomicBool, Ordering};
use std::thread;
use std::time::Duration;

use super::read_plan::{ReadPlan, missing_from_plan};
use super::shared::{IteratorDevice, IteratorState};
use super::window::{ReadyMemory, Requester, WaitingTensor, Window};
use crate::api::device_upload::{Destination, DestinationDevice, DeviceUpload};
use crate::api::headers::{HeaderCodec, try_key};
use crate::api::load::load_counted;
use crate::api::load_options::LoadOptions;
use crate::api::selection::Selection;
use crate::api::slice_rules::RangeRules;
use crate::api::slices::{are_plain, direct_ranges};
use crate::cancel::Cancel;
use crate::codec::hash::Digests;
use crate::engine::completion::{CopyEvents, TensorReceiver};
use crate::engine::plan::{BlockLocation, SMALL};
use crate::engine::read::{Codec, HeaderInfo, ReadRequest, read};
use crate::engine::target::owned::{ExtentLocation, PerTensorTarget, TensorBuffers};
use crate::error::{Error, Result};
use crate::fallible::{LISTS, try_collect, try_collect_results, try_push};
use crate::format::catalog::Entry;
use crate::io::as_refs;
use crate::mem::HostBuffer;
use crate::mem::device::{DeviceBlocks, Streams};
use crate::stats::{PAGEABLE, Stage};

/// Poll interval of a group that waits for room: the iterator may have been closed.
const TICK: Duration = Duration::from_millis(20);

/// Loads all tensors.
pub fn run(shared: &IteratorState, streams: Option<&Streams>) -> Result<()> {
    let cancel = || match shared.window.is_closed() {
        true => Err(Error::Cancelled),
        false => Ok(()),
    };
    let verify = shared.file.verify_hub_checksums(&shared.options, &cancel)?;
    let options = LoadOptions { verify, ..shared.options };
    let rules = RangeRules::of(&Selection::new(&shared.file, &shared.numbers)?, &options)?;
    let done = shared.file.with_intact_copies(&cancel, || {
        let run = IteratorLoad { shared, options: &options, rules, cancel: &cancel };
        // Run again after damage to a cached copy, this skips tensors that were delivered.
        match (&shared.device, streams) {
            (Some((to, blocks)), Some(streams)) => run.on_device(to, blocks, streams),
            _ => run.all(&shared.window.undelivered(), None),
        }
    });
    shared.file.report_fallbacks(&shared.counters);
    done
}

#[derive(Clone, Copy)]
struct IteratorLoad<'r> {
    shared: &'r IteratorState,
    options: &'r LoadOptions,
    rules: RangeRules,
    cancel: &'r dyn Cancel,
}

/// Tensors by position in the order of the file, each with its number in the file.
type NumberedTensors = Vec<(usize, usize)>;

impl IteratorLoad<'_> {
    fn on_device(
        &self,
        to: &IteratorDevice,
        blocks: &DeviceBlocks,
        streams: &Streams,
    ) -> Result<()> {
        let device = DestinationDevice { device: &to.device, consumer: to.consumer, pool: to.pool };
        let destination = Destination {
            devices: std::slice::from_ref(&device),
            memory: blocks,
            direct_storage: to.direct_storage,
        };
        let counters = &self.shared.counters;
        let upload = DeviceUpload {
            to: &destination,
            device_of_block: &[],
            streams: std::slice::from_ref(streams),
            options: self.options,
            counters,
            cancel: self.cancel,
        };
        let done = self.all(&self.shared.window.undelivered(), Some(&upload));
        // Memory is freed, or written again, only after copies to it have ended.
        streams.finish()?;
        done?;
        if to.pool.is_pageable() {
            counters.fallback(PAGEABLE);
        }
        Ok(())
    }

    /// Loads tensors, given by their positions in the order of the file. Tensors that are read
    /// straight to their destination and groups of other tensors are loaded at the same time.
    fn all(&self, tensors: &[usize], upload: Option<&DeviceUpload<'_>>) -> Result<()> {
        let file = &self.shared.file;
        let numbers = tensors.iter().filter_map(|&tensor| self.shared.numbers.get(tensor).copied());
        let numbers = try_collect(numbers, LISTS)?;
        let selection = Selection::new(file, &numbers)?;
        try_key(&selection, self.cancel)?;
        let (mut direct, mut grouped) = (NumberedTensors::new(), NumberedTensors::new());
        for ((&tensor, &number), entry) in tensors.iter().zip(&numbers).zip(&selection.entries) {
            let is_direct = self.is_direct(entry, upload.is_some())?;
            let list = if is_direct { &mut direct } else { &mut grouped };
            try_push(list, (tensor, number), LISTS)?;
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
        let upload = upload.map(|upload| DeviceUpload { cancel: &cancel, ..*upload });
        let run = IteratorLoad { cancel: &cancel, ..*self };
        let note_failure = |outcome: Result<()>| {
            failed.fetch_or(outcome.is_err(), Ordering::Relaxed);
            outcome
        };
        let (one, other) = thread::scope(|scope| {
            let name = "tensorizer".to_owned();
            let groups = || note_failure(run.grouped(&grouped, upload.as_ref()));
            let thread = thread::Builder::new().name(name).spawn_scoped(scope, groups);
            let readers = note_failure(run.direct(&direct, upload.as_ref()));
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
            return Ok(direct_ranges(file, entry, self.options.verify, &self.rules)?.is_some());
        }
        // A stream cannot be read a second time if decryption in chunks fails.
        Ok(!on_device || file.decryption().is_none() || file.is_seekable())
    }

    /// Reads tensors straight to their destination.
    fn direct(&self, tensors: &[(usize, usize)], upload: Option<&DeviceUpload<'_>>) -> Result<()> {
        let (shared, options) = (self.shared, self.options);
        let (file, window) = (&shared.file, &shared.window);
        let numbers = try_collect(tensors.iter().map(|&(_, number)| number), LISTS)?;
        let selection = Selection::new(file, &numbers)?;
        let plan = ReadPlan::new(&selection, tensors, options.verify, &self.rules)?;
        for &tensor in &plan.unread {
            window.deliver(
                tensor,
                without_data(window, tensor, upload.is_some())?,
                CopyEvents::new(),
            )?;
        }
        let headers = HeaderCodec::new(&selection, options.verify, &|_, _| Ok(()))?;
        let codec = ExtentCodec { headers: &headers, selected: &plan.selected };
        let sources = file.sources();
        let store = TensorBuffers::default();
        let receiver = WindowReceiver {
            run: self,
            plan: &plan,
            numbers: &numbers,
            headers: &headers,
            store: &store,
            upload,
        };
        let request = ReadRequest {
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
            let mut target = PerTensorTarget::new(&plan.locations, window.lens(), &store);
            return read(&request, &mut target, &shared.counters, self.cancel).map(drop);
        };
        let to_block = |location: &ExtentLocation| BlockLocation {
            block: location.tensor,
            offset: location.offset,
        };
        let locations = try_collect(plan.locations.iter().map(to_block), LISTS)?;
        upload.read(&request, (&[], &locations), &mut || Ok(false)).map(drop)
    }

    /// Loads tensors group by group, through host memory.
    fn grouped(&self, tensors: &[(usize, usize)], upload: Option<&DeviceUpload<'_>>) -> Result<()> {
        let window = &self.shared.window;
        let mut remaining = tensors;
        while let Some(&(first, _)) = remaining.first() {
            let (now, later) = remaining.split_at(self.group_len(remaining)?);
            remaining = later;
            let last = now.last().map_or(first, |&(tensor, _)| tensor);
            while !window.admits(Requester::Groups, first, last) {
                self.cancel.check()?;
                window.wait_for_room(Requester::Groups, TICK);
            }
            let numbers = try_collect(now.iter().map(|&(_, number)| number), LISTS)?;
            match upload {
                None => self.group_to_host(now, &numbers)?,
                Some(upload) => self.group_to_device(now, &numbers, upload)?,
            }
        }
        Ok(())
    }

    /// Returns how many of the first tensors form one group, which has either slices or whole
    /// tensors. The file range of a group, unwanted tensors included, is limited to a part of the
    /// bytes read ahead.
    fn group_len(&self, tensors: &[(usize, usize)]) -> Result<usize> {
        let (file, window) = (&self.shared.file, &self.shared.window);
        let most = window.max_batch_len();
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
        let IteratorLoad { shared, options, cancel, .. } = *self;
        let loaded = load_counted(&shared.file, numbers, options, &shared.counters, cancel)?;
        for (&(tensor, _), loaded) in tensors.iter().zip(loaded) {
            // Small tensors share blocks: a copy does not keep the whole block alive.
            let small = (loaded.memory.bytes().len() as u64) < SMALL;
            let own = if small { loaded.memory.copied()? } else { loaded.memory };
            shared.window.deliver(tensor, ReadyMemory::Host(own), CopyEvents::new())?;
        }
        Ok(())
    }

    fn group_to_device(
        &self,
        tensors: &[(usize, usize)],
        numbers: &[usize],
        upload: &DeviceUpload<'_>,
    ) -> Result<()> {
        let (file, window) = (&self.shared.file, &self.shared.window);
        let locations = try_collect(
            tensors.iter().map(|&(block, _)| BlockLocation { block, offset: 0 }),
            LISTS,
        )?;
        let entries = try_collect_results(numbers.iter().map(|&number| file.entry(number)), LISTS)?;
        let sliced = entries.iter().all(|entry| entry.whole.is_some());
        if sliced && are_plain(file, upload.options.verify) {
            let slices = try_collect(entries.into_iter().zip(locations), LISTS)?;
            upload.gather(file, &slices, &self.rules)?;
        } else {
            upload.through_host(file, numbers, &locations)?;
        }
        let copy_events = upload.copy_events()?;
        for &(tensor, number) in tensors {
            let zeros = file.entry(number)?.is_meta();
            let memory = if zeros { ReadyMemory::Zeros } else { ReadyMemory::Block(tensor) };
            window.deliver(tensor, memory, copy_events.clone())?;
        }
        Ok(())
    }
}

/// Returns the memory of a tensor that has no data in the file.
fn without_data(window: &Window, tensor: usize, on_device: bool) -> Result<ReadyMemory> {
    if on_device {
        return Ok(ReadyMemory::Zeros);
    }
    let len = window.lens().get(tensor).copied().unwrap_or(0);
    let len = usize::try_from(len).map_err(|_| missing_from_plan(tensor))?;
    HostBuffer::zeroed(len).map(ReadyMemory::Host)
}

/// A codec for extents, of which several may be of one tensor: it passes them on by tensor.
struct ExtentCodec<'h> {
    headers: &'h HeaderCodec<'h>,
    /// The number of each extent's tensor in the selection.
    selected: &'h [usize],
}

impl ExtentCodec<'_> {
    fn tensor_of(&self, extent: usize) -> Result<usize> {
        self.selected.get(extent).copied().ok_or_else(|| missing_from_plan(extent))
    }
}

impl Codec for ExtentCodec<'_> {
    fn header(&self, extent: usize, raw: &[u8], cancel: &dyn Cancel) -> Result<HeaderInfo> {
        self.headers.header(self.tensor_of(extent)?, raw, cancel)
    }

    fn decrypt(
        &self,
        extent: usize,
        start: u64,
        bytes: &mut [u8],
        cancel: &dyn Cancel,
    ) -> Result<bool> {
        self.headers.decrypt(self.tensor_of(extent)?, start, bytes, cancel)
    }

    fn compare(&self, extent: usize, digests: &Digests) -> Result<()> {
        self.headers.compare(self.tensor_of(extent)?, digests)
    }
}

/// The receiver that passes tensors from the engine to the window.
struct WindowReceiver<'l> {
    run: &'l IteratorLoad<'l>,
    plan: &'l ReadPlan,
    /// Numbers of the tensors of the selection.
    numbers: &'l [usize],
    headers: &'l HeaderCodec<'l>,
    /// Host memory that is being filled.
    store: &'l TensorBuffers,
    upload: Option<&'l DeviceUpload<'l>>,
}

impl WindowReceiver<'_> {
    fn window(&self) -> &Window {
        &self.run.shared.window
    }
}

impl TensorReceiver for WindowReceiver<'_> {
    fn batch_len(&self) -> u64 {
        self.window().max_batch_len()
    }

    fn admits(&self, first: usize, last: usize) -> Result<bool> {
        Ok(self.window().admits(Requester::Readers, first, last))
    }

    fn wait(&self, time: Duration) {
        self.window().wait_for_room(Requester::Readers, time);
    }

    fn deliver(&self, tensors: Vec<(usize, CopyEvents)>) -> Result<()> {
        let on_device = self.upload.is_some();
        let items = tensors.into_iter().map(|(tensor, copy_events)| {
            let memory = if self.plan.without_data.contains(&tensor) {
                without_data(self.window(), tensor, on_device)?
            } else if on_device {
                ReadyMemory::Block(tensor)
            } else {
                ReadyMemory::Host(self.store.take(tensor)?)
            };
            Ok(WaitingTensor { tensor, memory, copy_events })
        });
        self.window().deliver_all(try_collect_results(items, LISTS)?)
    }

    /// Decrypts a tensor as a whole.
    fn deliver_undecrypted(&self, tensor: usize, extent: usize) -> Result<()> {
        let IteratorLoad { shared, cancel, .. } = self.run;
        let &selected = self.plan.selected.get(extent).ok_or_else(|| missing_from_plan(extent))?;
        let Some(upload) = self.upload else {
            let mut buffer = self.store.take(tensor)?;
            let bytes = buffer.bytes_mut();
            let decrypt = || self.headers.decrypt_and_verify(selected, bytes, *cancel);
            shared.counters.time(Stage::Decrypt, decrypt)?;
            shared.counters.bytes(buffer.bytes().len() as u64);
            return shared.window.deliver(tensor, ReadyMemory::Host(buffer), CopyEvents::new());
        };
        let why = "decrypted in host memory: the file was encrypted in pieces of an unusual length";
        shared.counters.fallback(why);
        // Copies that are under way must not overwrite these bytes later.
        upload.finish()?;
        let &number = self.numbers.get(selected).ok_or_else(|| missing_from_plan(selected))?;
        upload.through_host(
            &shared.file,
            &[number],
            &[BlockLocation { block: tensor, offset: 0 }],
        )?;
        shared.window.deliver(tensor, ReadyMemory::Block(tensor), upload.copy_events()?)
    }
}
