//! The bytes of a block of memory that have a value.

use std::ops::Range;

use super::sync::{Mutex, unpoisoned};

/// The bytes of a block that were written, by their addresses. A `&[u8]` inside the block shows that
/// these bytes have values, as this value lives no longer than the block.
pub struct FilledRanges {
    block: Range<usize>,
    ranges: Mutex<Vec<Range<usize>>>,
}

impl FilledRanges {
    /// Creates the ranges of a block at these addresses, in which nothing was written yet.
    pub fn none(block: Range<usize>) -> Self {
        FilledRanges { block, ranges: Mutex::default() }
    }

    /// The address of the block.
    pub fn start(&self) -> usize {
        self.block.start
    }

    /// Adds bytes; those of other memory do not count.
    pub fn add(&self, bytes: &[u8]) {
        let start = bytes.as_ptr().addr();
        let range = start..start + bytes.len();
        if range.is_empty() || range.start < self.block.start || range.end > self.block.end {
            return;
        }
        let mut ranges = unpoisoned(self.ranges.lock());
        match ranges.last_mut() {
            Some(last) if last.end == range.start => last.end = range.end,
            _ => ranges.push(range),
        }
    }

    /// True if all bytes at these addresses were written.
    pub fn contain(&self, wanted: &Range<usize>) -> bool {
        let mut ranges = unpoisoned(self.ranges.lock());
        if !ranges.is_sorted_by(|one, next| one.end < next.start) {
            ranges.sort_unstable_by_key(|range| range.start);
            ranges.dedup_by(|next, one| {
                let touch = next.start <= one.end;
                one.end = if touch { one.end.max(next.end) } else { one.end };
                touch
            });
        }
        let before = ranges.partition_point(|range| range.start <= wanted.start);
        let found = before.checked_sub(1).and_then(|last| ranges.get(last));
        wanted.is_empty() || found.is_some_and(|range| wanted.end <= range.end)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn ranges_are_united_and_other_memory_does_not_count() {
        let memory = [0u8; 100];
        let start = memory.as_ptr().addr();
        let at = |from: usize, to: usize| start + from..start + to;
        let filled = FilledRanges::none(at(10, 90));
        for (from, to) in [(50, 60), (10, 20), (20, 30), (70, 90), (55, 65), (0, 10), (85, 95)] {
            filled.add(&memory[from..to]);
        }
        for (from, to) in [(10, 30), (50, 65), (52, 64), (70, 90), (40, 40)] {
            assert!(filled.contain(&at(from, to)), "{from} {to}");
        }
        for (from, to) in [(10, 31), (49, 60), (60, 75), (0, 10), (85, 91)] {
            assert!(!filled.contain(&at(from, to)), "{from} {to}");
        }
    }
}
