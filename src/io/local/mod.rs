//! Files of this machine: reads through the page cache and direct reads, pipes, and files that
//! appear complete under their name.

mod copy_metadata;
mod direct;
mod direct_plan;
mod file;
mod folder;
mod held_folder;
mod pipe;
mod shard;
mod sink;
mod temporary;
mod temporary_name;

pub use direct::{
    DIRECT_MEMORY, DirectMemory, DirectReader, DirectSupport, READ_LEN as DIRECT_READ_LEN,
};
pub use file::{FileSource, OwnHandle, open_no_follow, remove_if_at};
pub use folder::siblings;
pub use pipe::Pipe;
pub use sink::FileSink;
