//! Handles under which the Python classes and torch pass tensors to each other, each used once. The
//! private operators `_lend` and `_take` are the other half.

use std::collections::BTreeMap;
use std::sync::atomic::{AtomicI64, Ordering};

use cxx::UniquePtr;
use tensorizer::ForkSafeMutex;
use tensorizer::error::{Error, Result};

use crate::guard::guard;
use crate::tensor::LoadedTensors;
use crate::torch::TensorList;

static NEXT: AtomicI64 = AtomicI64::new(1);
static LENT: ForkSafeMutex<BTreeMap<i64, UniquePtr<TensorList>>> =
    ForkSafeMutex::new(BTreeMap::new());
static LOADED: ForkSafeMutex<BTreeMap<i64, LoadedTensors>> = ForkSafeMutex::new(BTreeMap::new());

/// A number under which tensors are exchanged. Dropping it drops tensors that were not fetched, so
/// that a call that fails half-way leaves no tensors in the table.
pub struct TensorHandle(i64);

impl TensorHandle {
    /// Returns a handle with a new number.
    pub fn reserve() -> Self {
        TensorHandle(NEXT.fetch_add(1, Ordering::Relaxed))
    }

    /// The number.
    pub fn number(&self) -> i64 {
        self.0
    }
}

impl Drop for TensorHandle {
    fn drop(&mut self) {
        drop(remove(&LENT, self.0));
        drop(remove(&LOADED, self.0));
    }
}

fn put<T>(table: &ForkSafeMutex<BTreeMap<i64, T>>, number: i64, value: T) {
    let earlier = table.lock().insert(number, value);
    // Dropped after the lock is released: dropping tensors may run other code.
    drop(earlier);
}

fn remove<T>(table: &ForkSafeMutex<BTreeMap<i64, T>>, number: i64) -> Result<T> {
    table.lock().remove(&number).ok_or_else(|| {
        Error::InvalidArgument(format!(
            "no tensors for handle {number}: it was used already, or is not one of tensorizer's"
        ))
    })
}

/// Called by torch: keeps tensors under a handle's number until [`borrow`] fetches them.
pub fn lend_to_handle(handle: i64, tensors: UniquePtr<TensorList>) -> Result<()> {
    guard(|| {
        put(&LENT, handle, tensors);
        Ok(())
    })
}

/// Called by the Python classes: returns the tensors that torch has lent.
pub fn borrow(handle: &TensorHandle) -> Result<UniquePtr<TensorList>> {
    remove(&LENT, handle.0)
}

/// Called by the Python classes: keeps loaded tensors until torch takes them.
pub fn offer(loaded: LoadedTensors) -> TensorHandle {
    let handle = TensorHandle::reserve();
    put(&LOADED, handle.0, loaded);
    handle
}

/// Called by torch: returns the tensors that were loaded.
pub fn take_from_handle(handle: i64) -> Result<Box<LoadedTensors>> {
    guard(|| remove(&LOADED, handle).map(Box::new))
}
