//! Prints how long two threads need to decrypt so many bytes with the libsodium that is linked.
#![allow(missing_docs, clippy::unwrap_used, clippy::cast_possible_truncation)]

use std::time::Instant;

use tensorizer::crypt::{Key, PIECE_LEN, Pieces, seal};
use tensorizer::format::crypt_info::Cipher;

fn main() {
    let size: u64 = std::env::args().nth(1).unwrap().parse().unwrap();
    let key = Key::new(&[7; 32]).unwrap();
    let count = (size / 2).min(256 << 20).div_ceil(PIECE_LEN).max(1);
    let rounds = (size / 2 / (count * PIECE_LEN)).max(1);
    let nonce = [1; 24];
    let seconds: Vec<f64> = std::thread::scope(|scope| {
        let work = || {
            let mut blocks: Vec<Vec<u8>> =
                (0..count).map(|n| vec![n as u8; PIECE_LEN as usize]).collect();
            let mut seconds = 0.0;
            for _ in 0..rounds {
                let macs =
                    blocks.iter_mut().zip(0..).map(|(b, n)| seal(b, &nonce, n, &key)).collect();
                let cipher = Cipher::Parallel { piece_len: PIECE_LEN, nonce, macs };
                let pieces = Pieces::of(&cipher, count * PIECE_LEN).unwrap();
                let start = Instant::now();
                for (block, number) in blocks.iter_mut().zip(0..) {
                    assert!(pieces.open(number, block, &key));
                }
                seconds += start.elapsed().as_secs_f64();
            }
            seconds
        };
        let threads = [scope.spawn(work), scope.spawn(work)];
        threads.map(|thread| thread.join().unwrap()).into()
    });
    let slowest = seconds.into_iter().fold(0.0, f64::max);
    println!("{slowest} {}", 2 * rounds * count * PIECE_LEN);
}
