//! `blind SECONDS SEED CORPUS [TARGET…]`: tries inputs of each target without a nightly Rust.
//! Prints a line of how many each has tried; an input that panics is written beside the corpus, a
//! folder for each target.

use std::time::Duration;

use tensorizer_fuzz::chance::run;
use tensorizer_fuzz::targets::{ALL, Target};

fn main() {
    let arguments: Vec<String> = std::env::args().skip(1).collect();
    let [seconds, seed, corpus, names @ ..] = &arguments[..] else {
        panic!("expected SECONDS SEED CORPUS [TARGET…]");
    };
    let wanted = |target: &&Target| names.is_empty() || names.iter().any(|name| name == target.0);
    let targets: Vec<&Target> = ALL.iter().filter(wanted).collect();
    let share = seconds.parse::<u64>().expect("seconds") / targets.len().max(1) as u64;
    let share = Duration::from_secs(share.max(1));
    let seed = seed.parse().expect("a number");
    let sound = targets.iter().filter(|target| !run(target, share, seed, corpus.as_ref()));
    std::process::exit(i32::from(sound.count() > 0));
}
