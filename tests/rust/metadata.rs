//! Metadata of `.tensors` files.

use std::sync::{Arc, LazyLock};

use proptest::prelude::*;
use tensorizer::crypt::{DecryptionOptions, EncryptionOptions, Key, Secret};
use tensorizer::io::local::FileSink;
use tensorizer::io::{MemorySource, ReadAt};
use tensorizer::{
    Error, LoadOptions, Never, SaveOptions, SaveTensor, TensorFile, Verify, Writer, load, save,
};

fn strings(pairs: &[(&str, &str)]) -> Vec<(String, String)> {
    pairs.iter().map(|&(name, value)| (name.to_owned(), value.to_owned())).collect()
}

#[test]
fn metadata_round_trip_in_order() {
    let folder = tempfile::tempdir().unwrap();
    let path = folder.path().join("f.tensors");
    let metadata = strings(&[("b", "ü"), ("a", "")]);
    let data: Vec<Vec<u8>> = (0..5).map(|n| vec![n; 100]).collect();
    let options = SaveOptions { metadata: Some(metadata.clone()), ..SaveOptions::default() };
    let mut writer = Writer::new(Box::new(FileSink::create(&path).unwrap()), 0, options).unwrap();
    writer.add_metadata("c".to_owned(), "added".to_owned()).unwrap();
    writer.add_metadata("a".to_owned(), "twice".to_owned()).unwrap_err();
    for (number, data) in data.iter().enumerate() {
        let tensor = SaveTensor::new(&format!("t{number}"), &[100], data.as_slice()).unwrap();
        writer.write(vec![tensor], &Never).unwrap();
        writer.add_metadata("d".to_owned(), "late".to_owned()).unwrap_err();
    }
    writer.finish(&Never).unwrap();
    let file = TensorFile::open(&path).unwrap();
    let metadata = [metadata, strings(&[("c", "added")])].concat();
    assert_eq!(file.metadata().unwrap(), Some(&metadata[..]));
    // The head of some of the tensors has them too.
    let mut bytes = std::fs::read(&path).unwrap();
    let head = file.head_of(&[1, 3]).unwrap();
    bytes[..head.len()].copy_from_slice(&head);
    let source: Arc<dyn ReadAt> = Arc::new(MemorySource::new(bytes, "some"));
    let some = TensorFile::from_source(source, 0, &Never).unwrap();
    assert_eq!((some.entries().len(), some.metadata().unwrap()), (2, Some(&metadata[..])));
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
fn encrypted_files_need_clear_metadata_to_have_metadata() {
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
    let file = TensorFile::open(&path).unwrap();
    assert_eq!(file.metadata().unwrap(), Some(&strings(&[("a", "1")])[..]));
}

#[test]
fn metadata_without_tensors_are_refused_and_the_old_file_stays() {
    let folder = tempfile::tempdir().unwrap();
    let path = folder.path().join("f.tensors");
    std::fs::write(&path, b"old").unwrap();
    let metadata = Some(strings(&[("long", &"x".repeat(300_000))]));
    let options = SaveOptions { metadata, ..SaveOptions::default() };
    let mut writer = Writer::new(Box::new(FileSink::create(&path).unwrap()), 0, options).unwrap();
    let error = writer.finish(&Never).unwrap_err().to_string();
    assert!(error.contains("no tensors for"), "{error}");
    drop(writer);
    assert_eq!(std::fs::read(&path).unwrap(), b"old");
    assert_eq!(std::fs::read_dir(folder.path()).unwrap().count(), 1);
}

#[test]
fn metadata_reserve_space_for_later_entries() {
    let folder = tempfile::tempdir().unwrap();
    let path = folder.path().join("f.tensors");
    let shortest = 256 << 10;
    let room = shortest / 2;
    for (value, index_len) in [
        (None, shortest),
        (Some(100_000), shortest),
        (Some(room - 24 - 1), shortest),
        (Some(room - 24), shortest + 4096),
        (Some(250_000), (room + 24 + 1 + 250_000u64).next_multiple_of(4096)),
        (Some(5_000_000), (room + 24 + 1 + 5_000_000u64).next_multiple_of(4096)),
    ] {
        let text = value.map(|len| "x".repeat(usize::try_from(len).unwrap()));
        let metadata = text.as_ref().map(|text| strings(&[("n", text)]));
        let options = SaveOptions { metadata: metadata.clone(), ..SaveOptions::default() };
        let sink = Box::new(FileSink::create(&path).unwrap());
        let mut writer = Writer::new(sink, 0, options).unwrap();
        for call in 0..25 {
            let names = (call * 100..).take(100).map(|number| format!("{number:06}"));
            let tensors = names.map(|name| SaveTensor::new(&name, &[1], &[1u8]).unwrap());
            writer.write(tensors.collect(), &Never).unwrap();
        }
        writer.finish(&Never).unwrap();
        let file = TensorFile::open(&path).unwrap();
        // It never grew, and its data were never moved.
        assert_eq!(file.prologue().unwrap().index_len, index_len);
        assert_eq!(file.metadata().unwrap(), metadata.as_deref());
    }
}

/// The file's bytes with damaged metadata.
fn damaged(path: &std::path::Path, options: SaveOptions) -> Arc<dyn ReadAt> {
    let options = SaveOptions {
        metadata: Some(strings(&[("name", "value")])),
        clear_metadata: true,
        ..options
    };
    let two = ["a", "b"].map(|name| SaveTensor::new(name, &[3], &[1u8, 2, 3]).unwrap());
    save(path, two.into(), options, &Never).unwrap();
    let mut bytes = std::fs::read(path).unwrap();
    let at = bytes.windows(5).position(|five| five == b"value").unwrap();
    bytes[at] ^= 1;
    Arc::new(MemorySource::new(bytes, "damaged"))
}

#[test]
fn damaged_metadata_are_an_error_only_when_read() {
    let folder = tempfile::tempdir().unwrap();
    let path = folder.path().join("f.tensors");
    let source = damaged(&path, SaveOptions::default());
    let file = TensorFile::from_source(source, 0, &Never).unwrap();
    let options = LoadOptions { verify: Verify::All, ..LoadOptions::default() };
    assert_eq!(load(&file, &[0, 1], &options, &Never).unwrap()[1].memory.bytes(), [1, 2, 3]);
    let sliced = file.sliced(vec![(1, std::iter::once(1..3).collect())]).unwrap();
    for file in [&file, &sliced] {
        let error = file.metadata().unwrap_err();
        assert!(matches!(&error, Error::Format { uri, .. } if uri == "damaged"), "{error}");
        assert!(error.to_string().contains("damaged: expected CRC-32"), "{error}");
    }
    // The head of a copy is refused too: the copy would have no metadata, without an error.
    assert!(matches!(file.head_of(&[0]), Err(Error::Format { .. })));
}

#[test]
fn a_manifest_refuses_damaged_metadata() {
    let folder = tempfile::tempdir().unwrap();
    let path = folder.path().join("f.tensors");
    let key = || Key::new(&[1; 32]).unwrap();
    for manifest in [false, true] {
        let encryption = EncryptionOptions { key: key(), derivation: None, manifest };
        let encryption = Some(Arc::new(encryption));
        let source = damaged(&path, SaveOptions { encryption, ..SaveOptions::default() });
        let file = TensorFile::from_source(source, 0, &Never).unwrap();
        let error = file.metadata().unwrap_err();
        assert!(error.to_string().contains("damaged: expected CRC-32"), "{error}");
        let unlocked = file.decrypt(DecryptionOptions::new(Secret::Key(key())).into(), &Never);
        assert_eq!(matches!(unlocked, Err(Error::Crypt(_))), manifest);
    }
}

#[test]
fn slices_share_the_metadata_of_their_file() {
    let folder = tempfile::tempdir().unwrap();
    let path = folder.path().join("f.tensors");
    let metadata = Some(strings(&[("name", "value")]));
    let one = SaveTensor::new("t", &[3], &[1u8, 2, 3]).unwrap();
    save(&path, vec![one], SaveOptions { metadata, ..SaveOptions::default() }, &Never).unwrap();
    let file = TensorFile::open(&path).unwrap();
    let sliced = file.sliced(vec![(0, std::iter::once(1..2).collect())]).unwrap();
    let of = |file: &TensorFile| file.metadata().unwrap().unwrap().as_ptr();
    assert_eq!(of(&sliced), of(&file));
}

/// The bytes of a file of one tensor, with room in the index for more.
fn with_room() -> Vec<u8> {
    let folder = tempfile::tempdir().unwrap();
    let path = folder.path().join("f.tensors");
    let one = SaveTensor::new("t", &[3], &[1u8, 2, 3]).unwrap();
    let sink = FileSink::create(&path).unwrap();
    let mut writer = Writer::new(Box::new(sink), 0, SaveOptions::default()).unwrap();
    writer.write(vec![one], &Never).unwrap();
    writer.finish(&Never).unwrap();
    std::fs::read(&path).unwrap()
}

static WITH_ROOM: LazyLock<Vec<u8>> = LazyLock::new(with_room);

proptest! {
    #[test]
    fn tensors_load_with_any_bytes_after_the_index(
        bytes in proptest::collection::vec(any::<u8>(), 1..100),
        magic in proptest::option::of(0usize..3),
    ) {
        let mut file = WITH_ROOM.clone();
        let end = 73 + (256 << 10);
        file[end - bytes.len()..end].copy_from_slice(&bytes);
        if let Some(which) = magic {
            let (name, at) = [("TZMETA01", 16), ("TZPAIR01", 24), ("TZSEAL01", 40)][which];
            file[end - at..end - at + 8].copy_from_slice(name.as_bytes());
        }
        let source: Arc<dyn ReadAt> = Arc::new(MemorySource::new(file, "any"));
        let file = TensorFile::from_source(source, 0, &Never).unwrap();
        let loaded = load(&file, &[0], &LoadOptions::default(), &Never).unwrap();
        prop_assert_eq!(loaded[0].memory.bytes(), [1, 2, 3]);
        if let Err(error) = file.metadata() {
            prop_assert!(matches!(error, Error::Format { .. }), "{}", error);
        }
    }
}
