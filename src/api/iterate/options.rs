//! Options of an iterator.

use crate::api::load_options::LoadOptions;

/// The order in which tensors are handed out.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Default)]
pub enum Order {
    /// That of their data in the file.
    #[default]
    File,
    /// The order in which they are ready.
    Ready,
}

/// Options of reading ahead of the caller.
#[derive(Debug, Clone, Copy)]
pub struct IterateOptions {
    /// Load options.
    pub load: LoadOptions,
    /// Bytes of tensors that are in memory, or on their way, and not yet taken: at most so many, or
    /// one tensor that is larger.
    pub buffer_bytes: u64,
    /// The order in which they are handed out.
    pub order: Order,
    /// True: tensors are handed out when their copies to a device have ended, for all its streams.
    /// False: for the stream that is current then, which waits for them.
    pub complete: bool,
}

impl Default for IterateOptions {
    /// 1 GiB ahead of the caller, in the order of the file.
    fn default() -> Self {
        let load = LoadOptions::default();
        IterateOptions { load, buffer_bytes: 1 << 30, order: Order::default(), complete: false }
    }
}
