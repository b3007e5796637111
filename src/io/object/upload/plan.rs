//! The division of an object into parts.

use crate::memory_limit::PART_LEN;

/// Lengths of parts are multiples of this, and so of every alignment.
const PART_UNIT: u64 = 2 << 20;

/// The most parts of an object: those that S3 and Google allow, and a fifth of the 50,000 blocks of
/// a blob of Azure, where blocks of failed uploads count too, up to 100,000.
pub const MAX_PARTS: u64 = 10_000;
/// Part numbers that are reserved for the head, which may grow.
pub const HEAD_PARTS: u64 = MAX_PARTS / 10;
/// Part numbers for the bytes after the head.
const BODY_PARTS: u64 = MAX_PARTS - HEAD_PARTS;
/// Part numbers for the announced length. More may be written, so some numbers stay free.
const ANNOUNCED_PARTS: u64 = MAX_PARTS / 10 * 8;

/// Rounds a minimum length of parts up to one that every protocol allows, and at most to `longest`.
fn rounded(len: u64, longest: u64) -> u64 {
    len.clamp(PART_LEN, longest).next_multiple_of(PART_UNIT)
}

/// An announced length counts as far more than the written length if it exceeds it by this factor.
const MUCH_MORE: u64 = 3;

/// The parts of an object that were requested so far.
///
/// If the announced length is far more than was written before, it is cut into parts of one length.
/// Otherwise, each part is so long that the remaining part numbers could hold twice the present
/// length. So part numbers never run out, however much is written.
#[derive(Debug)]
pub struct PartPlan {
    /// Bytes of the longest part that the protocol allows.
    max_part_len: u64,
    /// Length of the head, which is written last; a multiple of the length of parts.
    pub head_len: u64,
    /// Length of each part of the head, and of the first parts after it.
    pub part_len: u64,
    /// The announced bytes after the head, and the length of their parts.
    announced: (u64, u64),
    /// The end of each part after the head, relative to the head's end.
    ends: Vec<u64>,
}

/// A part after the head.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct PartRange {
    /// Its number, counted from 0.
    pub number: u64,
    /// Its start, relative to the end of the head.
    pub start: u64,
    pub len: u64,
}

impl PartPlan {
    /// `head`: bytes that are written last. `len`: bytes of the whole file, as far as is known.
    pub fn new(max_part_len: u64, head: u64, len: u64) -> Self {
        let part_len = rounded(len.div_ceil(ANNOUNCED_PARTS), max_part_len);
        let head_len = head.max(1).next_multiple_of(part_len);
        let announced = (len.saturating_sub(head_len), part_len);
        PartPlan { max_part_len, head_len, part_len, announced, ends: Vec::new() }
    }

    /// Announces that the file will have at least `len` bytes.
    pub fn announce(&mut self, len: u64) {
        let len = len.saturating_sub(self.head_len);
        let end = self.end();
        if len > end.saturating_mul(MUCH_MORE).max(self.announced.0) {
            // Half of the numbers: this may come again.
            let len_of_each = (len - end).div_ceil(self.remaining_numbers().div_ceil(2));
            self.announced = (len, rounded(len_of_each, self.max_part_len));
        }
    }

    /// Bytes of the longest part so far.
    pub fn longest_part(&self) -> u64 {
        let last = self.ends.len().checked_sub(1).and_then(|last| self.part_range(last));
        last.map_or(self.part_len, |last| last.len.max(self.part_len))
    }

    /// The part with the byte at a position of the file that is not in the head. None where there
    /// are no numbers left.
    pub fn part_at(&mut self, offset: u64) -> Option<PartRange> {
        let at = offset.saturating_sub(self.head_len);
        while self.ends.last().is_none_or(|&end| end <= at) {
            if self.ends.len() as u64 == BODY_PARTS {
                return None;
            }
            let start = self.end();
            self.ends.push(start + self.next_len(start));
        }
        self.part_range(self.ends.partition_point(|&end| end <= at))
    }

    /// A part that was requested before.
    pub fn part_range(&self, number: usize) -> Option<PartRange> {
        let start = number.checked_sub(1).map_or(Some(0), |last| self.ends.get(last).copied())?;
        let len = self.ends.get(number)? - start;
        Some(PartRange { number: number as u64, start, len })
    }

    fn next_len(&self, start: u64) -> u64 {
        let (until, len) = self.announced;
        let len = if start < until {
            len
        } else {
            rounded((2 * start).div_ceil(self.remaining_numbers()), self.max_part_len)
        };
        len.max(self.longest_part())
    }

