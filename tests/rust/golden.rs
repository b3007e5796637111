//! Every golden file, through the core alone.
#![allow(missing_docs, clippy::unwrap_used, clippy::expect_used, clippy::indexing_slicing)]
#![allow(clippy::cast_possible_truncation, clippy::cast_precision_loss)]

mod support;

use std::path::Path;
use std::sync::Arc;

use serde_json::Value;
use support::golden;
use tensorizer::format::crypt_info::{Cipher, CryptInfo};
use tensorizer::format::header::Header;
use tensorizer::format::name::Component;
use tensorizer::source::{MemorySource, ReadAt, read_exact_at};
use tensorizer::{Error, LoadOptions, Mapping, TensorFile, load};

fn manifest() -> Vec<Value> {
    let path = Path::new(env!("CARGO_MANIFEST_DIR")).join("tests/golden/manifest.json");
    let text = without_lone_surrogates(&std::fs::read_to_string(path).unwrap());
    let files = serde_json::from_str::<Value>(&text).unwrap()["files"].as_array().unwrap().clone();
    assert_eq!(files.len(), 269);
    files
}

/// `serde_json` refuses escapes of lone surrogates: they become U+FFFD here.
fn without_lone_surrogates(json: &str) -> String {
    let mut out = json.to_owned();
    let mut from = 0;
    while let Some(at) = out[from..].find("\\ud8").map(|at| at + from) {
        if !out[at + 6..].starts_with("\\ud") {
            out.replace_range(at..at + 6, "\\ufffd");
        }
        from = at + 6;
    }
    out
}

/// The bytes of a file, and where in them it begins.
fn contents(file: &Value) -> (Vec<u8>, u64) {
    let name = file["file"].as_str().unwrap();
    if file["category"] != "corrupt" {
        let base = if name.starts_with("v1_at_offset_100") { 100 } else { 0 };
        return (golden(name), base);
    }
    (golden(name), 0)
}

fn open(bytes: Vec<u8>, base: u64, name: &str) -> Result<TensorFile, Error> {
    let source: Arc<dyn ReadAt> = Arc::new(MemorySource::new(bytes, name));
    TensorFile::from_source(source, base)
}

fn name_json(name: &tensorizer::format::name::Name) -> Value {
    match name.path() {
        None => Value::from(name.stored()),
        Some(path) => path
            .iter()
            .map(|component| match component {
                Component::Index(index) => Value::from(*index),
                Component::Key(key) => Value::from(String::from_utf8_lossy(key)),
            })
            .collect(),
    }
}

fn digest(bytes: &[u8]) -> String {
    use sha2::Digest as _;
    sha2::Sha256::digest(bytes).iter().map(|b| format!("{b:02x}")).collect()
}

fn check_entries(file: &TensorFile, expected: &Value, name: &str) {
    let tensors = expected["tensors"].as_array().unwrap();
    assert_eq!(file.entries().len(), tensors.len(), "{name}");
    assert_eq!(u64::from(file.prologue().version), expected["version"].as_u64().unwrap(), "{name}");
    for (entry, tensor) in file.entries().iter().zip(tensors) {
        if !tensor["name"].to_string().contains('\u{fffd}') {
            assert_eq!(name_json(&entry.name), tensor["name"], "{name}");
        }
        let shape: Vec<u64> =
            tensor["shape"].as_array().unwrap().iter().map(|d| d.as_u64().unwrap()).collect();
        assert_eq!(entry.shape, shape, "{name}");
        assert_eq!(Value::from(entry.dtype.stored()), tensor["dtype"], "{name}");
        assert_eq!(
            entry.kind as u8,
            tensor["type"].as_str().unwrap().as_bytes()[0] - b'0',
            "{name}"
        );
        assert_eq!(Value::from(entry.header_offset), tensor["header_offset"], "{name}");
        assert_eq!(Value::from(entry.data_offset), tensor["data_offset"], "{name}");
        assert_eq!(Value::from(entry.data_len), tensor["data_length"], "{name}");
    }
}

