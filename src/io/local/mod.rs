//! Files of this machine: reading them through the page cache or around it, pipes, and files that appear
//! whole under their name.

mod copy_metadata;
mod direct;
mod file;
mod pipe;
mod sink;
mod temporary;
mod temporary_name;

pub use direct::{DIRECT_MEMORY, DirectReader};
pub use file::FileSource;
pub use pipe::Pipe;
pub use sink::FileSink;
