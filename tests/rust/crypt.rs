//! Encrypted files, written and read by the core.
#![allow(clippy::cast_possible_truncation)]

use std::fs::OpenOptions;
use std::os::unix::fs::FileExt;
use std::path::Path;
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, Ordering};

use tensorizer::crypt::{DecryptionOptions, EncryptionOptions, Key, PIECE_LEN, Secret};
use tensorizer::format::tensors::crypt_info::KeyDerivation;
use tensorizer::io::{Capabilities, Facts, MemorySource, ReadAt};
use tensorizer::{
    Cancel, Error, LoadOptions, Never, SaveOptions, SaveTensor, TensorData, TensorFile, Verify,
    load, load_into, save,
};

fn key(byte: u8) -> Key {
    Key::new(&[byte; 32]).unwrap()
}

fn tensors() -> Vec<(String, Vec<u8>)> {
    let piece = PIECE_LEN as usize;
    [0, 1, 1000, piece - 1, piece, piece + 1, 3 * piece + 77, 900_000, 1_200_000, 2 * piece]
        .into_iter()
        .enumerate()
        .map(|(at, len)| {
            // Byte `i` is `7 * i + at`, which begins again after 256.
            let mut data = (0..256).map(|i| (i * 7 + at) as u8).collect::<Vec<u8>>();
            data = data.repeat(len / 256 + 1);
            data.truncate(len);
            (format!("t{at}"), data)
        })
        .collect()
}

fn write(path: &Path, encryption: EncryptionOptions, deferred: bool) {
    let tensors = tensors();
    let list = tensors
        .iter()
        .map(|(name, data)| {
            let mut tensor = SaveTensor::new(name, &[data.len() as u64], data.as_slice()).unwrap();
            if deferred {
                let data = data.clone();
                tensor.data = TensorData::Deferred(Box::new(move || Ok(Box::new(data.clone()))));
            }
            tensor
        })
        .collect();
    let options = SaveOptions { encryption: Some(Arc::new(encryption)), ..SaveOptions::default() };
    save(path, list, options, &Never).unwrap();
}

fn open(path: &Path, secret: Secret, manifest: bool) -> Result<TensorFile, Error> {
    let mut options = DecryptionOptions::new(secret);
    options.require_manifest = manifest;
    TensorFile::open(path)?.decrypt(Arc::new(options), &Never)
}

fn plain(manifest: bool) -> EncryptionOptions {
    EncryptionOptions { key: key(1), derivation: None, manifest }
}

#[test]
fn encrypted_tensors_round_trip_with_keys_and_passphrases() {
    let folder = tempfile::tempdir().unwrap();
    let path = folder.path().join("f.tensors");
    let derivation = KeyDerivation { opslimit: 1, memlimit: 8192, salt: [3; 16] };
    let derived = EncryptionOptions::from_passphrase(b"words", derivation, &Never).unwrap();
    for (encryption, manifest) in [(plain(false), false), (plain(true), true), (derived, false)] {
        for deferred in [false, true] {
            let passphrase = encryption.derivation.is_some();
            write(&path, encryption.clone(), deferred);
            let secret = || match passphrase {
                true => Secret::Passphrase(b"words".to_vec().into()),
                false => Secret::Key(key(1)),
            };
            let file = open(&path, secret(), manifest).unwrap();
            let all: Vec<usize> = (0..file.entries().len()).collect();
            let ways = [
                (Verify::All, None),
                (Verify::All, Some(1)),
                (Verify::Crc32, Some(3)),
                (Verify::Nothing, None),
            ];
            // Neither the origin of the data nor that of the key makes another kind of file.
            for &(verify, readers) in &ways[..if deferred || passphrase { 1 } else { ways.len() }] {
                let options = LoadOptions { verify, readers, ..LoadOptions::default() };
                let loaded = load(&file, &all, &options, &Never).unwrap();
                for (tensor, (_, data)) in loaded.iter().zip(tensors()) {
                    assert_eq!(tensor.memory.bytes(), data);
                }
            }
            let raw = std::fs::read(&path).unwrap();
            let needle = &tensors()[6].1[..64];
            assert!(!raw.windows(64).any(|window| window == needle), "plain bytes in the file");
            let refused =
                load(&TensorFile::open(&path).unwrap(), &[1], &LoadOptions::default(), &Never);
            assert!(matches!(refused, Err(Error::Crypt(_))));
        }
    }
}