#[test]
fn sound_files_hold_what_the_manifest_says() {
    let mut seen = 0;
    for file in manifest() {
        let name = file["file"].as_str().unwrap().to_owned();
        let broken = [
            "defect_empty_name",
            "defect_no_tensors",
            "defect_rs_name_invalid",
            "defect_rs_name_collides",
            "defect_meta_scalar",
        ];
        if name.starts_with("v1_many_full_metadata") {
            check_full_index(&file, &name);
            seen += 1;
            continue;
        }
        if file["category"] == "corrupt" || broken.iter().any(|b| name.starts_with(b)) {
            continue;
        }
        seen += 1;
        let (bytes, base) = contents(&file);
        let opened = open(bytes, base, &name).unwrap();
        check_entries(&opened, &file, &name);
        if opened.prologue().encrypted {
            check_encrypted(&opened, &file, &name);
            continue;
        }
        let all: Vec<usize> = (0..opened.entries().len()).collect();
        let verify = !name.starts_with("hand_no_hashes");
        for readers in [1, 3] {
            let options = LoadOptions { verify, readers: Some(readers), map: Mapping::Never };
            let loaded = load(&opened, &all, &options, &|| Ok(())).unwrap();
            for (tensor, expected) in loaded.iter().zip(file["tensors"].as_array().unwrap()) {
                let entry = opened.entry(tensor.number).unwrap();
                if entry.is_meta() {
                    assert!(tensor.memory.bytes().iter().all(|&b| b == 0), "{name}");
                } else {
                    assert_eq!(digest(tensor.memory.bytes()), expected["data_sha256"], "{name}");
                }
                assert_eq!(
                    u64::from(tensor.header.module_index),
                    expected["module_idx"].as_u64().unwrap(),
                    "{name}"
                );
            }
        }
    }
    assert_eq!(seen, 57 + 22 + 8 - 6);
}

/// What this release does of encrypted files: parse every header, and refuse to hand out data.
fn check_encrypted(file: &TensorFile, expected: &Value, name: &str) {
    for (entry, tensor) in file.entries().iter().zip(expected["tensors"].as_array().unwrap()) {
        let len = (entry.data_offset - entry.header_offset) as usize;
        let mut raw = vec![0; len].into_boxed_slice();
        let mut buffers = [std::io::IoSliceMut::new(&mut raw)];
        read_exact_at(&*file.source(), entry.header_offset, &mut buffers, &String::new).unwrap();
        let header = Header::parse(raw, entry, true).unwrap();
        let info = header.crypt_info.as_ref().unwrap();
        assert_eq!(info.cipher.is_some(), entry.data_len > 0, "{name}: {info}");
        check_crypt(info, &tensor["crypt"], name);
    }
    let refused = load(file, &[0], &LoadOptions::default(), &|| Ok(()));
    assert!(matches!(refused, Err(Error::Crypt(_))), "{name}");
}

/// The manifest gives a rule for this one: 4,369 tensors, which fill the old index to the byte.
fn check_full_index(file: &Value, name: &str) {
    let opened = open(contents(file).0, 0, name).unwrap();
    let all: Vec<usize> = (0..opened.entries().len()).collect();
    assert_eq!(all.len(), 4369);
    let options = LoadOptions { verify: true, ..LoadOptions::default() };
    for (number, tensor) in load(&opened, &all, &options, &|| Ok(())).unwrap().iter().enumerate() {
        let tail = if number == 4368 { "yyyy" } else { "" };
        let entry = opened.entry(number).unwrap();
        assert_eq!(entry.name.stored(), format!("model.layers.{number:05}.mlp.w{tail}"));
        assert_eq!(tensor.memory.bytes(), (number as f32).to_le_bytes());
    }
}

fn check_crypt(info: &CryptInfo, chunks: &Value, name: &str) {
    let hex =
        |bytes: &[u8]| Value::from(bytes.iter().map(|b| format!("{b:02x}")).collect::<String>());
    let mut derivations = 0;
    for chunk in chunks.as_array().unwrap() {
        match (chunk["t"].as_str().unwrap(), &info.cipher) {
            ("par", Some(Cipher::Parallel { piece_len, nonce, macs })) => {
                assert_eq!(Value::from(*piece_len), chunk["chunk"], "{name}");
                assert_eq!(hex(nonce), chunk["nonce"], "{name}");
                let expected = chunk["macs"].as_array().unwrap();
                assert_eq!(
                    macs.iter().map(|mac| hex(mac)).collect::<Vec<_>>(),
                    *expected,
                    "{name}"
                );
            }
            ("seq", Some(Cipher::Sequential { nonce, mac })) => {
                assert_eq!(
                    (hex(nonce), hex(mac)),
                    (chunk["nonce"].clone(), chunk["mac"].clone()),
                    "{name}"
                );
            }
            ("kdf", _) => {
                derivations += 1;
                let kdf = info.key_derivation.as_ref().unwrap();
                assert_eq!(Value::from(kdf.opslimit), chunk["ops"], "{name}");
                assert_eq!(Value::from(kdf.memlimit), chunk["mem"], "{name}");
                assert_eq!(hex(&kdf.salt), chunk["salt"], "{name}");
            }
            other => panic!("{name}: {other:?}"),
        }
    }
    assert_eq!(derivations, usize::from(info.key_derivation.is_some()), "{name}");
}

