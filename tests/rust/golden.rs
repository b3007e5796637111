//! Every golden file, through the core alone.
#![allow(clippy::cast_possible_truncation, clippy::cast_precision_loss)]

use std::path::Path;
use std::sync::Arc;

use serde_json::Value;
use tensorizer::crypt::{DecryptionOptions, Key, Secret};
use tensorizer::format::catalog::Entry;
use tensorizer::format::tensors::crypt_info::{Cipher, CryptInfo};
use tensorizer::format::tensors::header::TensorHeader;
use tensorizer::io::{MemorySource, ReadAt, read_exact_at};
use tensorizer::{Error, LoadOptions, Never, TensorFile, Verify, load};

use crate::support::golden;

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

/// The bytes of a file, and the offset at which it begins in them.
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
    TensorFile::from_source(source, base, &Never)
}

fn name_json(name: &tensorizer::format::name::Name) -> Value {
    match name.path() {
        None => Value::from(name.stored()),
        Some(path) => serde_json::to_value(path).unwrap(),
    }
}

fn digest(bytes: &[u8]) -> String {
    use sha2::Digest as _;
    sha2::Sha256::digest(bytes).iter().map(|b| format!("{b:02x}")).collect()
}

fn check_entries(file: &TensorFile, expected: &Value, name: &str) {
    let tensors = expected["tensors"].as_array().unwrap();
    assert_eq!(file.entries().len(), tensors.len(), "{name}");
    assert_eq!(
        u64::from(file.prologue().unwrap().version),
        expected["version"].as_u64().unwrap(),
        "{name}"
    );
    for (entry, tensor) in file.entries().iter().zip(tensors) {
        assert_eq!(name_json(&entry.name), tensor["name"], "{name}");
        let shape: Vec<u64> =
            tensor["shape"].as_array().unwrap().iter().map(|d| d.as_u64().unwrap()).collect();
        assert_eq!(*entry.shape, shape, "{name}");
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
fn valid_files_load_as_the_manifest_states() {
    let mut seen = 0;
    for file in manifest() {
        let name = file["file"].as_str().unwrap().to_owned();
        let broken = [
            "defect_empty_name",
            "defect_no_tensors",
            "defect_rs_name_invalid",
            "defect_rs_name_collides",
            "defect_meta_scalar",
            // One of its names has a lone surrogate.
            "v1_nested_unicode",
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
        if opened.is_encrypted() {
            check_encrypted(&opened, &file, &name);
            for secret in secrets(&file, "") {
                let (bytes, base) = contents(&file);
                let opened = decrypting(open(bytes, base, &name).unwrap(), secret).unwrap();
                let how = file["how"].as_str().unwrap();
                if how.contains("chunk size 1024") || how.contains("chunk size lowered to 1024") {
                    check_short_pieces(&opened, &name);
                } else {
                    check_data(&opened, &file, &name, true);
                }
            }
            continue;
        }
        check_data(&opened, &file, &name, !name.starts_with("hand_no_hashes"));
    }
    assert_eq!(seen, 57 + 22 + 8 - 7);
}

/// A tensor in several encrypted pieces of 1,024 bytes, which no release writes, is refused; one in
/// a single piece is read, whatever length of pieces its header states.
fn check_short_pieces(opened: &TensorFile, name: &str) {
    for (number, entry) in opened.entries().iter().enumerate() {
        match load(opened, &[number], &LoadOptions::default(), &|| Ok(())) {
            Ok(_) => assert!(entry.data_len <= 1024, "{name}"),
            Err(Error::Crypt(what)) => {
                assert!(entry.data_len > 1024, "{what}");
                assert!(what.contains("in pieces of 1024 bytes: expected one piece"), "{what}");
            }
            Err(other) => panic!("{name}: {other}"),
        }
    }
}

/// Every byte of every tensor, read in several ways.
fn check_data(opened: &TensorFile, file: &Value, name: &str, verify: bool) {
    // 4 GiB of zeros.
    let huge = |entry: &Entry| file["lazy_only"].as_array().is_some() && entry.is_meta();
    let numbers = 0..opened.entries().len();
    let all: Vec<usize> = numbers.filter(|&number| !huge(&opened.entries()[number])).collect();
    for readers in [1, 3] {
        for verify in [Verify::all_if(verify), Verify::Nothing] {
            let options = LoadOptions { verify, readers: Some(readers), ..LoadOptions::default() };
            for tensor in load(opened, &all, &options, &|| Ok(())).unwrap() {
                let expected = &file["tensors"][tensor.number()];
                let entry = opened.entry(tensor.number()).unwrap();
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
}

fn unhex(text: &str) -> Vec<u8> {
    (0..text.len())
        .step_by(2)
        .map(|at| u8::from_str_radix(&text[at..at + 2], 16).unwrap())
        .collect()
}

/// The keys and passphrases of a file, by the manifest.
fn secrets(file: &Value, prefix: &str) -> Vec<Secret> {
    let field = |name: &str| file[format!("{prefix}{name}")].as_str().map(str::to_owned);
    let key = field("key_hex").map(|hex| Secret::Key(Key::new(&unhex(&hex)).unwrap()));
    let source = field("passphrase").map(String::into_bytes);
    let source = source.or(field("passphrase_hex").map(|hex| unhex(&hex)));
    key.into_iter().chain(source.map(|source| Secret::Passphrase(source.into()))).collect()
}

fn decrypting(file: TensorFile, secret: Secret) -> Result<TensorFile, Error> {
    let mut options = DecryptionOptions::new(secret);
    options.allow(None, Some(300 << 20));
    file.decrypt(Arc::new(options), &|| Ok(()))
}

/// Without a key: every header is parsed, and no data are handed out.
fn check_encrypted(file: &TensorFile, expected: &Value, name: &str) {
    for (entry, tensor) in file.entries().iter().zip(expected["tensors"].as_array().unwrap()) {
        let len = (entry.data_offset - entry.header_offset) as usize;
        let mut raw = vec![0; len].into_boxed_slice();
        let mut buffers = tensorizer::mem::Buffers::from_slice(&mut raw);
        read_exact_at(&*file.source(0).unwrap(), entry.header_offset, &mut buffers, "", &Never)
            .unwrap();
        let header = TensorHeader::parse(&raw, entry, true).unwrap();
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
    let options = LoadOptions { verify: Verify::All, ..LoadOptions::default() };
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
            ("par", Some(Cipher { piece_len: Some(piece_len), nonce, macs })) => {
                assert_eq!(Value::from(*piece_len), chunk["chunk"], "{name}");
                assert_eq!(hex(nonce), chunk["nonce"], "{name}");
                let expected = chunk["macs"].as_array().unwrap();
                assert_eq!(
                    macs.iter().map(|mac| hex(mac)).collect::<Vec<_>>(),
                    *expected,
                    "{name}"
                );
            }
            ("seq", Some(Cipher { piece_len: None, nonce, macs })) => {
                assert_eq!(
                    (hex(nonce), hex(macs.as_flattened())),
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
fn damaged_files_are_refused_or_load_the_right_data() {
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
                let others = secrets(file, "read_");
                let secret = if others.is_empty() { secrets(file, "") } else { others }.pop();
                let opened = match secret.filter(|_| file["read_none"] != true) {
                    Some(secret) => decrypting(opened, secret)?,
                    None => opened,
                };
                let all: Vec<usize> = (0..opened.entries().len()).collect();
                let options =
                    LoadOptions { verify: Verify::all_if(verify), ..LoadOptions::default() };
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
                        let entry = opened.entry(tensor.number()).unwrap();
                        let expected = base
                            .as_array()
                            .unwrap()
                            .iter()
                            .find(|t| t["name"] == name_json(&entry.name))
                            .unwrap_or_else(|| panic!("{name}: invented {}", entry.name));
                        assert_eq!(Value::from(&*entry.shape), expected["shape"], "{name}");
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
fn changed_bytes_never_load_as_wrong_data() {
    for name in [
        "v1_linear.tensors.gz",
        "v2_nested.tensors.gz",
        "v4_meta.tensors.gz",
        "v5_long_upgrade.tensors.gz",
    ] {
        let sound = golden(name);
        let file = open(sound.clone(), 0, name).unwrap();
        let all: Vec<usize> = (0..file.entries().len()).collect();
        let options = LoadOptions { verify: Verify::All, ..LoadOptions::default() };
        let expected: Vec<(String, Vec<u8>)> = load(&file, &all, &options, &|| Ok(()))
            .unwrap()
            .iter()
            .map(|t| (file.entries()[t.number()].name.to_string(), t.memory.bytes().to_vec()))
            .collect();
        let used: usize = file.entries().iter().map(|entry| entry.encoded_len(true)).sum();
        let body = file.entries()[0].header_offset as usize;
        let mut accepted = 0;
        for at in (0..73 + used).chain(body..sound.len() - 8) {
            for change in [0x01, 0xff] {
                let mut bytes = sound.clone();
                bytes[at] ^= change;
                let Ok(changed) = open(bytes, 0, name) else { continue };
                let all: Vec<usize> = (0..changed.entries().len()).collect();
                let Ok(loaded) = load(&changed, &all, &options, &|| Ok(())) else { continue };
                accepted += 1;
                for tensor in &loaded {
                    let found = changed.entries()[tensor.number()].name.to_string();
                    let same = expected.iter().find(|(name, _)| *name == found);
                    let (_, data) =
                        same.unwrap_or_else(|| panic!("{name} byte {at}: invented {found}"));
                    assert!(tensor.memory.bytes() == data, "{name} byte {at}");
                }
            }
        }
        // Some bytes mean nothing: totals, unused fields, the version where nothing needs it.
        assert!(accepted < 100, "{name}: {accepted}");
    }
}

/// One bit at a time in all that encryption adds, and in the ciphertext: an error of the right
/// class, also without hashes.
#[test]
fn every_flipped_bit_of_encryption_is_detected() {
    let files = manifest();
    for name in ["v3_ex_string.tensors.gz", "v3_ex_key.tensors.gz"] {
        let meta = files.iter().find(|file| file["file"] == name).unwrap();
        let sound = golden(name);
        let file = open(sound.clone(), 0, name).unwrap();
        let entry = file.entries()[0].clone();
        let raw = &sound[entry.header_offset as usize..entry.data_offset as usize];
        let header = TensorHeader::parse(raw, &entry, true).unwrap();
        let block = header.covered().len() - 8;
        let start = entry.header_offset as usize + block;
        let (mut refused, mut bits) = (0, 0);
        for at in start..entry.end() as usize {
            // The length of the data, which is not part of what encryption adds.
            if (entry.data_offset as usize - 8..entry.data_offset as usize).contains(&at) {
                continue;
            }
            for bit in 0..8 {
                let mut bytes = sound.clone();
                bytes[at] ^= 1 << bit;
                let secret = secrets(meta, "").pop().unwrap();
                let mut options = DecryptionOptions::new(secret);
                options.allow(None, Some(1 << 20));
                let loaded = open(bytes, 0, name)
                    .and_then(|file| file.decrypt(Arc::new(options), &|| Ok(())))
                    .and_then(|file| load(&file, &[0], &LoadOptions::default(), &|| Ok(())));
                bits += 1;
                match loaded {
                    Err(Error::Crypt(_) | Error::Format { .. }) => refused += 1,
                    // One tag seals everything, whatever the length of pieces is said to be; and
                    // a derivation asks for whole kibibytes.
                    Ok(loaded) => assert_eq!(
                        digest(loaded[0].memory.bytes()),
                        meta["tensors"][0]["data_sha256"],
                        "{name} byte {at} bit {bit}"
                    ),
                    Err(other) => panic!("{name} byte {at} bit {bit}: {other:?}"),
                }
            }
        }
        assert!(bits - refused <= 64 + 10, "{name}: {refused} of {bits}");
        assert!(bits > 500);
    }
}
