//! How tensors pass between the Python classes and torch: under a number that is good for one
//! use. The private operators `_lend` and `_take` are the other half.

use std::collections::HashMap;
use std::sync::atomic::{AtomicI64, Ordering};
use std::sync::{Arc, Mutex, PoisonError};

use cxx::UniquePtr;
use tensorizer::error::{Error, Result};

use crate::bridge::{TensorList, thrown};
use crate::guard::guard;
use crate::tensor::Loaded;

/// Tensors that Python lent for the length of a call.
pub struct Lent(UniquePtr<TensorList>);

impl Lent {
    /// The tensors.
    pub fn list(&self) -> Result<&TensorList> {
        self.0.as_ref().ok_or_else(|| Error::Bug("no tensors were lent".to_owned()))
    }

    /// Tells autograd that the tensors were changed.
    pub fn changed(&self) -> Result<()> {
        self.list()?.changed().map_err(thrown)
    }
}

static NEXT: AtomicI64 = AtomicI64::new(1);
static LENT: Mutex<Option<HashMap<i64, Lent>>> = Mutex::new(None);
static LOADED: Mutex<Option<HashMap<i64, Loaded>>> = Mutex::new(None);

fn put<T>(table: &Mutex<Option<HashMap<i64, T>>>, value: T) -> i64 {
    let ticket = NEXT.fetch_add(1, Ordering::Relaxed);
    let mut table = table.lock().unwrap_or_else(PoisonError::into_inner);
    table.get_or_insert_default().insert(ticket, value);
    ticket
}

fn remove<T>(table: &Mutex<Option<HashMap<i64, T>>>, ticket: i64) -> Result<T> {
    let mut table = table.lock().unwrap_or_else(PoisonError::into_inner);
    table
        .as_mut()
        .and_then(|table| table.remove(&ticket))
        .ok_or_else(|| Error::InvalidArgument(format!("no tensors under the number {ticket}")))
}

/// From torch: keeps tensors until [`borrow`] fetches them.
pub fn exchange_lend(tensors: UniquePtr<TensorList>) -> Result<i64> {
    guard(|| Ok(put(&LENT, Lent(tensors))))
}

/// To the Python classes: the tensors that were lent.
pub fn borrow(ticket: i64) -> Result<Arc<Lent>> {
    remove(&LENT, ticket).map(Arc::new)
}

/// From the Python classes: keeps loaded tensors until torch takes them.
pub fn offer(loaded: Loaded) -> i64 {
    put(&LOADED, loaded)
}

/// To torch: the tensors that were loaded.
pub fn exchange_take(ticket: i64) -> Result<Box<Loaded>> {
    guard(|| remove(&LOADED, ticket).map(Box::new))
}