#[test]
fn wrong_key_leaves_no_bytes_in_the_destination() {
    let folder = tempfile::tempdir().unwrap();
    let path = folder.path().join("f.tensors");
    write(&path, plain(false), false);
    let mut out = vec![7u8; 3 * PIECE_LEN as usize + 77];
    let file = open(&path, Secret::Key(key(2)), false).unwrap();
    let failed = load_into(&file, &[6], vec![&mut out], &LoadOptions::default(), &Never);
    assert!(matches!(failed, Err(Error::Crypt(_))));
    assert!(out.iter().all(|&byte| byte == 0));

    // The last piece of a tensor is damaged: the pieces before it are not left either.
    let mut raw = std::fs::read(&path).unwrap();
    let file = open(&path, Secret::Key(key(1)), false).unwrap();
    let end = file.entries()[6].end() as usize;
    raw[end - 1] ^= 1;
    std::fs::write(&path, raw).unwrap();
    out.fill(7);
    let file = open(&path, Secret::Key(key(1)), false).unwrap();
    let failed = load_into(&file, &[6], vec![&mut out], &LoadOptions::default(), &Never);
    assert!(matches!(failed, Err(Error::Crypt(_))));
    assert!(out.iter().all(|&byte| byte == 0));
}

#[test]
fn manifest_detects_exchanged_renamed_and_missing_tensors() {
    let folder = tempfile::tempdir().unwrap();
    let path = folder.path().join("f.tensors");
    let secret = || Secret::Key(key(1));
    write(&path, plain(false), false);
    assert!(matches!(open(&path, secret(), true), Err(Error::Crypt(_))), "there is none");
    write(&path, plain(true), false);
    let sound = std::fs::read(&path).unwrap();
    let file = open(&path, secret(), true).unwrap();
    assert!(open(&path, Secret::Key(key(2)), false).is_err());

    let entries = file.entries().to_vec();
    let swap = |bytes: &mut Vec<u8>, from: &str, to: &str| {
        let at = bytes.windows(2).position(|window| window == from.as_bytes()).unwrap();
        bytes[at..at + 2].copy_from_slice(to.as_bytes());
    };
    // Two tensors change their names, in the index and in their headers.
    let mut renamed = sound.clone();
    for (from, to) in [("t3", "xx"), ("t4", "t3"), ("xx", "t4")] {
        swap(&mut renamed, from, to);
        let header = entries
            .iter()
            .find(|e| e.name.stored() == from || from == "xx" && e.name.stored() == "t3");
        let at = header.unwrap().header_offset as usize;
        let mut part = renamed[at..at + 64].to_vec();
        swap(&mut part, from, to);
        renamed[at..at + 64].copy_from_slice(&part);
    }
    // A hash in a header is changed: section of 41 bytes, two hashes, CRC-32 of four bytes.
    let mut unhashed = sound.clone();
    let at = entries[2].header_offset as usize;
    let section = unhashed[at..].windows(5).position(|window| window == [41, 0, 2, 0, 4]).unwrap();
    unhashed[at + section + 5] ^= 1;
    for (what, bytes) in [("names", &renamed), ("hashes", &unhashed)] {
        std::fs::write(&path, bytes).unwrap();
        let failed = open(&path, secret(), false);
        assert!(matches!(failed, Err(Error::Crypt(_) | Error::Format { .. })), "{what}");
    }
    // Every byte of the prologue and the index.
    let index_len = u64::from_le_bytes(sound[65..73].try_into().unwrap());
    std::fs::write(&path, &sound).unwrap();
    let changed = OpenOptions::new().write(true).open(&path).unwrap();
    for at in 0..73 + index_len {
        let byte = sound[usize::try_from(at).unwrap()];
        changed.write_all_at(&[byte ^ 1], at).unwrap();
        assert!(open(&path, secret(), true).is_err(), "byte {at}");
        changed.write_all_at(&[byte], at).unwrap();
    }
    open(&path, secret(), true).unwrap();
}

