//! Locks and threads of code that has models: those of the standard library, or in a model those of
//! shuttle, which chooses the thread that runs next.

#[cfg(all(test, feature = "models"))]
mod modelled;

#[cfg(not(all(test, feature = "models")))]
pub use super::cpu_time;
#[cfg(all(test, feature = "models"))]
pub use modelled::*;
#[cfg(not(all(test, feature = "models")))]
pub use std::sync::{Condvar, Mutex, MutexGuard, atomic, mpsc};
#[cfg(not(all(test, feature = "models")))]
pub use std::thread;
#[cfg(not(all(test, feature = "models")))]
pub use std::time::Instant;
