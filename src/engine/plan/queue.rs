//! The work queue of a load: work in file order, in one share per reader or in one for all.

use std::collections::VecDeque;

use crate::error::Result;
use crate::sys::sync::{Mutex, unpoisoned};

/// Work in contiguous shares, so that each reader reads a contiguous part of the file. The kernel
/// then reads ahead for each reader: with a cold cache, this was a third faster than one share for
/// all. A reader without work takes over the second half of the longest share.
pub struct WorkQueue<T> {
    shares: Mutex<Vec<VecDeque<T>>>,
}

/// The next step of a reader.
pub enum Next<T> {
    /// Work to do now.
    Work(T),
    /// No work yet: the first is not ready.
    Later,
}

impl<T> WorkQueue<T> {
    /// Divides work into shares. With one share, all readers take turns.
    pub fn new(work: Vec<T>, shares: usize) -> Self {
        let (total, count) = (work.len(), shares.max(1));
        let mut work = work.into_iter();
        let shares = (0..count).map(|share| {
            let len = total * (share + 1) / count - total * share / count;
            work.by_ref().take(len).collect()
        });
        WorkQueue { shares: Mutex::new(shares.collect()) }
    }

    /// Takes the first work of a queue with one share, or returns [`Next::Later`] if `ready` is
    /// false for it. None if there is no more work.
    pub fn next_if(&self, ready: impl FnOnce(&T) -> Result<bool>) -> Result<Option<Next<T>>> {
        let mut shares = unpoisoned(self.shares.lock());
        let Some(share) = shares.first_mut() else { return Ok(None) };
        let Some(first) = share.front() else { return Ok(None) };
        let next = if ready(first)? { share.pop_front().map(Next::Work) } else { None };
        Ok(Some(next.unwrap_or(Next::Later)))
    }

    /// Takes the next work of a reader; readers are numbered from 0. With one share, it is the
    /// first work that is not deferred, or the first of all if every one is deferred.
    pub fn next(&self, reader: usize, mut put_off: impl FnMut(&T) -> bool) -> Option<T> {
        let mut shares = unpoisoned(self.shares.lock());
        // With one share, all readers take from it in turn.
        if let [share] = shares.as_mut_slice() {
            let first = share.iter().position(|work| !put_off(work)).unwrap_or(0);
            return share.remove(first);
        }
        if reader >= shares.len() {
            shares.resize_with(reader + 1, VecDeque::new);
        }
        if let Some(work) = shares.get_mut(reader).and_then(VecDeque::pop_front) {
            return Some(work);
        }
        let longest = shares.iter_mut().max_by_key(|share| share.len())?;
        let mut rest = longest.split_off(longest.len() / 2);
        let work = rest.pop_front();
        if let Some(own) = shares.get_mut(reader).filter(|_| !rest.is_empty()) {
            *own = rest;
        }
        work
    }
}

#[cfg(all(test, not(feature = "models")))]
#[allow(clippy::unwrap_used)]
mod tests {
    use super::*;
    use proptest::prelude::*;

    #[test]
    fn idle_readers_take_half_of_the_longest_share() {
        let shares = WorkQueue::new((0..10).collect(), 3);
        assert_eq!(
            [0, 1, 2, 0].map(|reader| shares.next(reader, |_| false).unwrap()),
            [0, 3, 6, 1]
        );
        // The second reader does its share, and then halves of what is left of the others.
        let rest: Vec<i32> = std::iter::from_fn(|| shares.next(1, |_| false)).collect();
        assert_eq!(rest, [4, 5, 8, 9, 7, 2]);
    }

    #[test]
    fn deferred_work_comes_last() {
        let work = WorkQueue::new((0..6).collect(), 1);
        let next = || work.next(0, |number| number % 2 == 0);
        let order: Vec<i32> = std::iter::from_fn(next).collect();
        assert_eq!(order, [1, 3, 5, 0, 2, 4]);
    }

    proptest! {
        #[test]
        fn all_work_is_handed_out_once(total in 0usize..50, count in 0usize..9, order in proptest::collection::vec(0usize..20, 0..60)) {
            let shares = WorkQueue::new((0..total).collect(), count);
            let mut done: Vec<usize> = order.iter().filter_map(|&r| shares.next(r, |_| false)).collect();
            done.extend(std::iter::from_fn(|| shares.next(0, |_| false)));
            if count <= 1 {
                prop_assert!(done.is_sorted());
            }
            done.sort_unstable();
            prop_assert_eq!(done, (0..total).collect::<Vec<_>>());
        }
    }
}
