//! Mappings: memory whose bytes all have a value. `unsafe` is allowed in this file: it maps files.
#![allow(unsafe_code)]

use std::fs::File;

use memmap2::{Advice, MmapMut, MmapOptions};

use super::mapped::MappedFileGuard;
use crate::error::{Error, Result};
use crate::sys::to_usize;

/// Size and alignment of a huge page on x86-64 and, by default, on AArch64.
pub const HUGE_PAGE: usize = 2 << 20;

/// An anonymous mapping, or a private one of a file: writes to it do not reach the file.
pub struct Mapping {
    map: MmapMut,
    start: usize,
    len: usize,
    _in_use: Option<MappedFileGuard>,
}

impl Mapping {
    /// Maps `len` zeroed bytes, aligned to a huge page if they fill one. The last bytes are in a huge
    /// page, too, if they fill half of it: of small pages, each costs a fault.
    pub fn new(len: usize) -> Result<Self> {
        let out_of_memory =
            |error| Error::OutOfMemory { bytes: len as u64, what: "tensors".to_owned(), error };
        let huge = len >= HUGE_PAGE;
        let rest = len % HUGE_PAGE;
        let fills = rest >= HUGE_PAGE / 2;
        let in_huge_pages = if fills { len.saturating_add(HUGE_PAGE - rest) } else { len - rest };
        let len = if huge { in_huge_pages.max(len) } else { len };
        let mapped = if huge { len.saturating_add(HUGE_PAGE) } else { len };
        let map = MmapOptions::new().len(mapped).map_anon().map_err(out_of_memory)?;
        let address = map.as_ptr().addr();
        let start = if huge { address.next_multiple_of(HUGE_PAGE) - address } else { 0 };
        // Kernels without huge pages refuse, which costs speed only. Miri has no such call.
        if huge && !cfg!(miri) {
            let _ = map.advise_range(Advice::HugePage, start, in_huge_pages);
        }
        Ok(Mapping { map, start, len, _in_use: None })
    }

    /// Maps the first `len` bytes of a file privately. The file must not shrink: touching bytes
    /// that it no longer has ends the process (SIGBUS). No memory is reserved for pages that may be
    /// written to, so that a file may be larger than memory.
    pub fn of_file(file: &File, len: u64, uri: &str) -> Result<Self> {
        let len = to_usize(len);
        // SAFETY: the mapping is private: our writes reach neither the file nor another mapping of
        // it. The file's bytes may change under it; that is the documented condition of asking for
        // a mapping, and the bytes are only ever treated as plain numbers.
        let map = unsafe { MmapOptions::new().len(len).no_reserve_swap().map_copy(file) }
            .map_err(|e| Error::io("mapping", uri, e))?;
        let in_use = MappedFileGuard::mark(file).map_err(|e| Error::io("examining", uri, e))?;
        Ok(Mapping { map, start: 0, len, _in_use: Some(in_use) })
    }

    /// Excludes the mapping from forked processes. Its addresses are unmapped there, so they must
    /// neither use nor free it.
    pub fn leave_out_of_forks(&self) {
        // If the kernel refuses, a child inherits the pages copy-on-write, which costs memory only.
        let _ = self.map.advise(Advice::DontFork);
    }

    /// Bytes of it that may be used: at least as many as were asked for.
    pub fn size(&self) -> usize {
        self.len
    }

    /// Returns the bytes, to be written to.
    pub fn bytes_mut(&mut self) -> &mut [u8] {
        self.map.get_mut(self.start..self.start + self.len).unwrap_or(&mut [])
    }
}
