//! The caller's half of an iterator.

use std::sync::Arc;
use std::thread::{self, JoinHandle};
use std::time::Duration;

use super::load;
use super::options::IterateOptions;
use super::shared::{IteratorDevice, IteratorState};
use super::window::{ReadyMemory, WaitingTensor, Window};
use crate::api::file::TensorFile;
use crate::api::selection::Selection;
use crate::cancel::{self, Cancel, POLL};
use crate::engine::load_options::LoadOptions;
use crate::error::{Error, Result};
use crate::mem::device::{Consumer, DeviceBlock, DeviceBlocks, DeviceMemory, Event, Streams};
use crate::stats::Counters;
use crate::sys::process::DropInOwner;

/// The most bytes of dropped tensors that wait for the next ones.
const MAX_SPARE: u64 = 64 << 20;
/// Local tensors of no more bytes are loaded at once.
const INLINE_LEN: u64 = 1 << 20;

/// Allocates memory of a device, on the caller's thread.
pub trait Allocate {
    /// Allocates memory for tensors of these lengths. `first` is the position of the first of them.
    fn allocate(&mut self, first: usize, lens: &[u64]) -> Result<Vec<DeviceMemory>>;

    /// Returns the stream that is current on the device.
    fn consumer(&mut self) -> Result<Consumer>;
}

/// A tensor that is handed out to the caller.
pub struct ReadyTensor {
    /// Its number in the file.
    pub number: usize,
    /// Its bytes. On a device, only work that is queued on the current stream from now on may use
    /// them.
    pub memory: ReadyMemory,
}

/// Tensors of a file, one by one. Dropping it ends the load, and waits for reads and copies.
pub struct TensorIterator {
    shared: DropInOwner<Arc<IteratorState>>,
    /// The thread of the load; None if it ran on the caller's.
    thread: DropInOwner<Option<JoinHandle<()>>>,
    /// True once the report of the load is published.
    finished: bool,
    /// The event that the caller's stream waits for already, and that stream.
    awaited: DropInOwner<Option<(Consumer, Arc<dyn Event>)>>,
}

impl TensorIterator {
    /// Begins to load tensors of a file, given by number, to host memory or a device. `allocate` is
    /// for a device only.
    pub fn new(
        file: &TensorFile,
        numbers: &[usize],
        device: Option<IteratorDevice>,
        options: &IterateOptions,
        allocate: Option<&mut dyn Allocate>,
    ) -> Result<Self> {
        let selection = Selection::new(file, numbers)?;
        selection.check()?;
        let on_device = device.is_some();
        let lens = selection.entries.iter().map(|entry| {
            let len = entry.memory_len();
            len.filter(|len| i64::try_from(*len).is_ok()).ok_or_else(|| {
                Error::InvalidArgument(format!("tensor `{}` does not fit into memory", entry.name))
            })
        });
        let lens = lens.collect::<Result<Vec<_>>>()?;
        let (budget, load) = memory_shares(&selection, &lens, on_device, options)?;
        // Dropped tensors are a part of the read-ahead. A limit of memory has no room for them.
        let spared = !on_device && load.memory.bytes().is_none();
        let spare = if spared { (budget / 4).min(MAX_SPARE) } else { 0 };
        let blocks = DeviceBlocks::new(if on_device { lens.len() } else { 0 });
        let inline = !on_device && is_short(&selection, &lens, budget - spare);
        let shared = Arc::new(IteratorState {
            file: file.duplicate(),
            numbers: selection.numbers.clone(),
            spare,
            options: load,
            complete: options.complete,
            window: Window::new(lens, budget - spare, options.order, on_device),
            device: device.map(|device| (device, blocks)),
            counters: Counters::default(),
        });
        let streams = shared.device.as_ref().map(|(to, _)| Streams::open(&to.device, to.consumer));
        let streams = streams.transpose()?;
        let shared_with_thread = Arc::clone(&shared);
        let work = move || {
            let panicked = || Err(Error::Bug("a load has panicked".to_owned()));
            let run =
                std::panic::AssertUnwindSafe(|| load::run(&shared_with_thread, streams.as_ref()));
            let outcome = std::panic::catch_unwind(run).unwrap_or_else(|_| panicked());
            shared_with_thread.window.end(outcome);
        };
        let thread = if inline {
            work();
            None
        } else {
            let thread = thread::Builder::new().name("tensorizer".to_owned()).spawn(work);
            Some(thread.map_err(|e| Error::io("starting a thread for", file.uri(), e))?)
        };
        let (shared, thread) = (DropInOwner::new(shared), DropInOwner::new(thread));
        let awaited = DropInOwner::new(None);
        let iterator = TensorIterator { shared, thread, finished: false, awaited };
        if let Some(allocate) = allocate {
            iterator.allocate(allocate)?;
        }
        Ok(iterator)
    }

