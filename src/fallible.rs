//! Allocations whose size is given by data, a file or a server. If memory is short, the call ends
//! with an error that names its purpose; Rust's own collections would end the process.

use crate::error::{Error, Result};

/// Names lists of tensors in error messages.
pub const LISTS: &str = "lists of tensors";

/// The error for `bytes` bytes that could not be allocated.
pub fn out_of_memory(bytes: u64, what: impl Into<String>) -> Error {
    let error = std::io::Error::from(std::io::ErrorKind::OutOfMemory);
    Error::OutOfMemory { bytes, what: what.into(), error }
}

/// Creates a slice of `len` zeros. The allocator does not write to pages that are zero already.
pub fn try_zeroed(len: usize, what: &str) -> Result<Box<[u8]>> {
    bytemuck::try_zeroed_slice_box(len).map_err(|()| out_of_memory(len as u64, what))
}

/// Creates an empty vector with a capacity of `count` items.
pub fn try_with_capacity<T>(count: usize, what: &str) -> Result<Vec<T>> {
    let mut out = Vec::new();
    out.try_reserve_exact(count).map_err(|_| out_of_memory(bytes_of::<T>(count), what))?;
    Ok(out)
}

/// Reserves capacity for `more` items. The capacity at least doubles when it grows, so adding items
/// one by one takes few allocations.
pub fn try_reserve<T>(out: &mut Vec<T>, more: usize, what: &str) -> Result<()> {
    let bytes = bytes_of::<T>(out.len().saturating_add(more));
    out.try_reserve(more).map_err(|_| out_of_memory(bytes, what))
}

/// Collects items, unless one is an error. Memory for all of them is reserved at once, whereas
/// `collect` lets a list of results grow.
pub fn collect_all<T>(items: impl Iterator<Item = Result<T>>) -> Result<Vec<T>> {
    let mut out = Vec::with_capacity(items.size_hint().0);
    for item in items {
        out.push(item?);
    }
    Ok(out)
}

/// Resizes a vector to `len` bytes; new bytes are zero.
pub fn try_resize(out: &mut Vec<u8>, len: usize, what: &str) -> Result<()> {
    try_reserve(out, len.saturating_sub(out.len()), what)?;
    out.resize(len, 0);
    Ok(())
}

/// Appends copies of some items.
pub fn try_extend<T: Clone>(out: &mut Vec<T>, items: &[T], what: &str) -> Result<()> {
    try_reserve(out, items.len(), what)?;
    out.extend_from_slice(items);
    Ok(())
}

fn bytes_of<T>(count: usize) -> u64 {
    (count as u64).saturating_mul(size_of::<T>() as u64)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    #[cfg_attr(miri, ignore = "asks for more memory than Miri has")]
    fn allocations_beyond_memory_are_errors() {
        let most = isize::MAX.unsigned_abs();
        let error = try_zeroed(most, "a header").err().map(|error| error.to_string());
        assert!(error.is_some_and(|error| error.contains("for a header")));
        assert_eq!(try_zeroed(3, "").ok().as_deref(), Some(&[0, 0, 0][..]));
        assert!(try_with_capacity::<u64>(usize::MAX, "entries").is_err());
        let mut few = vec![1, 2];
        assert!(try_reserve(&mut few, most, "more").is_err());
        assert_eq!(few, [1, 2]);
    }
}
