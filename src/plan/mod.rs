//! Which bytes, in what order, in what pieces: pure functions over ranges. No I/O, no clock.

mod layout;
mod pack;
mod partition;
mod shares;
mod staging;

pub use layout::{Layout, MIN_INDEX_LEN, Placed, index_len_for, place};
pub use pack::{MemoryRange, pack};
pub use partition::{Extent, Part, Piece, PieceKind, partition};
pub use shares::Shares;
pub use staging::{Grain, Move, Staging, Target, blocks, stage};
