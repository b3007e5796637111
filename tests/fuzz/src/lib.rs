//! Shared code of the targets: files made from the fuzzer's bytes, sound but for a few fields.
//!
//! The tests of the core run this too, and try inputs for a moment.
#![allow(missing_docs, clippy::unwrap_used, clippy::expect_used, clippy::indexing_slicing)]
#![allow(clippy::cast_possible_truncation, clippy::cast_precision_loss, clippy::too_many_lines)]

pub mod chance;
pub mod input;
pub mod legacy;
#[cfg(feature = "peers")]
pub mod safetensors;
pub mod targets;
pub mod tensors;
pub mod zip;

use std::sync::Arc;

use tensorizer::io::MemorySource;
use tensorizer::{LoadOptions, Never, Opening, Result, Tensor, TensorFile, Verify, load};

/// Opens bytes in memory, of any format.
pub fn open(bytes: &[u8]) -> Result<TensorFile> {
    let opening = Opening { storages: true, ..Opening::new(&Never) };
    opening.source(Arc::new(MemorySource::new(bytes.to_vec(), "fuzzed")), 0)
}

/// Most bytes of memory for the tensors of a target. Data in a file are never as large; tensors of
/// the meta device may have any size.
const MOST: u64 = 64 << 20;

/// Loads all tensors by one reader; None where they are larger than any file of these targets.
pub fn load_all(file: &TensorFile, verify: Verify) -> Option<Result<Vec<Tensor>>> {
    let mut sizes = file.entries().iter().map(|entry| entry.memory_len());
    let sum = sizes.try_fold(0u64, |sum, size| sum.checked_add(size?));
    sum.filter(|&sum| sum <= MOST)?;
    let numbers: Vec<usize> = (0..file.entries().len()).collect();
    let options = LoadOptions { readers: Some(1), verify, ..LoadOptions::default() };
    Some(load(file, &numbers, &options, &Never))
}

/// Cuts something from the middle of every tensor and compares it with the whole.
pub fn check_slices(file: &TensorFile, whole: &[Tensor]) {
    for (number, tensor) in whole.iter().enumerate() {
        let slice: Box<[_]> = tensor.shape().iter().map(|&dim| dim / 3..dim - dim / 4).collect();
        let (size, shape) = (tensor.dtype().size() as usize, tensor.shape().to_vec());
        let cut = file.sliced(vec![(number, slice.clone())]).expect("a slice within the shape");
        let options = LoadOptions { readers: Some(1), ..LoadOptions::default() };
        let part = load(&cut, &[0], &options, &Never).expect("a slice of what could be loaded");
        // Element by element, in another way than the library's.
        let mut expected: Vec<u8> = Vec::new();
        let elements = tensor.bytes().len() / size;
        for at in 0..elements {
            let mut rest = at as u64;
            let inside = shape.iter().zip(&slice).rev().all(|(&dim, range)| {
                let index = rest % dim;
                rest /= dim;
                range.contains(&index)
            });
            if inside {
                expected.extend(&tensor.bytes()[at * size..(at + 1) * size]);
            }
        }
        assert_eq!(part[0].bytes(), expected, "slice {slice:?} of {shape:?}");
    }
}

#[cfg(test)]
mod tests {
    use std::time::Duration;

    use super::*;

    #[test]
    fn a_moment_of_every_target() {
        let folder = tempfile::tempdir().unwrap();
        let moment = Duration::from_millis(250);
        let run = |target: &&_| !chance::run(target, moment, 1, folder.path());
        let found = targets::ALL.iter().filter(run);
        let found: Vec<_> = found.map(|target| target.0).collect();
        assert!(found.is_empty(), "{found:?}");
    }
}
