//! The options of a load.

use crate::codec::hash::Verify;
use crate::memory_limit::MemoryLimit;

/// Options of a load. The default reads with the source's own number of readers and verifies
/// nothing.
#[derive(Debug, Clone, Copy, Default)]
pub struct LoadOptions {
    /// Threads that read at once, where the source allows more than one.
    pub readers: Option<usize>,
    /// The stored hashes that every tensor is compared with.
    pub verify: Verify,
    /// True to use tensors in place, in a private, copy-on-write mapping of their file, whose bytes
    /// come into memory when they are first touched. Other sources than files, and tensors whose
    /// data are not aligned, are read in any case.
    ///
    /// The file must not be modified or truncated while these tensors exist: their values would
    /// change, or touching them would end the process (SIGBUS).
    pub map: bool,
    /// The memory that the load may have in flight beside its tensors: the buffers of connections,
    /// staging buffers, and bytes that are read but not wanted. If it is not set,
    /// `TENSORIZER_MEMORY_LIMIT_MB` applies.
    pub memory: MemoryLimit,
    /// True if other processes of this machine load the same file at the same time. Bytes that are
    /// not in the page cache are then read through it, once for all processes, and not with direct
    /// I/O.
    pub shares_cache: bool,
}
