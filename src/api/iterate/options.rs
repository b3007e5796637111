//! Options of an iterator.

use crate::engine::load_options::LoadOptions;

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
    /// Maximum bytes of tensors that are in memory or in flight and not handed out yet. A single
    /// tensor may be larger.
    pub buffer_bytes: u64,
    /// The order in which they are handed out.
    pub order: Order,
    /// True: tensors are handed out after their copies to a device have ended, for use on all its
    /// streams. False: they are handed out for the stream that is current then, which waits for the
    /// copies.
    pub complete: bool,
}

impl Default for IterateOptions {
    /// Reads up to 1 GiB ahead of the caller, in the order of the file.
    fn default() -> Self {
        let load = LoadOptions::default();
        IterateOptions { load, buffer_bytes: 1 << 30, order: Order::default(), complete: false }
    }
}
