//! Bytes of blocks that tensors own. `unsafe` is allowed in this file: it shares blocks among
//! buffers.
#![allow(unsafe_code)]

use std::ptr::NonNull;
use std::sync::Arc;

use super::block::Owner;

/// Smaller pieces are not worth a system call when they are freed.
const RELEASE_FROM: usize = 1 << 20;

/// Bytes that one tensor owns, which all have a value. It may be dropped on any thread.
pub struct HostBuffer {
    start: NonNull<u8>,
    len: usize,
    owner: Option<Arc<Owner>>,
}

// SAFETY: the range is exclusive to this value (checked when it was made), and the memory that
// holds it is freed with the last of the values that share it, on whatever thread.
unsafe impl Send for HostBuffer {}
// SAFETY: shared access only reads.
unsafe impl Sync for HostBuffer {}

impl HostBuffer {
    /// Bytes of a block.
    ///
    /// # Safety
    /// They lie in the memory of `owner`, are used by nothing else, and have values.
    pub(super) unsafe fn new(start: NonNull<u8>, len: usize, owner: Arc<Owner>) -> Self {
        HostBuffer { start, len, owner: Some(owner) }
    }

    /// A buffer without bytes.
    pub fn empty() -> Self {
        HostBuffer { start: NonNull::dangling(), len: 0, owner: None }
    }

    /// Returns the address of the bytes; valid as long as this value lives.
    pub fn as_ptr(&self) -> *mut u8 {
        self.start.as_ptr()
    }

    /// Returns the bytes.
    pub fn bytes(&self) -> &[u8] {
        // SAFETY: exclusive range of live memory with values, see the `Send` proof.
        unsafe { std::slice::from_raw_parts(self.start.as_ptr(), self.len) }
    }

    /// Returns the bytes, to be written to.
    pub fn bytes_mut(&mut self) -> &mut [u8] {
        // SAFETY: as above, and borrowed exclusively.
        unsafe { std::slice::from_raw_parts_mut(self.start.as_ptr(), self.len) }
    }
}

impl Drop for HostBuffer {
    fn drop(&mut self) {
        let releases = |owner: &Arc<Owner>| owner.is_mapped() && owner.home.strong_count() == 0;
        if self.len < RELEASE_FROM || !self.owner.as_ref().is_some_and(releases) {
            return;
        }
        let page = crate::sys::page_size();
        let address = self.start.as_ptr().addr();
        let skip = address.next_multiple_of(page) - address;
        let len = self.len.saturating_sub(skip) / page * page;
        if len > 0 {
            // SAFETY: whole pages inside our exclusive range of a private mapping, as checked
            // above, and this value, the only way to them, is going away.
            unsafe { crate::sys::release_pages(self.start.as_ptr().add(skip), len) };
        }
    }
}
