//! Hashes of large tensors whose pieces arrive from many threads in any order.
//!
//! CRC-32 values of pieces can be combined, so each thread computes that of its own piece while the
//! piece is in its cache. SHA-256 must see the pieces of a tensor in order. So a tensor whose next
//! piece has arrived waits in a queue.
//!
//! Threads take tensors from the queue two at a time, because one core hashes two streams together
//! faster than one after the other. While fewer than two are ready, they continue to move bytes. So
//! one large tensor is hashed by one thread while the others read.

use std::collections::{BTreeMap, VecDeque};
use std::time::Duration;

use super::hash::Digests;
use super::sha256::Sha256;
use crate::sys::sync::{Condvar, Mutex, MutexGuard, unpoisoned};

/// Bytes that a thread hashes before it looks at the queue again.
const QUANTUM: usize = 1 << 20;
/// Interval of checks for cancellation while a thread waits for work.
const IDLE: Duration = Duration::from_millis(20);

/// The tensors of one call that are hashed piece by piece. Pieces are retained until they are
/// hashed.
pub struct HashPool<B> {
    /// None for tensors that are not hashed here, of which there may be many.
    states: Vec<Option<Box<Mutex<TensorHashes<B>>>>>,
    queue: Mutex<ReadyQueue>,
    changed: Condvar,
    sha: bool,
}

struct ReadyQueue {
    ready: VecDeque<usize>,
    unfinished: usize,
    idle: usize,
}

/// The hashes of one tensor, and its pieces that are not hashed yet.
struct TensorHashes<B> {
    data_len: u64,
    /// None until the header is there, and while a thread is hashing.
    work: Option<HashWork<B>>,
    crc: crc32fast::Hasher,
    /// Pieces that wait for their turn, by position in the data.
    waiting: BTreeMap<u64, DataPiece<B>>,
    /// Position after the pieces that were taken from `waiting`.
    next: u64,
}

/// A piece of a tensor's data.
struct DataPiece<B> {
    len: u64,
    crc: crc32fast::Hasher,
    /// The bytes, if SHA-256 still needs them.
    bytes: Option<B>,
}
/// The next bytes of one or two tensors, taken by a thread that will hash them.
pub struct HashBatch<B>(Vec<(usize, HashWork<B>)>);

struct HashWork<B> {
    sha: Sha256,
    piece: Option<B>,
    /// Bytes of the piece that are hashed.
    done: usize,
}

impl<B: AsRef<[u8]>> HashWork<B> {
    /// Bytes of the piece that are not hashed yet.
    fn remaining(&self) -> usize {
        self.piece.as_ref().map_or(0, |piece| piece.as_ref().len() - self.done)
    }

    /// Returns the hash and the next bytes of the piece, at most `len`, which count as hashed from
    /// now on.
    fn next(&mut self, len: usize) -> (&mut Sha256, &[u8]) {
        let bytes = self.piece.as_ref().map_or(&[][..], |piece| piece.as_ref());
        let end = bytes.len().min(self.done.saturating_add(len));
        let now = bytes.get(self.done..end).unwrap_or(&[]);
        self.done = end;
        (&mut self.sha, now)
    }
}

impl<B: AsRef<[u8]>> HashPool<B> {
    /// Creates a pool for tensors of these lengths; tensors with `None` are not hashed here.
    ///
    /// If `sha` is false, only the CRC-32 is computed. Then only complete tensors are queued, to be
    /// reported.
    pub fn new(data_lens: impl Iterator<Item = Option<u64>>, sha: bool) -> Self {
        let mut unfinished = 0;
        let states = data_lens.map(|data_len| {
            let data_len = data_len?;
            unfinished += 1;
            Some(Box::new(Mutex::new(TensorHashes {
                data_len,
                work: None,
                crc: crc32fast::Hasher::new(),
                waiting: BTreeMap::new(),
                next: 0,
            })))
        });
        let states = states.collect();
        let queue = Mutex::new(ReadyQueue { ready: VecDeque::new(), unfinished, idle: 0 });
        HashPool { states, queue, changed: Condvar::new(), sha }
    }

