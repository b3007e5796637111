//! Written files are read back, and have the bytes of the old package if that is asked for.
#![allow(clippy::cast_possible_truncation, clippy::cast_precision_loss)]

use std::path::Path;
use std::sync::Arc;

use proptest::prelude::*;
use serde_json::Value;
use tensorizer::format::TensorKind;
use tensorizer::format::dtype::DType;
use tensorizer::format::name::Name;
use tensorizer::io::local::{FileSink, FileSource};
use tensorizer::io::{Ending, MemorySource, ReadAt, StreamSource, WriteAt};
use tensorizer::{
    Cancel, Error, LoadOptions, Never, SaveOptions, SaveTensor, TensorData, TensorFile, Verify,
    Writer, load, load_into,
};

use crate::support::golden;

fn all(file: &TensorFile) -> Vec<usize> {
    (0..file.entries().len()).collect()
}

/// Reads every tensor of a file and writes the same again in the given number of calls.
fn rewrite(bytes: &[u8], calls: usize, alignment: u64) -> Vec<u8> {
    let source: Arc<dyn ReadAt> = Arc::new(MemorySource::new(bytes.to_vec(), "golden"));
    let file = TensorFile::from_source(source, 0, &Never).unwrap();
    let loaded = load(&file, &all(&file), &LoadOptions::default(), &Never).unwrap();
    let tensors: Vec<SaveTensor<'_>> = file
        .entries()
        .iter()
        .zip(&loaded)
        .map(|(entry, tensor)| SaveTensor {
            name: entry.name.clone(),
            kind: entry.kind,
            module_index: tensor.header.module_index,
            dtype: entry.dtype,
            shape: entry.shape.to_vec(),
            data: if entry.is_meta() {
                TensorData::Meta
            } else {
                TensorData::Bytes(tensor.memory.bytes())
            },
        })
        .collect();
    let folder = tempfile::tempdir().unwrap();
    let path = folder.path().join("again.tensors");
    let options = SaveOptions { alignment, ..SaveOptions::default() };
    let mut writer = Writer::new(Box::new(FileSink::create(&path).unwrap()), 0, options).unwrap();
    let mut rest = tensors;
    let step = rest.len().div_ceil(calls).max(1);
    while !rest.is_empty() {
        let later = rest.split_off(step.min(rest.len()));
        writer.write(rest, &Never).unwrap();
        rest = later;
    }
    writer.finish(&Never).unwrap();
    std::fs::read(&path).unwrap()
}

#[test]
fn rewritten_files_of_old_releases_are_identical() {
    let text = std::fs::read_to_string(
        Path::new(env!("CARGO_MANIFEST_DIR")).join("tests/golden/manifest.json"),
    );
    let text = text.unwrap().replace("\\ud800\"", "\\ufffd\"");
    let manifest: Value = serde_json::from_str(&text).unwrap();
    let mut reproduced = 0;
    for file in manifest["files"].as_array().unwrap() {
        let name = file["file"].as_str().unwrap();
        // Encrypted files need the key, and one begins inside of another file.
        let encrypted = file["version"] == 3 || file["flags"].as_u64().unwrap_or(0) & 1 == 1;
        if file["category"] != "valid" || encrypted || name.starts_with("v1_at_offset_100") {
            continue;
        }
        // One of its names has a lone surrogate, which is refused.
        if name.starts_with("v1_nested_unicode") {
            continue;
        }
        let bytes = golden(name);
        for calls in [1, 2, 100] {
            assert!(rewrite(&bytes, calls, 1) == bytes, "{name} in {calls} calls");
        }
        reproduced += 1;
    }
    assert_eq!(reproduced, 35);
}

fn tensor<'a>(name: &str, data: &'a [u8]) -> SaveTensor<'a> {
    SaveTensor {
        name: Name::from_key(name).unwrap(),
        kind: TensorKind::StateDict,
        module_index: 0,
        dtype: DType::from_name("uint8").unwrap(),
        shape: vec![data.len() as u64],
        data: TensorData::Bytes(data),
    }
}