    /// Waits for the next tensors: one, or several small ones. Several small tensors count against
    /// the budget until the next call. None at the end.
    pub fn next(
        &mut self,
        mut allocate: Option<&mut dyn Allocate>,
        cancel: &dyn Cancel,
    ) -> Result<Vec<ReadyTensor>> {
        if let (Some(allocate), Some((to, _))) = (allocate.as_deref_mut(), &self.shared.device) {
            // Fails if the stream is being captured into a graph, of which a load cannot be a part.
            to.device.check_consumer(allocate.consumer()?)?;
        }
        loop {
            cancel.check()?;
            if let Some(allocate) = allocate.as_deref_mut() {
                self.allocate(allocate)?;
            }
            let Some(items) = self.shared.window.take(POLL)? else {
                self.finish();
                return Ok(Vec::new());
            };
            if !items.is_empty() {
                let consumer = allocate.map(|allocate| allocate.consumer()).transpose()?;
                return self.handed_out(items, consumer, cancel);
            }
        }
    }

    /// Hands tensors out: waits for their copies, or makes the caller's stream wait for them.
    fn handed_out(
        &mut self,
        items: Vec<WaitingTensor>,
        consumer: Option<Consumer>,
        cancel: &dyn Cancel,
    ) -> Result<Vec<ReadyTensor>> {
        let shared = &**self.shared;
        let device = shared.device.as_ref().map(|(to, _)| &to.device);
        let _entered = device.map(|device| device.enter()).transpose()?;
        let landed = items.into_iter().map(|WaitingTensor { tensor, memory, copy_events }| {
            for copy_event in copy_events {
                let Some(consumer) = consumer else { continue };
                let already_awaited = self.awaited.as_ref().is_some_and(|(stream, awaited)| {
                    *stream == consumer && Arc::ptr_eq(awaited, &copy_event)
                });
                if !already_awaited {
                    if shared.complete {
                        wait(&*copy_event, cancel)?;
                    } else {
                        copy_event.delay_stream(consumer.0)?;
                    }
                    *self.awaited = Some((consumer, copy_event));
                }
            }
            let number = shared.numbers.get(tensor).copied();
            let number = number.ok_or_else(|| Error::Bug(format!("no tensor {tensor}")))?;
            Ok(ReadyTensor { number, memory })
        });
        landed.collect()
    }

    /// Allocates the memory that the budget allows now.
    fn allocate(&self, allocate: &mut dyn Allocate) -> Result<()> {
        let Some((to, blocks)) = &self.shared.device else { return Ok(()) };
        let window = &self.shared.window;
        while let Some(tensors) = window.to_allocate() {
            // Tensors without data become zeros when they are handed out: their blocks are empty.
            let numbers = self.shared.numbers.get(tensors.clone()).unwrap_or(&[]).iter();
            let lens = numbers.map(|&number| Ok(self.shared.file.entry(number)?.loaded_len()));
            let lens = lens.collect::<Result<Vec<_>>>()?;
            let memory = match allocate.allocate(tensors.start, &lens) {
                Err(Error::DeviceMemory { .. }) if window.allocation_failed(lens.len()) => continue,
                allocated => allocated?,
            };
            // Work that was queued on the stream before may still use the memory.
            let after = Some(Arc::clone(&to.device).record_event(allocate.consumer()?)?);
            for (tensor, memory) in tensors.clone().zip(memory) {
                blocks.insert(tensor, DeviceBlock { memory, after: after.clone() })?;
            }
            window.allocated(tensors.len());
        }
        Ok(())
    }

