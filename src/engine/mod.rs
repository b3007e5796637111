//! Moves bytes: one engine that reads and one that writes, whatever the format and wherever the
//! bytes come from and go to.

pub mod drain;
pub mod fill;
pub mod job;
pub mod plan;
pub mod upload;
pub mod workers;
