//! The contiguous byte ranges of a slice within its tensor, in row-major order.

use std::ops::Range;

/// The contiguous ranges of a slice within the bytes of its tensor. All have the same
/// length, and they come in rising order.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct SliceRanges {
    /// Bytes of a range.
    range_len: u64,
    /// Position of the first range.
    first: u64,
    /// The loops over the ranges, outermost first: the stride of each in bytes, and its number of
    /// steps.
    loops: Vec<(u64, u64)>,
    /// Bytes of all ranges.
    total: u64,
}

impl SliceRanges {
    /// Creates the ranges of a slice, given as one range of indices per dimension. `size`: bytes of
    /// an element. None if a range exceeds its dimension, if there is not one range per dimension,
    /// or if the tensor has more than 2⁶⁴ − 1 bytes.
    pub fn new(size: u64, shape: &[u64], slice: &[Range<u64>]) -> Option<Self> {
        let fits =
            |(&dim, range): (&u64, &Range<u64>)| range.start <= range.end && range.end <= dim;
        if shape.len() != slice.len() || !shape.iter().zip(slice).all(fits) {
            return None;
        }
        shape.iter().try_fold(size, |len, &dim| len.checked_mul(dim.max(1)))?;
        // Empty ranges may lie at the very end, where the sum of their positions would overflow.
        if slice.iter().any(Range::is_empty) {
            return Some(SliceRanges { range_len: 0, first: 0, loops: Vec::new(), total: 0 });
        }
        let (mut range_len, mut first, mut stride) = (size, 0, size);
        let (mut loops, mut total) = (Vec::new(), size);
        let mut inner_is_whole = true;
        for (&dim, range) in shape.iter().zip(slice).rev() {
            let count = range.end - range.start;
            first += range.start * stride;
            total *= count;
            if inner_is_whole {
                range_len *= count;
            } else if count != 1 {
                loops.push((stride, count));
            }
            inner_is_whole &= count == dim;
            stride *= dim;
        }
        loops.reverse();
        Some(SliceRanges { range_len, first, loops, total })
    }

    /// Returns the bytes of the slice.
    pub fn total(&self) -> u64 {
        self.total
    }

    /// Returns the bytes of each range; 0 if there are none.
    pub fn range_len(&self) -> u64 {
        self.range_len
    }

    /// Returns the bytes between a range and the next; None if there is no next one.
    pub fn gap(&self) -> Option<u64> {
        self.loops.last().map(|(stride, _)| stride - self.range_len)
    }

    /// Returns the number of ranges.
    fn count(&self) -> u64 {
        self.total.checked_div(self.range_len).unwrap_or(0)
    }

    /// Returns the position of range number `index`.
    fn start(&self, mut index: u64) -> u64 {
        let mut at = self.first;
        for &(stride, count) in self.loops.iter().rev() {
            at += index % count * stride;
            index /= count;
        }
        at
    }

    /// Returns the positions of all ranges.
    pub fn starts(&self) -> impl Iterator<Item = u64> + '_ {
        (0..self.count()).map(|index| self.start(index))
    }

    /// Returns the number of the slice's bytes before a position.
    pub fn before(&self, position: u64) -> u64 {
        let Some(mut rest) = position.checked_sub(self.first) else { return 0 };
        let (mut inner, mut done) = (self.total, 0);
        for &(stride, count) in &self.loops {
            inner /= count;
            let index = rest / stride;
            if index >= count {
                return done + count * inner;
            }
            done += index * inner;
            rest %= stride;
        }
        done + rest.min(self.range_len)
    }

    /// Returns coalesced reads: byte ranges that cover all ranges of the slice, in rising order.
    /// Gaps of at most `gap` bytes are part of them.
    pub fn coalesced(&self, gap: u64) -> impl Iterator<Item = Range<u64>> + use<> {
        // An inner loop whose gaps are all short becomes a single range.
        let mut step = self.range_len;
        let mut inner = self.loops.len();
        for &(stride, count) in self.loops.iter().rev() {
            if stride - step > gap {
                break;
            }
            step += (count - 1) * stride;
            inner -= 1;
        }
        let loops: Vec<(u64, u64)> = self.loops.iter().take(inner).copied().collect();
        let total = loops.iter().fold(step, |total, (_, count)| total * count);
        let outer = SliceRanges { range_len: step, first: self.first, loops, total };
        let mut starts = (0..outer.count()).map(move |index| outer.start(index)).peekable();
        std::iter::from_fn(move || {
            let start = starts.next()?;
            let mut end = start + step;
            while let Some(next) = starts.next_if(|next| next - end <= gap) {
                end = next + step;
            }
            Some(start..end)
        })
    }

    /// Returns the position and length of each range, or part of one, in a range, in rising order.
    pub fn within(&self, range: &Range<u64>) -> impl Iterator<Item = (u64, u64)> + '_ {
        let (mut done, to) = (self.before(range.start), self.before(range.end));
        std::iter::from_fn(move || {
            let remaining = to.checked_sub(done).filter(|&remaining| remaining > 0)?;
            let skip = done % self.range_len;
            let len = (self.range_len - skip).min(remaining);
            let found = (self.start(done / self.range_len) + skip, len);
            done += len;
            Some(found)
        })
    }
}