/// Bytes that differ by seed; they begin again after 1024.
fn pattern(len: usize, seed: usize) -> Vec<u8> {
    let once: Vec<u8> = (0..1024).map(|i| ((i * 31 + seed * 101) >> 2) as u8).collect();
    let mut data = once.repeat(len / 1024 + 1);
    data.truncate(len);
    data
}

/// Loads a file in every way that there is and compares the bytes.
fn expect(path: &Path, names: &[String], data: &[Vec<u8>]) {
    for verify in [false, true] {
        for (readers, map) in [(None, verify), (Some(1), false), (Some(5), !verify)] {
            let file = TensorFile::open(path).unwrap();
            let options = LoadOptions {
                readers,
                verify: Verify::all_if(verify),
                map,
                ..LoadOptions::default()
            };
            // In reverse, to show that the order of the selection does not matter.
            let mut order = names.to_vec();
            order.reverse();
            let selection = file.select(&order).unwrap();
            let loaded = load(&file, &selection, &options, &Never).unwrap();
            assert_eq!(loaded.len(), data.len());
            for (tensor, expected) in loaded.iter().zip(data.iter().rev()) {
                assert!(tensor.memory.bytes() == expected, "verify {verify} map {map:?}");
            }
        }
        let pipe: Arc<dyn ReadAt> =
            Arc::new(StreamSource::new(std::fs::File::open(path).unwrap(), "pipe"));
        let file = TensorFile::from_source(pipe, 0, &Never).unwrap();
        let options = LoadOptions { verify: Verify::all_if(verify), ..LoadOptions::default() };
        let loaded = load(&file, &all(&file), &options, &Never).unwrap();
        assert!(
            loaded.iter().zip(data).all(|(tensor, expected)| tensor.memory.bytes() == expected)
        );
    }
}

proptest! {
    #![proptest_config(ProptestConfig { cases: 16, ..ProptestConfig::default() })]

    /// Sizes around all of the limits: parts, pieces that are hashed in pairs, mapped ones.
    #[test]
    fn saved_tensors_load_with_the_same_bytes(
        lens in prop::collection::vec(
            prop_oneof![4 => 0usize..200, 4 => 1000usize..100_000, 4 => (1usize << 20)-3..(1 << 20)+3, 1 => Just(5_000_001)], 1..12),
        alignment in prop_oneof![Just(1u64), Just(64), Just(4096)],
        calls in 1usize..4,
    ) {
        let folder = tempfile::tempdir().unwrap();
        let path = folder.path().join("f.tensors");
        let data: Vec<Vec<u8>> = lens.iter().enumerate().map(|(i, &len)| pattern(len, i)).collect();
        let names: Vec<String> = (0..data.len()).map(|i| format!("layer.{i}")).collect();
        let options = SaveOptions { alignment, ..SaveOptions::default() };
        let mut writer = Writer::new(Box::new(FileSink::create(&path).unwrap()), 0, options).unwrap();
        let pairs: Vec<(&String, &Vec<u8>)> = names.iter().zip(&data).collect();
        for chunk in pairs.chunks(data.len().div_ceil(calls)) {
            let tensors = chunk.iter().map(|(name, data)| tensor(name, data)).collect();
            writer.write(tensors, &Never).unwrap();
        }
        writer.finish(&Never).unwrap();
        let file = TensorFile::open(&path).unwrap();
        prop_assert!(file.entries().iter().all(|entry| entry.data_offset % alignment == 0));
        expect(&path, &names, &data);
    }
}

