//! The load of an iterator, mostly on a thread of its own, in the order of the file.

use std::time::Duration;

use super::shared::{IteratorDevice, IteratorState};
use super::window::{ReadyMemory, WaitingTensor};
use crate::api::device::{DestinationDevice, DeviceLayout, DeviceMemoryBlocks, read_to_devices};
use crate::api::headers::try_key;
use crate::api::host_memory::{mapped_buffers, used_in_place};
use crate::api::reads::{Reads, Run, To};
use crate::api::selection::Selection;
use crate::codec::hash::Verify;
use crate::engine::completion::{CopyEvents, TensorReceiver};
use crate::engine::destination::host::{HostDestination, TensorBuffers, TensorMemory};
use crate::engine::load_options::LoadOptions;
use crate::engine::plan::BlockLocation;
use crate::error::{Error, Result};
use crate::mem::device::{DeviceBlocks, Streams};
use crate::mem::{Arena, HostBuffer};
use crate::numbers::TensorNumber;
use crate::sys::sync::{Mutex, unpoisoned};
use crate::sys::to_usize;

/// Loads all tensors.
pub fn run(shared: &IteratorState, streams: Option<&Streams>) -> Result<()> {
    let IteratorState { file, window, counters, .. } = shared;
    let cancel = || if window.is_closed() { Err(Error::Cancelled) } else { Ok(()) };
    let verify = file.compare_files(None, &shared.options, &cancel)?;
    let options = LoadOptions { verify, ..shared.options };
    let done = file.with_intact_copies(|| {
        let selection = Selection::new(file, &shared.numbers)?;
        try_key(&selection, &cancel)?;
        let in_host = shared.device.is_none();
        // Bytes that are compared with a hash are read.
        let map = options.map && in_host && options.verify == Verify::Nothing;
        let in_place = used_in_place(&selection, &LoadOptions { map, ..options })?;
        let mapped = mapped_buffers(&selection, &in_place)?;
        let reads = Reads::new(&selection, &options)?;
        let reads = reads.without(in_place.iter().map(Option::is_some).collect());
        let sizes = if in_host { reads.sizes() } else { Vec::new() };
        let buffers = TensorBuffers::new(sizes, shared.spare);
        let receiver = WindowReceiver {
            shared,
            selection: &selection,
            buffers: &buffers,
            mapped: Mutex::new(mapped),
        };
        // Run again after damage to a cached copy, this skips tensors that were delivered.
        let delivered = window.delivered();
        let skipped = |tensor: usize| delivered.get(tensor).copied().unwrap_or(false);
        receiver.deliver_unread(&skipped)?;
        let run = Run { options: &options, counters, cancel: &cancel, receiver: Some(&receiver) };
        match (&shared.device, streams) {
            (Some((to, blocks)), Some(streams)) => {
                on_device(&reads, (to, blocks, streams), &run, &skipped)
            }
            _ => {
                let memory = TensorMemory::Own(&buffers);
                let to = To::host(HostDestination::new(memory, Vec::new()));
                reads.read(to, &run, &skipped, &mut || Ok(false)).map(drop)
            }
        }
    });
    file.report_fallbacks(counters);
    done
}

fn on_device(
    reads: &Reads<'_>,
    (to, blocks, streams): (&IteratorDevice, &DeviceBlocks, &Streams),
    run: &Run<'_>,
    skipped: &dyn Fn(usize) -> bool,
) -> Result<()> {
    let device = DestinationDevice { device: &to.device, consumer: to.consumer, pool: to.pool };
    let memory = DeviceMemoryBlocks {
        devices: std::slice::from_ref(&device),
        memory: blocks,
        direct_storage: to.direct_storage,
    };
    // Each tensor has a block of its number.
    let locations =
        (0..reads.selection.entries.len()).map(|block| BlockLocation { block, offset: 0 });
    let layout = DeviceLayout { locations: locations.collect(), ..DeviceLayout::default() };
    let read = (&layout, std::slice::from_ref(streams));
    let done = read_to_devices(reads, &memory, read, run, skipped, &mut || Ok(false));
    // Memory is freed, or written again, only after copies to it have ended.
    streams.finish()?;
    done.map(drop)
}

/// The receiver that passes tensors from the engine to the window.
struct WindowReceiver<'l> {
    shared: &'l IteratorState,
    selection: &'l Selection<'l>,
    /// Host memory that is being filled.
    buffers: &'l TensorBuffers,
    /// Tensors that are used in place, until they are handed out.
    mapped: Mutex<Vec<Option<HostBuffer>>>,
}

