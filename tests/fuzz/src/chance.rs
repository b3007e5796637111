//! Tries inputs without looking at what they reach, many times as fast as libFuzzer: those of a
//! corpus, changed and put together, and bytes by chance.

use std::panic::catch_unwind;
use std::path::Path;
use std::time::{Duration, Instant};

use crate::targets::Target;

/// Bytes of an input at most.
const MOST: usize = 4200;
const PIECES: [&[u8]; 14] = [
    b"\0\0\0\0\0\0\0\0",
    b"\xff\xff\xff\xff\xff\xff\xff\xff",
    b"\x01\0\0\0",
    b"\"",
    b"{",
    b"}",
    b"[",
    b"]",
    b",",
    b":",
    b"\x1e[",
    b"\\u",
    b"null",
    b"18446744073709551615",
];

/// Numbers by chance: xorshift.
struct Chance(u64);

impl Chance {
    fn next(&mut self) -> u64 {
        self.0 ^= self.0 << 13;
        self.0 ^= self.0 >> 7;
        self.0 ^= self.0 << 17;
        self.0
    }

    fn below(&mut self, end: usize) -> usize {
        (self.next() >> 16) as usize % end.max(1)
    }
}

fn input(corpus: &[Vec<u8>], chance: &mut Chance) -> Vec<u8> {
    let mut bytes: Vec<u8> = match chance.below(8) {
        0 => (0..chance.below(200)).map(|_| chance.next() as u8).collect(),
        _ => corpus.get(chance.below(corpus.len())).cloned().unwrap_or(Vec::new()),
    };
    for _ in 0..1 + chance.below(4) {
        let at = chance.below(bytes.len() + 1);
        let end = at + chance.below(bytes.len() - at + 1);
        match chance.below(8) {
            0 | 1 if at < bytes.len() => bytes[at] ^= 1 << chance.below(8),
            2 if at < bytes.len() => bytes[at] = chance.next() as u8,
            3 => drop(bytes.splice(at..end.min(at + 4), (0..chance.below(5)).map(|n| n as u8))),
            4 => {
                let again = bytes[at..end].to_vec();
                bytes.splice(at..at, again);
            }
            5 => drop(bytes.splice(at..at, PIECES[chance.below(PIECES.len())].iter().copied())),
            6 if !corpus.is_empty() => {
                let other = &corpus[chance.below(corpus.len())];
                bytes.truncate(at);
                bytes.extend(&other[chance.below(other.len() + 1)..]);
            }
            _ => bytes.extend((0..chance.below(9)).map(|_| chance.next() as u8)),
        }
    }
    bytes.truncate(MOST);
    bytes
}

/// Tries inputs of a target until it is time, and prints how many; true if none panics.
pub fn run(target: &Target, time: Duration, seed: u64, folder: &Path) -> bool {
    let &(name, work) = target;
    let files = std::fs::read_dir(folder.join(name)).into_iter().flatten().flatten();
    let mut corpus: Vec<Vec<u8>> =
        files.filter_map(|file| std::fs::read(file.path()).ok()).collect();
    corpus.sort();
    let mut chance = Chance(seed.wrapping_mul(0x9e37_79b9_7f4a_7c15) | 1);
    let (begun, mut count) = (Instant::now(), 0u64);
    let mut sound = true;
    while begun.elapsed() < time && sound {
        for _ in 0..64 {
            let bytes = input(&corpus, &mut chance);
            count += 1;
            if catch_unwind(|| work(&bytes)).is_err() {
                let path = folder.join(format!("{name}-panic"));
                eprintln!(
                    "FINDING {name}: input number {count} of seed {seed}: {}",
                    path.display()
                );
                drop(std::fs::write(path, bytes));
                sound = false;
                break;
            }
        }
    }
    println!("{name} {count}");
    sound
}