#[test]
fn index_grows_beyond_its_reserved_space() {
    let folder = tempfile::tempdir().unwrap();
    let path = folder.path().join("many.tensors");
    let mut writer =
        Writer::new(Box::new(FileSink::create(&path).unwrap()), 0, SaveOptions::default()).unwrap();
    let big = pattern(3_000_000, 1);
    writer.write(vec![tensor("big", &big)], &Never).unwrap();
    let values: Vec<[u8; 4]> = (0..20_000u32).map(u32::to_le_bytes).collect();
    for (call, chunk) in values.chunks(2_000).enumerate() {
        let tensors =
            chunk.iter().enumerate().map(|(i, v)| tensor(&format!("{call}.{i}"), v)).collect();
        writer.write(tensors, &Never).unwrap();
    }
    writer.finish(&Never).unwrap();
    let file = TensorFile::open(&path).unwrap();
    assert!(file.prologue().unwrap().index_len > 1 << 20);
    assert!(file.entries().iter().all(|entry| entry.data_offset % 64 == 0));
    let options = LoadOptions { verify: Verify::All, ..LoadOptions::default() };
    let loaded = load(&file, &all(&file), &options, &Never).unwrap();
    assert!(loaded[0].memory.bytes() == big);
    for (tensor, value) in loaded[1..].iter().zip(&values) {
        assert_eq!(tensor.memory.bytes(), value);
    }
}

#[test]
fn file_is_invisible_until_it_is_finished() {
    let folder = tempfile::tempdir().unwrap();
    let path = folder.path().join("new/folder/f.tensors");
    let count = |folder: &Path| std::fs::read_dir(folder).unwrap().count();
    let mut sink: Box<dyn WriteAt> = Box::new(FileSink::create(&path).unwrap());
    assert!(!path.exists());
    sink.publish(0, Ending::Finished, &Never).unwrap();
    assert!(path.exists());

    std::fs::write(&path, b"old").unwrap();
    let mut writer =
        Writer::new(Box::new(FileSink::create(&path).unwrap()), 0, SaveOptions::default()).unwrap();
    writer.write(vec![tensor("a", b"1")], &Never).unwrap();
    assert_eq!(std::fs::read(&path).unwrap(), b"old");
    drop(writer);
    assert_eq!(std::fs::read(&path).unwrap(), b"old");
    assert_eq!(count(path.parent().unwrap()), 1, "the temporary file is gone");
}

#[test]
fn refused_calls_can_be_corrected_and_repeated() {
    let folder = tempfile::tempdir().unwrap();
    let path = folder.path().join("f.tensors");
    for alignment in [0, 3, 4 << 20] {
        let sink = Box::new(FileSink::create(&path).unwrap());
        let options = SaveOptions { alignment, ..SaveOptions::default() };
        assert!(matches!(Writer::new(sink, 0, options), Err(Error::InvalidArgument(_))));
    }
    let mut writer =
        Writer::new(Box::new(FileSink::create(&path).unwrap()), 0, SaveOptions::default()).unwrap();
    writer.write(vec![tensor("a", b"1")], &Never).unwrap();
    let conflict = writer.write(vec![tensor("b", b"2"), tensor("a", b"3")], &Never);
    assert!(
        matches!(conflict, Err(Error::InvalidArgument(text)) if text.contains("Conflicting tensor paths"))
    );
    writer.write(vec![tensor("b", b"2")], &Never).unwrap();
    writer.finish(&Never).unwrap();
    writer.finish(&Never).unwrap();
    assert!(matches!(writer.write(vec![tensor("c", b"")], &Never), Err(Error::Closed(_))));

    let file = TensorFile::open(&path).unwrap();
    assert!(matches!(file.select(&["a", "a"]), Err(Error::InvalidArgument(_))));
    assert!(matches!(file.select(&["x"]), Err(Error::TensorNotFound { .. })));
    assert!(matches!(
        load(&file, &[0, 0], &LoadOptions::default(), &Never),
        Err(Error::InvalidArgument(_))
    ));
    assert!(matches!(
        load(&file, &[7], &LoadOptions::default(), &Never),
        Err(Error::InvalidArgument(_))
    ));
    let mut memory = [9u8; 2];
    let short = load_into(&file, &[0], vec![&mut memory], &LoadOptions::default(), &Never);
    assert!(matches!(short, Err(Error::InvalidArgument(text)) if text.contains("needs 1 bytes")));
    assert_eq!(memory, [9, 9], "nothing is written to a destination that does not fit");
    load_into(&file, &[1], vec![&mut memory[..1]], &LoadOptions::default(), &Never).unwrap();
    assert_eq!(memory, *b"2\x09");
    file.close();
    assert!(matches!(load(&file, &[0], &LoadOptions::default(), &Never), Err(Error::Closed(_))));
}