    fn state(&self, tensor: usize) -> Option<&Mutex<TensorHashes<B>>> {
        self.states.get(tensor)?.as_deref()
    }

    /// Bytes of a tensor that are retained until it is their turn to be hashed.
    pub fn retained_len(&self, tensor: usize) -> u64 {
        let Some(state) = self.state(tensor) else { return 0 };
        let state = unpoisoned(state.lock());
        state.waiting.values().filter(|piece| piece.bytes.is_some()).map(|piece| piece.len).sum()
    }

    /// Takes the covered bytes of a tensor's header.
    pub fn header(&self, tensor: usize, bytes: &[u8]) {
        let Some(state) = self.state(tensor) else { return };
        let mut state = unpoisoned(state.lock());
        state.crc.update(bytes);
        let mut sha = Sha256::default();
        if self.sha {
            sha.update(bytes);
        }
        self.requeue(tensor, HashWork { sha, piece: None, done: 0 }, &mut state);
    }

    /// Takes a piece of data that begins at `start`.
    pub fn data(&self, tensor: usize, start: u64, piece: B) {
        let Some(state) = self.state(tensor) else { return };
        let mut crc = crc32fast::Hasher::new();
        crc.update(piece.as_ref());
        let mut state = unpoisoned(state.lock());
        let len = piece.as_ref().len() as u64;
        // Without SHA-256 the bytes are freed now: other threads may be waiting for the memory.
        let bytes = self.sha.then_some(piece);
        state.waiting.insert(start, DataPiece { len, crc, bytes });
        if start == state.next
            && let Some(work) = state.work.take_if(|work| work.remaining() == 0)
        {
            self.requeue(tensor, work, &mut state);
        }
    }

    /// Puts work back. Queues the tensor if it has bytes to hash, or if all of its bytes are
    /// hashed.
    fn requeue(&self, tensor: usize, mut work: HashWork<B>, state: &mut TensorHashes<B>) {
        if work.remaining() == 0 {
            work.piece = None;
            while let Some(piece) = state.waiting.remove(&state.next) {
                state.crc.combine(&piece.crc);
                state.next += piece.len;
                if piece.bytes.is_some() {
                    (work.piece, work.done) = (piece.bytes, 0);
                    break;
                }
            }
            if work.remaining() == 0 && state.next < state.data_len {
                state.work = Some(work);
                return;
            }
        }
        state.work = Some(work);
        unpoisoned(self.queue.lock()).ready.push_back(tensor);
        self.changed.notify_one();
    }

    fn work(&self, tensor: usize) -> Option<(usize, HashWork<B>)> {
        Some((tensor, unpoisoned(self.state(tensor)?.lock()).work.take()?))
    }

    /// Takes the next bytes of one or two tensors, which [`HashPool::hash`] is to hash.
    ///
    /// If `more_to_move` returns true, it does not wait, and returns None unless two tensors are
    /// ready. Otherwise it waits until one is ready. It returns None once all tensors are finished,
    /// or `stopped` returns true.
    pub fn take(
        &self,
        more_to_move: impl Fn() -> bool,
        stopped: impl Fn() -> bool,
    ) -> Option<HashBatch<B>> {
        let mut queue = unpoisoned(self.queue.lock());
        let mut more = more_to_move();
        while queue.ready.len() < if more { 2 } else { 1 } {
            if more || queue.unfinished == 0 || stopped() {
                return None;
            }
            queue.idle += 1;
            queue = unpoisoned(self.changed.wait_timeout(queue, IDLE)).0;
            queue.idle -= 1;
            more = more_to_move();
        }
        // Near the end, leaving the second stream to an idle thread is faster than hashing both
        // here.
        let pair = more || queue.ready.len() > queue.idle + 1;
        Some(self.take_batch(queue, pair))
    }

    /// Takes what is ready, without waiting; None if nothing is.
    pub fn take_ready(&self) -> Option<HashBatch<B>> {
        let queue = unpoisoned(self.queue.lock());
        (!queue.ready.is_empty()).then(|| self.take_batch(queue, true))
    }

