//! Tensors of a file one by one, for torch. Device memory comes from torch's allocator, on the
//! thread that asks for the next tensor.

use std::collections::BTreeMap;
use std::sync::atomic::{AtomicI64, Ordering};
use std::sync::{Arc, Mutex};

use tensorizer::cancel::Cancel;
use tensorizer::device::{self, DeviceIndex};
use tensorizer::environment::GDS;
use tensorizer::error::{Error, Result};
use tensorizer::mem::pinned::Pool;
use tensorizer::{
    Allocate, Closer, DropInOwner, ForkSafeMutex, IterateOptions, IteratorDevice, ReadyMemory,
    TensorFile, TensorIterator, unpoisoned,
};

use crate::allocator::TorchAllocator;
use crate::load::check_type;
use crate::lock_holder::LockHolder;
use crate::tensor::{LoadedTensors, TensorLocation};

/// Tensors of a file one by one.
pub struct TorchTensors {
    tensors: TensorIterator,
    file: TensorFile,
    /// The source of device memory; None for host memory. A forked child process does not touch it.
    allocator: DropInOwner<Option<TorchAllocator>>,
}

impl TorchTensors {
    /// Begins to load tensors, given by number. If the core cannot reach the device, they come to
    /// host memory, and torch has to copy them.
    pub fn new(
        file: &TensorFile,
        numbers: &[usize],
        device: DeviceIndex,
        options: &IterateOptions,
    ) -> Result<Self> {
        for &number in numbers {
            check_type(file.entry(number)?)?;
        }
        let found = device::find(device).unwrap_or(None);
        let mut allocator = found.as_ref().map(|_| TorchAllocator::new(device));
        let to = match (found, &mut allocator) {
            (Some(found), Some(allocator)) => {
                let consumer = allocator.consumer()?;
                // Fails here, before memory is taken, if the stream is being captured into a graph.
                drop(Arc::clone(&found).stream(consumer)?);
                let (pool, direct_storage) = (Pool::of(&found)?, GDS.value()? != 0);
                Some(IteratorDevice { device: found, consumer, pool, direct_storage })
            }
            _ => None,
        };
        let allocate = allocator.as_mut().map(|allocator| allocator as &mut dyn Allocate);
        let tensors = TensorIterator::new(file, numbers, to, options, allocate)
            .map_err(|error| error.with_file("loading", file.uri()))?;
        Ok(TorchTensors { tensors, file: file.duplicate(), allocator: DropInOwner::new(allocator) })
    }

    /// Waits for the next tensors: one, or several small ones; none at the end. Also returns their
    /// numbers.
    pub fn next(&mut self, cancel: &dyn Cancel) -> Result<(LoadedTensors, Vec<usize>)> {
        let allocate = self.allocator.as_mut().map(|allocator| allocator as &mut dyn Allocate);
        let landed = self.tensors.next(allocate, cancel);
        let landed = landed.map_err(|error| error.with_file("loading", self.file.uri()))?;
        let numbers: Vec<usize> = landed.iter().map(|tensor| tensor.number).collect();
        let (mut locations, mut ready_blocks) = (Vec::with_capacity(landed.len()), Vec::new());
        for tensor in landed {
            locations.push(match tensor.memory {
                ReadyMemory::Host(buffer) => TensorLocation::Host(buffer),
                ReadyMemory::Zeros => TensorLocation::Zeros(0),
                ReadyMemory::Block(block) => {
                    ready_blocks.push(block);
                    TensorLocation::Block(0, ready_blocks.len() - 1, 0)
                }
            });
        }
        let blocks = match &mut *self.allocator {
            Some(allocator) => vec![allocator.take(&ready_blocks)?],
            None => Vec::new(),
        };
        Ok((LoadedTensors::new(&self.file, &numbers, locations, blocks), numbers))
    }

    /// Returns a handle that ends the load from another thread.
    pub fn closer(&self) -> Closer {
        self.tensors.closer()
    }
}

/// The open iterators of the operators, by number.
static OPEN_ITERATORS: ForkSafeMutex<BTreeMap<i64, Arc<OpenIterator>>> =
    ForkSafeMutex::new(BTreeMap::new());
static NEXT_NUMBER: AtomicI64 = AtomicI64::new(1);

struct OpenIterator {
    device: String,
    tensors: Mutex<TorchTensors>,
    holder: LockHolder,
    closer: Closer,
}

/// Keeps an iterator for the operators, with the name of the device to which torch copies tensors
/// that are not there; empty for none. Returns its number.
pub fn register(tensors: TorchTensors, device: &str) -> i64 {
    let number = NEXT_NUMBER.fetch_add(1, Ordering::Relaxed);
    let open = OpenIterator {
        device: device.to_owned(),
        closer: tensors.closer(),
        tensors: Mutex::new(tensors),
        holder: LockHolder::default(),
    };
    OPEN_ITERATORS.lock().insert(number, Arc::new(open));
    number
}

/// Returns the name of the device to which torch copies an iterator's tensors; empty for none.
pub fn device_of(number: i64) -> String {
    OPEN_ITERATORS.lock().get(&number).map_or(String::new(), |open| open.device.clone())
}

/// Returns the next tensors of an iterator; none at the end, which also closes it.
pub fn next(number: i64, cancel: &dyn Cancel) -> Result<LoadedTensors> {
    let open = OPEN_ITERATORS.lock().get(&number).map(Arc::clone).ok_or_else(|| {
        Error::InvalidArgument(format!("no iterator {number}: it was closed, or has ended"))
    })?;
    open.closer.check_process()?;
    if open.holder.is_this_thread() {
        let what = format!("iterator {number} is used by one of its own callbacks");
        return Err(Error::InvalidArgument(what));
    }
    let loaded = {
        let mut tensors = unpoisoned(open.tensors.lock());
        let _mark = open.holder.mark();
        tensors.next(cancel)
    };
    match &loaded {
        Err(_) => close(number),
        // Not closed: calls that wait on other threads see the end, not an error.
        Ok((tensors, _)) if tensors.size() == 0 => drop(remove(number)),
        Ok(_) => {}
    }
    loaded.map(|(tensors, _)| tensors)
}

fn remove(number: i64) -> Option<Arc<OpenIterator>> {
    OPEN_ITERATORS.lock().remove(&number)
}

/// Ends the load of an iterator, and removes it. Closing again does nothing.
pub fn close(number: i64) {
    if let Some(open) = remove(number) {
        // A call that waits for tensors ends, and drops the iterator.
        open.closer.close();
    }
}
