//! Prints how fast so many threads hash at once: tensors one by one, as the crate `sha2` does, and
//! two at a time on each thread, as `src/codec/sha256_pair.rs` does; CRC-32 is part of both.
#![allow(missing_docs, clippy::unwrap_used, clippy::cast_possible_truncation)]

use std::hint::black_box;
use std::sync::Barrier;
use std::time::Instant;

use tensorizer::codec::hash::{SMALL, digest, digest_all};

/// Tensors of each thread, more than its share of a cache.
const TENSORS: usize = 256;
const ROUNDS: usize = 7;

fn main() {
    let threads = std::env::args().nth(1).map_or(tensorizer::cpu_count(), |n| n.parse().unwrap());
    let tensor = |n: usize| (0..SMALL as usize).map(|i| (i * 7 + n) as u8).collect::<Vec<u8>>();
    let data: Vec<Vec<Vec<u8>>> =
        (0..threads).map(|_| (0..TENSORS).map(tensor).collect()).collect();
    for _ in 0..ROUNDS {
        let single = measure(&data, &|tensors| {
            for (header, data) in tensors {
                black_box(digest(header, data, true));
            }
        });
        let paired = measure(&data, &|tensors| {
            let _ = black_box(digest_all(tensors, true));
        });
        let more = (paired / single - 1.0) * 100.0;
        println!(
            "{threads} threads: one by one {single:.2} GB/s, in pairs {paired:.2} GB/s, {more:+.0} %"
        );
    }
}

type Tensors<'t> = [(&'t [u8], &'t [u8])];

/// GB/s of all threads together, until the slowest is done.
fn measure(data: &[Vec<Vec<u8>>], hash: &(dyn Fn(&Tensors<'_>) + Sync)) -> f64 {
    let barrier = Barrier::new(data.len());
    let seconds = std::thread::scope(|scope| {
        let threads: Vec<_> = data
            .iter()
            .map(|tensors| {
                scope.spawn(|| {
                    let tensors: Vec<(&[u8], &[u8])> =
                        tensors.iter().map(|data| (&b"header"[..], data.as_slice())).collect();
                    barrier.wait();
                    let start = Instant::now();
                    hash(&tensors);
                    start.elapsed().as_secs_f64()
                })
            })
            .collect();
        threads.into_iter().map(|thread| thread.join().unwrap()).fold(0.0, f64::max)
    });
    (data.len() * TENSORS) as f64 * SMALL as f64 / 1e9 / seconds
}