impl WindowReceiver<'_> {
    /// Hands out tensors of which nothing is read.
    fn deliver_unread(&self, skipped: &dyn Fn(usize) -> bool) -> Result<()> {
        for (tensor, entry) in self.selection.entries.iter().enumerate() {
            let has_header = entry.whole.is_none() && entry.header_offset < entry.data_offset;
            let has_data = entry.data_len > 0 && entry.memory_len() != Some(0);
            let is_mapped = unpoisoned(self.mapped.lock()).get(tensor).is_some_and(Option::is_some);
            let read = has_header || (has_data && !is_mapped);
            if !read && !skipped(tensor) {
                self.deliver(vec![(TensorNumber(tensor), CopyEvents::new())])?;
            }
        }
        Ok(())
    }

    fn memory(&self, tensor: TensorNumber) -> Result<ReadyMemory> {
        let mapped = unpoisoned(self.mapped.lock()).get_mut(tensor.0).and_then(Option::take);
        if let Some(mapped) = mapped {
            return Ok(ReadyMemory::Host(mapped));
        }
        let on_device = self.shared.device.is_some();
        let entry = tensor.of(&self.selection.entries)?;
        let zeros = entry.data_len == 0 || entry.memory_len() == Some(0);
        match (zeros, on_device) {
            (true, true) => Ok(ReadyMemory::Zeros),
            (true, false) => {
                let len = entry.memory_len().unwrap_or(u64::MAX);
                Arena::zeroed(to_usize(len)).map(ReadyMemory::Host)
            }
            (false, true) => Ok(ReadyMemory::Block(tensor.0)),
            (false, false) => Ok(ReadyMemory::Host(self.buffers.take(tensor)?)),
        }
    }
}

impl TensorReceiver for WindowReceiver<'_> {
    fn batch_len(&self) -> u64 {
        self.shared.window.max_batch_len()
    }

    fn admits(&self, first: TensorNumber, last: TensorNumber) -> Result<bool> {
        let window = &self.shared.window;
        // Otherwise readers would ask again and again until the load sees that it has ended.
        if window.is_closed() { Err(Error::Cancelled) } else { Ok(window.admits(first.0, last.0)) }
    }

    fn wait(&self, time: Duration) {
        self.shared.window.wait_for_room(time);
    }

    fn deliver(&self, tensors: Vec<(TensorNumber, CopyEvents)>) -> Result<()> {
        let items = tensors.into_iter().map(|(tensor, copy_events)| {
            Ok(WaitingTensor { tensor: tensor.0, memory: self.memory(tensor)?, copy_events })
        });
        self.shared.window.deliver_all(items.collect::<Result<_>>()?)
    }
}

#[cfg(all(test, not(feature = "models")))]
#[allow(clippy::unwrap_used)]
mod tests {
    use super::*;
    use crate::api::file::TensorFile;
    use crate::api::iterate::options::Order;
    use crate::api::iterate::window::Window;
    use crate::api::save_all::save;
    use crate::api::save_options::{SaveOptions, SaveTensor};
    use crate::cancel::Never;
    use crate::stats::Counters;

    #[test]
    fn readers_of_an_iterator_that_is_closed_are_told_to_end() {
        let folder = tempfile::tempdir().unwrap();
        let path = folder.path().join("f.tensors");
        let tensor = SaveTensor::new("t", &[3], &b"abc"[..]).unwrap();
        save(&path, vec![tensor], SaveOptions::default(), &Never).unwrap();
        let shared = IteratorState {
            file: TensorFile::open(&path).unwrap(),
            numbers: vec![0],
            spare: 0,
            options: LoadOptions::default(),
            complete: false,
            window: Window::new(vec![3], 3, Order::File, false),
            device: None,
            counters: Counters::default(),
        };
        let selection = Selection::new(&shared.file, &shared.numbers).unwrap();
        let buffers = TensorBuffers::new(Vec::new(), 0);
        let mapped = Mutex::new(Vec::new());
        let receiver =
            WindowReceiver { shared: &shared, selection: &selection, buffers: &buffers, mapped };
        let admits = || receiver.admits(TensorNumber(0), TensorNumber(0));
        assert!(admits().unwrap());
        shared.window.close();
        assert!(matches!(admits(), Err(Error::Cancelled)));
    }
}