    fn take_batch(&self, mut queue: MutexGuard<'_, ReadyQueue>, pair: bool) -> HashBatch<B> {
        let first = queue.ready.pop_front();
        let second = if pair { queue.ready.pop_front() } else { None };
        drop(queue);
        let tensors = first.into_iter().chain(second);
        HashBatch(tensors.filter_map(|tensor| self.work(tensor)).collect())
    }

    /// Hashes what was taken, and calls `complete` for each tensor that is finished.
    pub fn hash(&self, batch: HashBatch<B>, mut complete: impl FnMut(usize, Digests)) {
        let HashBatch(mut works) = batch;
        match works.as_mut_slice() {
            [(_, a), (_, b)] => {
                let len = a.remaining().min(b.remaining()).min(QUANTUM);
                let [(sha_a, now_a), (sha_b, now_b)] = [a.next(len), b.next(len)];
                let [left_a, left_b] = Sha256::update_pair([sha_a, sha_b], [now_a, now_b]);
                sha_a.update(left_a);
                sha_b.update(left_b);
            }
            works => {
                for (_, work) in works {
                    let (sha, now) = work.next(QUANTUM);
                    sha.update(now);
                }
            }
        }
        for (tensor, work) in works {
            let Some(state) = self.state(tensor) else { continue };
            let mut state = unpoisoned(state.lock());
            if work.remaining() == 0 && state.next == state.data_len {
                let crc = state.crc.clone().finalize();
                drop(state);
                // The bytes are freed before the threads that may wait for their memory are
                // notified below.
                drop(work.piece);
                complete(tensor, Digests { crc, sha: work.sha.finish() });
                unpoisoned(self.queue.lock()).unfinished -= 1;
                self.changed.notify_all();
            } else {
                self.requeue(tensor, work, &mut state);
            }
        }
    }
}

#[cfg(all(test, feature = "models"))]
mod models;

#[cfg(all(test, not(feature = "models")))]
#[allow(clippy::unwrap_used, clippy::indexing_slicing, clippy::cast_possible_truncation)]
mod tests {
    use super::super::hash::digest;
    use super::*;

    #[test]
    fn pieces_in_any_order_on_many_threads_give_the_hash_of_the_whole() {
        let tensors: Vec<Vec<u8>> = [3_000_000usize, 0, 100, 5_000_001, 2_500_000]
            .iter()
            .map(|&len| (0..len).map(|i| (i * 7 + len) as u8).collect())
            .collect();
        for threads in 1..4 {
            let pool: HashPool<&[u8]> =
                HashPool::new(tensors.iter().map(|t| Some(t.len() as u64)), true);
            let mut jobs: Vec<(usize, usize)> = Vec::new();
            for (tensor, data) in tensors.iter().enumerate() {
                jobs.extend((0..data.len()).step_by(700_000).map(|start| (tensor, start)));
                jobs.push((tensor, usize::MAX));
            }
            jobs.sort_by_key(|(tensor, start)| start.wrapping_mul(2_654_435_761) ^ (tensor * 977));
            let jobs = Mutex::new(jobs.into_iter());
            let found = Mutex::new(vec![None; tensors.len()]);
            std::thread::scope(|scope| {
                for _ in 0..threads {
                    scope.spawn(|| {
                        let complete = |tensor: usize, digests| {
                            assert!(unpoisoned(found.lock())[tensor].replace(digests).is_none());
                        };
                        let step = |more: bool| {
                            let streams = pool.take(|| more, || false);
                            streams.map(|streams| pool.hash(streams, complete)).is_some()
                        };
                        loop {
                            while step(true) {}
                            let job = unpoisoned(jobs.lock()).next();
                            match job {
                                Some((tensor, usize::MAX)) => pool.header(tensor, b"header"),
                                Some((tensor, start)) => {
                                    let end = tensors[tensor].len().min(start + 700_000);
                                    pool.data(tensor, start as u64, &tensors[tensor][start..end]);
                                }
                                None if step(false) => {}
                                None => break,
                            }
                        }
                    });
                }
            });
            for (tensor, found) in tensors.iter().zip(found.into_inner().unwrap()) {
                assert_eq!(found, Some(digest(b"header", tensor, true)));
            }
        }
    }
}
