//! Memory that is cut into ranges front to back.

use crate::error::{Error, Result};

/// The part of some memory that is left after cuts.
pub struct SliceRemainder<'a, T> {
    items: &'a mut [T],
    /// Its position in the whole.
    position: usize,
}

impl<'a, T> SliceRemainder<'a, T> {
    /// Starts with all of the memory.
    pub fn new(items: &'a mut [T]) -> Self {
        SliceRemainder { items, position: 0 }
    }

    /// Cuts off the range at `start` of the whole, which must lie after all ranges that were cut
    /// before.
    pub fn cut(&mut self, start: usize, len: usize) -> Result<&'a mut [T]> {
        let bug = || Error::Bug(format!("{len} bytes at {start} after {}", self.position));
        let skip = start.checked_sub(self.position).ok_or_else(bug)?;
        let end = start.checked_add(len).ok_or_else(bug)?;
        if end - self.position > self.items.len() {
            return Err(bug());
        }
        let (_, items) = std::mem::take(&mut self.items).split_at_mut(skip);
        let (range, rest) = items.split_at_mut(len);
        (self.items, self.position) = (rest, end);
        Ok(range)
    }

    /// Cuts off the next range.
    pub fn next(&mut self, len: usize) -> Result<&'a mut [T]> {
        self.cut(self.position, len)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn ranges_are_cut_in_order_and_within_bounds() {
        let mut bytes = *b"abcdef";
        let mut rest = SliceRemainder::new(&mut bytes);
        assert_eq!(rest.cut(1, 2).unwrap(), b"bc");
        assert!(rest.cut(3, 0).unwrap().is_empty());
        assert!(rest.cut(2, 1).is_err() && rest.cut(4, 3).is_err());
        assert!(rest.cut(usize::MAX, 2).is_err());
        assert_eq!(rest.cut(4, 1).unwrap(), b"e");
        assert_eq!(rest.next(1).unwrap(), b"f");
    }
}
