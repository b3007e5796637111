//! Metadata of `.tensors` files.
#![allow(missing_docs, clippy::unwrap_used, clippy::indexing_slicing)]

use std::sync::Arc;

use proptest::prelude::*;
use tensorizer::crypt::{EncryptionOptions, Key};
use tensorizer::sink::FileSink;
use tensorizer::source::{MemorySource, ReadAt};
use tensorizer::{
    Error, LoadOptions, Never, SaveOptions, SaveTensor, TensorFile, Writer, load, save,
};

fn strings(pairs: &[(&str, &str)]) -> Vec<(String, String)> {
    pairs.iter().map(|&(name, value)| (name.to_owned(), value.to_owned())).collect()
}

#[test]
fn metadata_come_back_in_their_order() {
    let folder = tempfile::tempdir().unwrap();
    let path = folder.path().join("f.tensors");
    let metadata = strings(&[("b", "ü"), ("a", "")]);
    let data: Vec<Vec<u8>> = (0..5).map(|n| vec![n; 100]).collect();
    let options = SaveOptions { metadata: Some(metadata.clone()), ..SaveOptions::default() };
    let mut writer = Writer::new(Box::new(FileSink::create(&path).unwrap()), 0, options).unwrap();
    for (number, data) in data.iter().enumerate() {
        let tensor = SaveTensor::new(&format!("t{number}"), &[100], data.as_slice()).unwrap();
        writer.write(vec![tensor], &Never).unwrap();
    }
    writer.finish(&Never).unwrap();
    let file = TensorFile::open(&path).unwrap();
    assert_eq!(file.metadata(), metadata);
    // The head of some of the tensors has them too.
    let mut bytes = std::fs::read(&path).unwrap();
    let head = file.head_of(&[1, 3]).unwrap();
    bytes[..head.len()].copy_from_slice(&head);
    let source: Arc<dyn ReadAt> = Arc::new(MemorySource::new(bytes, "some"));
    let some = TensorFile::from_source(source, 0, &Never).unwrap();
    assert_eq!((some.entries().len(), some.metadata()), (2, &metadata[..]));
    let loaded = load(&some, &[0, 1], &LoadOptions::default(), &Never).unwrap();
    assert_eq!(loaded[1].memory.bytes(), data[3]);
    for (wrong, text) in [
        (strings(&[("a", "1"), ("a", "2")]), "`a` twice"),
        (strings(&[("a", &"x".repeat(100_000_000))]), "at most 100000000 bytes"),
    ] {
        let options = SaveOptions { metadata: Some(wrong), ..SaveOptions::default() };
        let sink = Box::new(FileSink::create(&path).unwrap());
        let error = Writer::new(sink, 0, options).map(drop).unwrap_err().to_string();
        assert!(error.contains(text), "{error}");
    }
}

#[test]
fn an_encrypted_file_has_them_only_if_that_is_said() {
    let folder = tempfile::tempdir().unwrap();
    let path = folder.path().join("f.tensors");
    let key = Key::new(&[1; 32]).unwrap();
    let encryption = EncryptionOptions { key, derivation: None, manifest: true };
    let mut options = SaveOptions {
        encryption: Some(Arc::new(encryption)),
        metadata: Some(strings(&[("a", "1")])),
        ..SaveOptions::default()
    };
    let one = || vec![SaveTensor::new("t", &[3], &[1u8, 2, 3]).unwrap()];
    let error = save(&path, one(), options.clone(), &Never).unwrap_err();
    assert!(matches!(&error, Error::InvalidArgument(what) if what.contains("clear_metadata")));
    assert!(!path.exists());
    options.clear_metadata = true;
    save(&path, one(), options, &Never).unwrap();
    assert_eq!(TensorFile::open(&path).unwrap().metadata(), strings(&[("a", "1")]));
}

#[test]
fn metadata_alone_are_a_file_without_tensors() {
    let folder = tempfile::tempdir().unwrap();
    let path = folder.path().join("f.tensors");
    let metadata = Some(strings(&[("long", &"x".repeat(300_000))]));
    let options = SaveOptions { metadata, ..SaveOptions::default() };
    let mut writer = Writer::new(Box::new(FileSink::create(&path).unwrap()), 0, options).unwrap();
    writer.finish(&Never).unwrap();
    let error = TensorFile::open(&path).map(drop).unwrap_err().to_string();
    assert!(error.contains("index in the file is empty"), "{error}");
}

proptest! {
    #[test]
    fn any_bytes_behind_the_index_are_read_or_refused(
        bytes in proptest::collection::vec(any::<u8>(), 1..100),
        magic in proptest::option::of(0usize..3),
    ) {
        let folder = tempfile::tempdir().unwrap();
        let path = folder.path().join("f.tensors");
        let one = SaveTensor::new("t", &[3], &[1u8, 2, 3]).unwrap();
        save(&path, vec![one], SaveOptions::default(), &Never).unwrap();
        let mut file = std::fs::read(&path).unwrap();
        let end = 73 + (256 << 10);
        file[end - bytes.len()..end].copy_from_slice(&bytes);
        if let Some(which) = magic {
            let (name, at) = [("TZMETA01", 16), ("TZPAIR01", 24), ("TZSEAL01", 40)][which];
            file[end - at..end - at + 8].copy_from_slice(name.as_bytes());
        }
        let source: Arc<dyn ReadAt> = Arc::new(MemorySource::new(file, "any"));
        match TensorFile::from_source(source, 0, &Never) {
            Ok(file) => prop_assert_eq!(load(&file, &[0], &LoadOptions::default(), &Never).unwrap().len(), 1),
            Err(error) => prop_assert!(matches!(error, Error::Format { .. }), "{}", error),
        }
    }
}
