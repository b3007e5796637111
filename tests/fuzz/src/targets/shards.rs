//! Indices of shards: what they name lies beside or below them.
use std::path::{Component, Path};

use tensorizer::format::shards::parse;

/// Tries an input.
pub fn run(bytes: &[u8]) {
    let Ok(index) = parse(bytes) else { return };
    assert!(!index.files.is_empty() && !index.tensors.is_empty());
    for file in &index.files {
        assert!(Path::new(file).components().all(|step| matches!(step, Component::Normal(_))));
        assert!(!file.contains(':') && !file.contains('\0'));
    }
    assert!(index.files.windows(2).all(|pair| pair[0] < pair[1]));
    let mut used = vec![false; index.files.len()];
    index.tensors.values().for_each(|&number| used[number] = true);
    assert!(used.iter().all(|&used| used));
}