    fn end(&self) -> u64 {
        self.ends.last().copied().unwrap_or(0)
    }

    /// Part numbers that are left.
    fn remaining_numbers(&self) -> u64 {
        BODY_PARTS.saturating_sub(self.ends.len() as u64).max(1)
    }
}

#[cfg(test)]
mod tests {
    use super::super::memory::{DEFAULT_WRITERS, UploadBudget};
    use super::*;

    const S3: u64 = 5 << 30;
    const GB: u64 = 1_000_000_000;
    const INDEX: u64 = 300_000;

    /// Asks for all parts of a file, one after another, and gives their number.
    fn take_all_parts(plan: &mut PartPlan, len: u64) -> u64 {
        let (mut number, mut at) = (0, plan.head_len);
        while at < len {
            let part = plan.part_at(at).unwrap();
            assert_eq!((part.number, plan.head_len + part.start), (number, at));
            assert!((PART_LEN..=S3).contains(&part.len) && part.len.is_multiple_of(PART_UNIT));
            assert_eq!(plan.part_at(at + part.len - 1), Some(part));
            at += part.len;
            number += 1;
        }
        number
    }

    #[test]
    fn part_memory_allows_sixteen_connections_at_any_size() {
        let mib = 1 << 20;
        for (len, parts, part_len, memory) in [
            (GB, 119, 8 * mib, 160 * mib),
            (140 * GB, 7417, 18 * mib, 360 * mib),
            (5000 * GB, 7973, 598 * mib, 11960 * mib),
        ] {
            let mut plan = PartPlan::new(S3, INDEX, len);
            assert_eq!(plan.part_len, part_len);
            assert_eq!(take_all_parts(&mut plan, len), parts);
            // As announced, all parts have one length.
            assert_eq!(plan.longest_part(), part_len);
            let (writers, parts) = (DEFAULT_WRITERS, usize::MAX);
            let budget = UploadBudget { writers, bytes: None, parts, object: 0 };
            assert_eq!(budget.writers(plan.longest_part()), 16);
            assert_eq!(budget.parts(plan.longest_part()) as u64 * part_len, memory);
            // A setting bounds it, and takes its price in connections.
            let budget = UploadBudget { bytes: Some(256 * mib), ..budget };
            let writers = budget.writers(plan.longest_part());
            assert_eq!(writers as u64, (256 * mib / part_len).clamp(1, 16));
            assert!(budget.parts(part_len) as u64 * part_len <= (256 * mib).max(part_len));
        }
    }

    #[test]
    fn part_numbers_suffice_for_unannounced_bytes() {
        for (len, longest) in [(GB, 8 << 20), (140 * GB, 102 << 20), (5000 * GB, S3)] {
            let mut plan = PartPlan::new(S3, 0, 0);
            assert!(take_all_parts(&mut plan, len) <= BODY_PARTS);
            assert_eq!(plan.longest_part(), longest);
        }
        // Little at first, and then a model of which the size is known.
        let mut plan = PartPlan::new(S3, INDEX, 1 << 20);
        take_all_parts(&mut plan, 100 << 20);
        plan.announce(140 * GB);
        assert!(take_all_parts(&mut plan, 140 * GB) <= ANNOUNCED_PARTS);
        assert_eq!(plan.longest_part(), 30 << 20);
        // More and more.
        let mut plan = PartPlan::new(S3, INDEX, 50 * GB);
        for calls in 1..=20 {
            plan.announce(calls * 50 * GB);
            assert!(take_all_parts(&mut plan, calls * 50 * GB) < BODY_PARTS);
        }
        assert!(plan.longest_part() <= 4 << 30);
        assert_eq!(PartPlan::new(S3, 0, 0).part_at(u64::MAX / 2), None);
    }

    #[test]
    fn every_byte_belongs_to_one_part() {
        for (head, len) in [(0, 0), (1, 100 << 20), (300_000, 200 << 30), (100 << 20, 1 << 30)] {
            let mut plan = PartPlan::new(S3, head, len);
            assert!(plan.head_len >= head.max(1), "{plan:?}");
            assert_eq!(plan.head_len % plan.part_len, 0);
            let first = PartRange { number: 0, start: 0, len: plan.part_len };
            assert_eq!(plan.part_at(plan.head_len), Some(first));
            assert_eq!(plan.part_at(plan.head_len + plan.part_len - 1), Some(first));
            assert_eq!(plan.part_at(plan.head_len + plan.part_len).unwrap().number, 1);
        }
    }
}
