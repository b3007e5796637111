//! The bridge to torch. One of the few doors to `unsafe`.

#[cfg(feature = "python")]
pub mod exchange;
pub mod guard;
pub mod load;
#[cfg(feature = "python")]
pub mod snapshot;
#[cfg(feature = "tch")]
pub mod tch;
pub mod torch;
