//! Models of the hash pool under chosen schedules. No wait times out.
#![allow(clippy::unwrap_used)]

use super::super::hash::digest;
use super::*;
use crate::sys::sync::{ModelRules, Rng as _, check_model, thread, thread_rng};

/// Bytes per piece.
const PIECE: usize = 3;

/// One job of a reader: to supply a tensor's header (None), or its data from a position on.
type FeedJob = (usize, Option<usize>);

fn any_jobs(tensors: &[Vec<u8>]) -> Vec<FeedJob> {
    let mut jobs: Vec<FeedJob> = Vec::new();
    for (tensor, data) in tensors.iter().enumerate() {
        jobs.push((tensor, None));
        jobs.extend((0..data.len()).step_by(PIECE).map(|start| (tensor, Some(start))));
    }
    for last in (1..jobs.len()).rev() {
        jobs.swap(last, thread_rng().gen_range(0..=last));
    }
    jobs
}

#[test]
fn every_tensor_is_hashed_once_and_all_readers_end() {
    check_model(ModelRules { longest_timeout: Duration::ZERO, spawn_may_fail: false }, || {
        let tensors: Vec<Vec<u8>> = vec![vec![1; 7], Vec::new(), vec![2; 3], vec![3; 4]];
        let lens = tensors.iter().map(|tensor| Some(tensor.len() as u64));
        let pool: HashPool<&[u8]> = HashPool::new(lens, true);
        let jobs = Mutex::new(any_jobs(&tensors));
        let found = Mutex::new(vec![None; tensors.len()]);
        let complete = |tensor: usize, digests| {
            assert!(unpoisoned(found.lock())[tensor].replace(digests).is_none());
        };
        let step = |more: bool| {
            let streams = pool.take(|| more, || false);
            streams.map(|streams| pool.hash(streams, complete)).is_some()
        };
        let reader = || loop {
            while step(true) {}
            let job = unpoisoned(jobs.lock()).pop();
            match job {
                Some((tensor, None)) => pool.header(tensor, b"header"),
                Some((tensor, Some(start))) => {
                    let end = tensors[tensor].len().min(start + PIECE);
                    pool.data(tensor, start as u64, &tensors[tensor][start..end]);
                }
                None if step(false) => {}
                None => break,
            }
        };
        thread::scope(|scope| {
            (0..3).for_each(|_| drop(scope.spawn(reader)));
        });
        for (tensor, found) in unpoisoned(found.lock()).iter().enumerate() {
            assert_eq!(*found, Some(digest(b"header", &tensors[tensor], true)));
            assert_eq!(pool.retained_len(tensor), 0);
        }
    });
}