    /// Returns a handle that ends the load from another thread.
    pub fn closer(&self) -> Closer {
        Closer(DropInOwner::new(Arc::clone(&self.shared)))
    }

    /// Ends the load, and waits for its reads and copies. Closing again does nothing.
    pub fn close(&mut self) {
        self.shared.window.close();
        self.join();
    }

    fn join(&mut self) {
        if let Some(thread) = self.thread.take() {
            // A read from a Python object may run the garbage collector, which may drop the
            // iterator on the thread of the load. That thread cannot join itself; it ends on its
            // own.
            if thread.thread().id() != thread::current().id() {
                // A panic has become an error.
                let _ = thread.join();
            }
        }
        // A `Closer` may outlive the iterator, and must not keep connections open.
        self.shared.file.close();
    }

    /// Waits for the load, and publishes the report of it.
    fn finish(&mut self) {
        if std::mem::replace(&mut self.finished, true) {
            return;
        }
        self.join();
        let shared = &**self.shared;
        let device = shared.device.as_ref().map_or("cpu", |(to, _)| to.device.name());
        shared.counters.publish("load", shared.file.uri(), device, shared.numbers.len());
    }
}

/// Waits until everything before an event has ended. The first sleep takes 50 µs, and each later
/// one twice as long as the one before, up to 2 ms.
fn wait(event: &dyn Event, cancel: &dyn Cancel) -> Result<()> {
    let mut pause = Duration::from_micros(50);
    while !event.passed()? {
        cancel::sleep(pause, cancel)?;
        pause = (pause * 2).min(Duration::from_millis(2));
    }
    Ok(())
}

/// True if tensors are loaded at once, as they take less time than a thread does.
fn is_short(selection: &Selection<'_>, lens: &[u64], budget: u64) -> bool {
    let total = lens.iter().fold(0, |sum: u64, len| sum.saturating_add(*len));
    total <= budget.min(INLINE_LEN)
        && !selection.is_sliced()
        && selection.file.sources().iter().all(|source| source.facts().is_local)
}

/// Divides the memory limit. Returns the bytes that are read ahead, and the options of the load,
/// which has the rest of the limit.
fn memory_shares(
    selection: &Selection<'_>,
    lens: &[u64],
    on_device: bool,
    options: &IterateOptions,
) -> Result<(u64, LoadOptions)> {
    let file = selection.file;
    let held = selection.held(options.load.verify);
    let min_memory = file.minimum_memory(selection.is_sliced(), on_device)?.saturating_add(held);
    let largest = lens.iter().copied().max().unwrap_or(0);
    let limit = options.load.memory.or_environment()?;
    let (budget, memory) = limit.tensors(options.buffer_bytes, largest, min_memory)?;
    Ok((budget, LoadOptions { memory, ..options.load }))
}

/// Ends the load of an iterator from another thread.
pub struct Closer(DropInOwner<Arc<IteratorState>>);

impl Closer {
    /// Ends the load, and calls that wait for tensors. Does not wait for the load to end.
    pub fn close(&self) {
        // In a forked child, the lock may have been held at the time of the fork.
        if self.0.owner().is_current() {
            self.0.window.close();
        }
    }

    /// Returns the counters of the load.
    pub fn counters(&self) -> &Counters {
        &self.0.counters
    }

    /// Refuses calls in a forked child: the load runs in the parent process.
    pub fn check_process(&self) -> Result<()> {
        if self.0.owner().is_current() {
            return Ok(());
        }
        let what = "this iterator was made before a fork(), by the parent process: make one in \
                    this process";
        Err(Error::Closed(what.to_owned()))
    }
}

impl Drop for TensorIterator {
    fn drop(&mut self) {
        // A forked child has no thread to wait for, and the lock may have been held at the time of
        // the fork.
        if self.shared.owner().is_current() {
            self.close();
        }
    }
}
