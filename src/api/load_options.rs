//! How tensors are loaded.

use crate::codec::hash::Verify;
use crate::memory_limit::MemoryLimit;

/// How to load. The default reads with the source's own number of readers and verifies nothing.
#[derive(Debug, Clone, Copy, Default)]
pub struct LoadOptions {
    /// Threads that read at once, where the source allows more than one.
    pub readers: Option<usize>,
    /// Which stored hashes every tensor is compared with.
    pub verify: Verify,
    /// Whether tensors are used in place in a private, copy-on-write mapping of their file, whose
    /// bytes come into memory when they are first touched. Other sources than files, and tensors
    /// whose data are not aligned, are read in any case.
    ///
    /// Such a file must not be written to or cut short while such tensors live: they would show
    /// other bytes, or touching them would end the process (SIGBUS).
    pub map: bool,
    /// Bytes that the load may have in flight beside its tensors: what connections hold, staging
    /// buffers, and what is read over. None for what `TENSORIZER_MEMORY_MB` says.
    pub memory: MemoryLimit,
    /// True if other processes of this machine load the same file at the same time: what is not in the
    /// page cache is read through it then, once for all of them, and not around it.
    pub shares_cache: bool,
}
