//! Prints how long two threads need to decrypt so many bytes with the libsodium that is linked; or,
//! given a file, to read it into fresh memory and run the same cipher over it.
#![allow(missing_docs, clippy::unwrap_used, clippy::cast_possible_truncation)]

use std::fs::File;
use std::os::unix::fs::FileExt as _;
use std::time::Instant;

use memmap2::{Advice, MmapOptions};
use tensorizer::crypt::{EncryptedPieces, Key, PIECE_LEN, seal};
use tensorizer::format::tensors::crypt_info::Cipher;

fn main() {
    let mut arguments = std::env::args().skip(1);
    let size: u64 = arguments.next().unwrap().parse().unwrap();
    let key = Key::new(&[7; 32]).unwrap();
    let nonce = [1; 24];
    let (seconds, moved) = match arguments.next() {
        Some(path) => (read_and_seal(&path, size as usize, &key, &nonce), size),
        None => decrypt(size, &key, nonce),
    };
    println!("{seconds} {moved}");
}

/// Encrypting in place does the same work as decrypting.
fn read_and_seal(path: &str, size: usize, key: &Key, nonce: &[u8; 24]) -> f64 {
    let piece_len = PIECE_LEN as usize;
    let mut memory = MmapOptions::new().len(size).map_anon().unwrap();
    let _ = memory.advise(Advice::HugePage);
    let middle = size / piece_len / 2 * piece_len;
    let file = File::open(path).unwrap();
    let start = Instant::now();
    let (first, second) = memory.split_at_mut(middle);
    std::thread::scope(|scope| {
        for (from, half) in [(0, first), (middle, second)] {
            let file = &file;
            scope.spawn(move || {
                for (number, piece) in half.chunks_mut(piece_len).enumerate() {
                    let offset = from + number * piece_len;
                    file.read_exact_at(piece, offset as u64).unwrap();
                    seal(piece, nonce, number as u64, key);
                }
            });
        }
    });
    start.elapsed().as_secs_f64()
}

fn decrypt(size: u64, key: &Key, nonce: [u8; 24]) -> (f64, u64) {
    let count = (size / 2).min(256 << 20).div_ceil(PIECE_LEN).max(1);
    let rounds = (size / 2 / (count * PIECE_LEN)).max(1);
    let seconds: Vec<f64> = std::thread::scope(|scope| {
        let work = || {
            let mut blocks: Vec<Vec<u8>> =
                (0..count).map(|n| vec![n as u8; PIECE_LEN as usize]).collect();
            let mut seconds = 0.0;
            for _ in 0..rounds {
                let macs =
                    blocks.iter_mut().zip(0..).map(|(b, n)| seal(b, &nonce, n, key)).collect();
                let cipher = Cipher { piece_len: Some(PIECE_LEN), nonce, macs };
                let pieces = EncryptedPieces::of(&cipher, count * PIECE_LEN).unwrap();
                let start = Instant::now();
                for (block, number) in blocks.iter_mut().zip(0..) {
                    assert!(pieces.decrypt(number, block, key));
                }
                seconds += start.elapsed().as_secs_f64();
            }
            seconds
        };
        let threads = [scope.spawn(work), scope.spawn(work)];
        threads.map(|thread| thread.join().unwrap()).into()
    });
    let slowest = seconds.into_iter().fold(0.0, f64::max);
    (slowest, 2 * rounds * count * PIECE_LEN)
}
