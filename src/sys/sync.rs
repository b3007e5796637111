//! What threads wait for each other with, where schedules are modelled: that of the standard library, and
//! in a model that of shuttle, which chooses who runs next.

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