/// Damage gives an error, or the data that the undamaged file holds; never anything else.
#[test]
fn damaged_files_give_an_error_or_the_right_data() {
    let files = manifest();
    let sound: std::collections::HashMap<&str, &Value> =
        files.iter().map(|f| (f["file"].as_str().unwrap(), f)).collect();
    let (mut seen, mut harmless) = (0, Vec::new());
    for file in files.iter().filter(|f| f["category"] == "corrupt") {
        seen += 1;
        let name = file["file"].as_str().unwrap();
        let base = &sound[file["base"].as_str().unwrap()]["tensors"];
        for verify in [true, false] {
            let (bytes, at) = contents(file);
            let result = open(bytes, at, name).and_then(|opened| {
                let all: Vec<usize> = (0..opened.entries().len()).collect();
                let options = LoadOptions { verify, readers: None, map: Mapping::Never };
                let loaded = load(&opened, &all, &options, &|| Ok(()))?;
                Ok((opened, loaded))
            });
            match result {
                Err(Error::Format { .. } | Error::Truncated { .. } | Error::Version { .. }) => {}
                Err(Error::HashMismatch { .. } | Error::NoHash { .. }) => assert!(verify, "{name}"),
                Err(Error::Crypt(_)) => {}
                Err(other) => panic!("{name}: {other:?}"),
                Ok((opened, loaded)) => {
                    for tensor in &loaded {
                        let entry = opened.entry(tensor.number).unwrap();
                        let expected = base
                            .as_array()
                            .unwrap()
                            .iter()
                            .find(|t| t["name"] == name_json(&entry.name))
                            .unwrap_or_else(|| panic!("{name}: invented {}", entry.name));
                        assert_eq!(Value::from(entry.shape.clone()), expected["shape"], "{name}");
                        assert_eq!(Value::from(entry.dtype.stored()), expected["dtype"], "{name}");
                        if verify && !entry.is_meta() {
                            assert_eq!(
                                digest(tensor.memory.bytes()),
                                expected["data_sha256"],
                                "{name}"
                            );
                        }
                    }
                    if verify {
                        harmless.push(name.to_owned());
                    }
                }
            }
        }
    }
    assert_eq!(seen, 182);
    println!("harmless: {harmless:#?}");
}

/// Every byte of prologue, index, headers and data of small files, changed in several ways: an
/// error, or the same tensors. Hashes are verified, so nothing else is excused.
#[test]
fn no_changed_byte_gives_wrong_data() {
    for name in [
        "v1_linear.tensors.gz",
        "v2_nested.tensors.gz",
        "v4_meta.tensors.gz",
        "v5_long_upgrade.tensors.gz",
    ] {
        let sound = golden(name);
        let file = open(sound.clone(), 0, name).unwrap();
        let all: Vec<usize> = (0..file.entries().len()).collect();
        let options = LoadOptions { verify: true, ..LoadOptions::default() };
        let expected: Vec<(String, Vec<u8>)> = load(&file, &all, &options, &|| Ok(()))
            .unwrap()
            .iter()
            .map(|t| (file.entries()[t.number].name.to_string(), t.memory.bytes().to_vec()))
            .collect();
        let used: usize = file.entries().iter().map(|entry| entry.encoded_len(true)).sum();
        let body = file.entries()[0].header_offset as usize;
        let mut accepted = 0;
        for at in (0..73 + used).chain(body..sound.len() - 8) {
            for change in [0x01, 0x80, 0xff] {
                let mut bytes = sound.clone();
                bytes[at] ^= change;
                let Ok(changed) = open(bytes, 0, name) else { continue };
                let all: Vec<usize> = (0..changed.entries().len()).collect();
                let Ok(loaded) = load(&changed, &all, &options, &|| Ok(())) else { continue };
                accepted += 1;
                for tensor in &loaded {
                    let found = changed.entries()[tensor.number].name.to_string();
                    let same = expected.iter().find(|(name, _)| *name == found);
                    let (_, data) =
                        same.unwrap_or_else(|| panic!("{name} byte {at}: invented {found}"));
                    assert!(tensor.memory.bytes() == data, "{name} byte {at}");
                }
            }
        }
        // Some bytes mean nothing: totals, unused fields, the version where nothing needs it.
        assert!(accepted < 150, "{name}: {accepted}");
    }
}
