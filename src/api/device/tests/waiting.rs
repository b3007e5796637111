//! Hashes and decryption that wait for bytes which wait for memory: never for each other.

use super::*;

/// Medium tensors whose end shares a batch with the beginning of a larger one.
const NEIGHBOURS: [usize; 8] =
    [9 << 20, 15 << 20, 9 << 20, 14 << 20, 9 << 20, 13 << 20, 9 << 20, 12 << 20];

#[test]
fn hashes_never_wait_for_buffers_that_wait_for_them() {
    let files = file(&NEIGHBOURS, SaveOptions::default());
    for (readers, devices) in [(1, 1), (2, 1), (5, 1), (1, 2), (2, 2), (5, 3)] {
        let schedule = Schedule {
            seed: 7,
            units: 4,
            buffer_len: 4 << 20,
            readers,
            verify: Verify::All,
            apart: false,
            late: false,
            direct_storage: false,
            pipe: false,
            selection: (0..NEIGHBOURS.len()).collect(),
            devices,
            faults: Faults::default(),
            interrupted: false,
            flipped: None,
        };
        load(&files, &schedule, None).unwrap();
    }
}

#[test]
fn decryption_never_waits_for_a_header_that_comes_later() {
    let key = Key::new(&[5; 32]).unwrap();
    let encryption = EncryptionOptions { key: key.clone(), derivation: None, manifest: false };
    let options = SaveOptions { encryption: Some(Arc::new(encryption)), ..SaveOptions::default() };
    let files = file(&NEIGHBOURS, options);
    let file = TensorFile::open(&files.path).unwrap();
    let file = file.decrypt(Arc::new(DecryptionOptions::new(Secret::Key(key))), &Never).unwrap();
    let all: Vec<usize> = (0..NEIGHBOURS.len()).collect();
    for readers in [1, 2, 5] {
        let options =
            LoadOptions { readers: Some(readers), verify: Verify::All, ..LoadOptions::default() };
        let loaded = crate::load(&file, &all, &options, &Never).unwrap();
        for (tensor, expected) in loaded.iter().zip(&files.tensors) {
            assert!(tensor.bytes() == *expected);
        }
    }
}