#[cfg(test)]
#[allow(clippy::cast_possible_truncation)]
mod tests {
    use super::*;
    use proptest::prelude::*;

    /// Returns the bytes of a slice, found one by one.
    fn bytes(size: u64, shape: &[u64], slice: &[Range<u64>]) -> Vec<u64> {
        let count: u64 = shape.iter().product();
        let wanted = (0..count).filter(|&element| {
            let mut rest = element;
            shape.iter().zip(slice).rev().all(|(&dim, range)| {
                let index = rest % dim;
                rest /= dim;
                range.contains(&index)
            })
        });
        wanted.flat_map(|element| element * size..(element + 1) * size).collect()
    }

    fn slices() -> impl Strategy<Value = (u64, Vec<u64>, Vec<Range<u64>>)> {
        let dims = proptest::collection::vec((0u64..5, 0u64..5, 0u64..5), 0..4);
        (1u64..4, dims).prop_map(|(size, dims)| {
            let shape = dims.iter().map(|&(dim, ..)| dim).collect();
            let slice = dims.iter().map(|&(dim, a, b)| a.min(b).min(dim)..a.max(b).min(dim));
            (size, shape, slice.collect())
        })
    }

    #[test]
    fn empty_slices_at_the_end_of_the_address_space_do_not_overflow() {
        let shape = [1, 1, u64::MAX];
        let ranges = SliceRanges::new(1, &shape, &[1..1, 1..1, u64::MAX..u64::MAX]).unwrap();
        assert_eq!(
            (ranges.total(), ranges.starts().count(), ranges.coalesced(9).count()),
            (0, 0, 0)
        );
        let ranges = SliceRanges::new(1, &shape, &[0..1, 0..1, u64::MAX - 2..u64::MAX]).unwrap();
        assert_eq!(ranges.starts().collect::<Vec<_>>(), [u64::MAX - 2]);
    }

    proptest! {
        #[test]
        fn ranges_cover_exactly_the_bytes_of_the_slice((size, shape, slice) in slices(), gap in 0u64..9) {
            let ranges = SliceRanges::new(size, &shape, &slice).unwrap();
            let expected = bytes(size, &shape, &slice);
            prop_assert_eq!(ranges.total(), expected.len() as u64);
            let all = ranges.starts().flat_map(|at| at..at + ranges.range_len()).collect::<Vec<_>>();
            prop_assert_eq!(&all, &expected);
            let end = size * shape.iter().product::<u64>();
            for position in 0..end + 3 {
                let before = expected.iter().filter(|&&at| at < position).count();
                prop_assert_eq!(ranges.before(position), before as u64);
            }
            let reads: Vec<_> = ranges.coalesced(gap).collect();
            prop_assert!(reads.windows(2).all(|pair| pair[1].start - pair[0].end > gap));
            let mut found = Vec::new();
            for read in reads {
                prop_assert!(expected.contains(&read.start) && expected.contains(&(read.end - 1)));
                let middle = read.start + (read.end - read.start) / 2;
                for part in [read.start..middle, middle..read.end] {
                    found.extend(ranges.within(&part).flat_map(|(at, len)| at..at + len));
                }
            }
            prop_assert_eq!(&found, &expected);
        }
    }

    #[test]
    fn slices_outside_of_a_tensor_are_refused() {
        let range = |start, end| Range { start, end };
        for (shape, slice) in [
            (&[4][..], &[range(0, 5)][..]),
            (&[4], &[range(3, 2)]),
            (&[4], &[]),
            (&[1 << 63, 4], &[range(0, 1), range(0, 1)]),
        ] {
            assert_eq!(SliceRanges::new(2, shape, slice), None, "{shape:?}");
        }
    }
}