/// Serves one file while it is opened, and another one afterwards.
struct TwoFaced {
    facts: Facts,
    faces: [Vec<u8>; 2],
    turned: AtomicBool,
}

impl ReadAt for TwoFaced {
    fn facts(&self) -> &Facts {
        &self.facts
    }

    fn capabilities(&self) -> Capabilities {
        MemorySource::new(&self.faces[0][..], "").capabilities()
    }

    fn read_at(
        &self,
        offset: u64,
        buffers: &mut tensorizer::mem::Buffers<'_>,
        cancel: &dyn Cancel,
    ) -> tensorizer::Result<usize> {
        let face = &self.faces[usize::from(self.turned.load(Ordering::Relaxed))];
        MemorySource::new(&face[..], "two-faced").read_at(offset, buffers, cancel)
    }
}

#[test]
fn headers_that_change_after_opening_are_refused_with_a_manifest() {
    let folder = tempfile::tempdir().unwrap();
    let path = folder.path().join("f.tensors");
    write(&path, plain(true), false);
    let first = std::fs::read(&path).unwrap();
    // The same names, shapes and places under the same key, but other nonces, tags and data.
    write(&path, plain(true), false);
    let second = std::fs::read(&path).unwrap();
    assert_eq!(first.len(), second.len());
    let facts =
        Facts { uri: "two-faced".to_owned(), len: Some(first.len() as u64), ..Facts::default() };
    let source =
        Arc::new(TwoFaced { facts, faces: [first, second], turned: AtomicBool::new(false) });
    let shared: Arc<dyn ReadAt> = Arc::clone(&source) as _;
    let mut options = DecryptionOptions::new(Secret::Key(key(1)));
    options.require_manifest = true;
    let file =
        TensorFile::from_source(shared, 0, &Never).unwrap().decrypt(Arc::new(options), &Never);
    let file = file.unwrap();
    assert!(load(&file, &[1, 6], &LoadOptions::default(), &Never).is_ok());
    source.turned.store(true, Ordering::Relaxed);
    let failed = load(&file, &[1, 6], &LoadOptions::default(), &Never);
    assert!(matches!(failed, Err(Error::Crypt(_))));
}

#[test]
fn key_derivations_beyond_the_limits_are_refused() {
    let folder = tempfile::tempdir().unwrap();
    let path = folder.path().join("f.tensors");
    let derivation = KeyDerivation { opslimit: 3, memlimit: 1 << 20, salt: [3; 16] };
    write(&path, EncryptionOptions::from_passphrase(b"words", derivation, &Never).unwrap(), false);
    for (opslimit, memlimit, fits) in [(3, 1 << 20, true), (2, 1 << 20, false), (3, 1 << 19, false)]
    {
        let mut options = DecryptionOptions::new(Secret::Passphrase(b"words".to_vec().into()));
        options.allow(Some(opslimit), Some(memlimit));
        let file = TensorFile::open(&path).unwrap().decrypt(Arc::new(options), &Never).unwrap();
        let loaded = load(&file, &[1], &LoadOptions::default(), &Never);
        match loaded {
            Ok(_) => assert!(fits),
            Err(error) => {
                assert!(!fits);
                assert!(error.to_string().contains("is allowed"), "{error}");
            }
        }
    }
}