/// A source with short reads, and with fewer bytes than it claims to have.
struct Scripted {
    facts: tensorizer::io::Facts,
    bytes: Vec<u8>,
    shrink_to: u64,
    step: usize,
}

impl ReadAt for Scripted {
    fn facts(&self) -> &tensorizer::io::Facts {
        &self.facts
    }

    fn capabilities(&self) -> tensorizer::io::Capabilities {
        let inner = MemorySource::new(&self.bytes[..], "");
        inner.capabilities()
    }

    fn read_at(
        &self,
        offset: u64,
        buffers: &mut tensorizer::mem::Buffers<'_>,
        _cancel: &dyn Cancel,
    ) -> tensorizer::Result<usize> {
        let end = self.bytes.len().min(self.shrink_to as usize);
        let start = (offset as usize).min(end);
        let len = self.step.min(end - start);
        Ok(buffers.fill_from(&self.bytes[start..start + len]))
    }
}

#[test]
fn short_reads_continue_and_a_shrunk_source_is_an_error() {
    let bytes = golden("v1_module.tensors.gz");
    let size = bytes.len() as u64;
    let facts = tensorizer::io::Facts {
        uri: "scripted".to_owned(),
        len: Some(size),
        ..tensorizer::io::Facts::default()
    };
    for step in [1, 3, 1000] {
        let source = Arc::new(Scripted {
            facts: facts.clone(),
            bytes: bytes.clone(),
            shrink_to: u64::MAX,
            step,
        });
        let file = TensorFile::from_source(source, 0, &Never).unwrap();
        let options = LoadOptions { verify: Verify::All, ..LoadOptions::default() };
        load(&file, &all(&file), &options, &Never).unwrap();
    }
    for missing in [9, 30, 100] {
        let source = Arc::new(Scripted {
            facts: facts.clone(),
            bytes: bytes.clone(),
            shrink_to: size - missing,
            step: 1000,
        });
        let file = TensorFile::from_source(source, 0, &Never).unwrap();
        let result = load(&file, &all(&file), &LoadOptions::default(), &Never);
        assert!(matches!(result, Err(Error::Truncated { .. })), "{missing}");
    }
}

#[test]
fn false_index_length_of_a_pipe_allocates_no_memory() {
    // An index of 2⁶² bytes, then nothing: memory must grow with what arrives only.
    let mut bytes = golden("v1_linear.tensors.gz")[..300].to_vec();
    bytes[65..73].copy_from_slice(&(1u64 << 62).to_le_bytes());
    let source = Arc::new(StreamSource::new(std::io::Cursor::new(bytes), "pipe"));
    assert!(matches!(TensorFile::from_source(source, 0, &Never), Err(Error::Format { .. })));
}

#[test]
fn cancellation_ends_a_load_and_a_save() {
    let folder = tempfile::tempdir().unwrap();
    let path = folder.path().join("f.tensors");
    let data = pattern(100_000_000, 3);
    let interrupt = || Err(Error::Cancelled);
    let one = || vec![tensor("a", &data)];
    let options = SaveOptions { threads: Some(1), ..SaveOptions::default() };
    let stopped = tensorizer::save(&path, one(), options, &interrupt);
    assert!(matches!(stopped, Err(Error::Cancelled)));
    assert!(!path.exists());
    tensorizer::save(&path, one(), SaveOptions::default(), &Never).unwrap();
    let file = TensorFile::open(&path).unwrap();
    let options = LoadOptions { verify: Verify::All, readers: Some(1), ..LoadOptions::default() };
    assert!(matches!(load(&file, &[0], &options, &interrupt), Err(Error::Cancelled)));
}

#[test]
fn errors_name_folders_and_missing_files() {
    let folder = tempfile::tempdir().unwrap();
    let missing = folder.path().join("missing");
    for path in [missing.as_path(), folder.path()] {
        let Err(error) = TensorFile::open(path) else { panic!("opened {path:?}") };
        assert!(error.to_string().contains(&path.display().to_string()), "{error}");
    }
    assert!(FileSink::create(folder.path()).is_err());
    assert!(FileSource::open(&missing).is_err());
}
