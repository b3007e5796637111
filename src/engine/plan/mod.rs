//! Which bytes, in what order, in what pieces: pure functions over ranges. No I/O, no clock.

mod pack;
mod partition;
mod shares;
mod staging;

pub use pack::{MemoryRange, pack};
pub use partition::{Extent, Part, Piece, PieceKind, partition};
pub use shares::Shares;
pub use staging::{Grain, Move, Staging, Target, blocks, stage};
