//! Moves bytes: one engine that reads and one that writes, whatever the format and wherever the
//! bytes come from and go to.

pub mod cold;
pub mod drain;
pub mod plan;
pub mod read;
pub mod target;
pub mod workers;
