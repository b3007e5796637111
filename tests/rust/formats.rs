//! Files of other formats, written here byte by byte: opened, listed, read, cut, refused.
#![allow(clippy::single_range_in_vec_init)]

use std::fs;
use std::path::Path;
use std::sync::Arc;

use half::bf16;
use serde_json::{Map, Value, json};
use tensorizer::crypt::{DecryptionOptions, EncryptionOptions, Key, PIECE_LEN, Secret};
use tensorizer::format::catalog::Format;
use tensorizer::io::{MemorySource, ReadAt, StreamSource};
use tensorizer::{
    Error, LoadOptions, Never, SaveOptions, SaveTensor, TensorFile, Verify, load, load_into, save,
};

/// Type in safetensors, dimensions and bytes.
type Packed = (&'static str, Vec<u64>, Vec<u8>);

/// A file of these tensors, whose data lie in this order.
fn pack(metadata: Option<Value>, tensors: &[(&str, Packed)]) -> Vec<u8> {
    let mut header = Map::new();
    header.extend(metadata.map(|metadata| ("__metadata__".to_owned(), metadata)));
    let mut data = Vec::new();
    for (name, (dtype, shape, bytes)) in tensors {
        let offsets = [data.len(), data.len() + bytes.len()];
        let info = json!({ "dtype": dtype, "shape": shape, "data_offsets": offsets });
        header.insert((*name).to_owned(), info);
        data.extend(bytes);
    }
    let header = Value::Object(header).to_string();
    let len = (header.len() as u64).to_le_bytes();
    [&len[..], header.as_bytes(), &data].concat()
}

fn floats(shape: &[u64], first: f32) -> Packed {
    let count: u64 = shape.iter().product();
    let values = std::iter::successors(Some(first), |last| Some(last + 1.0));
    let bytes = values.zip(0..count).flat_map(|(value, _)| value.to_le_bytes()).collect();
    ("F32", shape.to_vec(), bytes)
}

fn halves(values: &[f32]) -> Packed {
    let bytes = values.iter().flat_map(|&value| bf16::from_f32(value).to_le_bytes()).collect();
    ("BF16", vec![values.len() as u64], bytes)
}

/// Two shards and the index of both; one tensor is in either of them.
fn write_shards(folder: &Path) {
    let one = pack(
        Some(json!({ "format": "pt", "part": "one" })),
        &[("matrix", floats(&[40, 30], 0.0)), ("both", halves(&[1.0]))],
    );
    let two = pack(
        Some(json!({ "format": "pt", "part": "two" })),
        &[("half", halves(&[0.5, -2.0])), ("both", halves(&[2.0])), ("scalar", floats(&[], 7.0))],
    );
    fs::create_dir_all(folder.join("parts")).unwrap();
    fs::write(folder.join("1.safetensors"), one).unwrap();
    fs::write(folder.join("parts/2.safetensors"), two).unwrap();
    let index = json!({
        "metadata": { "total_size": 4810, "format": "index" },
        "weight_map": {
            "scalar": "parts/2.safetensors",
            "matrix": "1.safetensors",
            "both": "parts/2.safetensors",
            "half": "parts/2.safetensors",
        },
    });
    fs::write(folder.join("model.safetensors.index.json"), index.to_string()).unwrap();
}

fn names(file: &TensorFile) -> Vec<&str> {
    file.entries().iter().map(|entry| entry.name.stored()).collect()
}

fn text<T>(result: Result<T, Error>) -> String {
    result.err().map(|error| error.to_string()).unwrap()
}

#[test]
fn safetensors_files_are_listed_and_loaded_from_every_source() {
    let folder = tempfile::tempdir().unwrap();
    let path = folder.path().join("f");
    let bytes = pack(
        Some(json!({ "format": "pt", "licence": "none" })),
        &[
            ("odd", ("U8", vec![1], vec![9])),
            ("half", halves(&[0.5, -2.0])),
            ("matrix", floats(&[40, 30], 0.0)),
            ("empty", floats(&[0, 3], 0.0)),
            ("scalar", floats(&[], 7.0)),
        ],
    );
    fs::write(&path, &bytes).unwrap();
    let memory: Arc<dyn ReadAt> = Arc::new(MemorySource::new(bytes.clone(), "memory"));
    let prefixed = [b"{{{", &bytes[..]].concat();
    let prefixed: Arc<dyn ReadAt> = Arc::new(MemorySource::new(prefixed, "behind others"));
    for file in [
        TensorFile::open(&path).unwrap(),
        TensorFile::open_uri(path.to_str().unwrap(), &Never).unwrap(),
        TensorFile::from_source(memory, 0, &Never).unwrap(),
        TensorFile::from_source(prefixed, 3, &Never).unwrap(),
    ] {
        assert_eq!(file.format(), Format::Safetensors);
        assert!(file.prologue().is_none() && !file.is_encrypted() && file.is_seekable());
        let expected = [("format", "pt"), ("licence", "none")];
        let expected = expected.map(|(name, value)| (name.to_owned(), value.to_owned()));
        assert_eq!(file.metadata().unwrap().unwrap(), expected);
        assert_eq!(names(&file), ["odd", "half", "matrix", "empty", "scalar"]);
        let entry = &file.entries()[2];
        assert_eq!((entry.dtype.name(), &*entry.shape), ("float32", &[40, 30][..]));
        assert_eq!((entry.data_len, entry.file, entry.is_meta()), (4800, 0, false));

        let matrix = file.read("matrix").unwrap();
        assert_eq!(matrix.as_slice::<f32>().unwrap()[1199], 1199.0);
        let read = file.read_all(&["scalar", "empty", "odd"]).unwrap();
        assert_eq!(read[0].as_slice::<f32>().unwrap(), [7.0]);
        assert!(read[1].as_slice::<f32>().unwrap().is_empty());
        assert_eq!(read[2].bytes(), [9]);
        let mut mine = [bf16::ZERO; 2];
        file.read_into("half", &mut mine).unwrap();
        assert_eq!(mine.map(bf16::to_f32), [0.5, -2.0]);
        file.close();
        assert!(matches!(file.read("odd"), Err(Error::Closed(_))));
    }
}

#[test]
fn tensors_are_mapped_where_their_elements_are_aligned() {
    let folder = tempfile::tempdir().unwrap();
    let path = folder.path().join("f");
    for pad in 0..5 {
        let odd = ("U8", vec![pad], vec![0; usize::try_from(pad).unwrap()]);
        fs::write(&path, pack(None, &[("odd", odd), ("big", floats(&[300_000], 0.0))])).unwrap();
        let file = TensorFile::open(&path).unwrap();
        let options = LoadOptions { map: true, ..LoadOptions::default() };
        let loaded = load(&file, &[1], &options, &Never).unwrap();
        assert_eq!(loaded[0].as_slice::<f32>().unwrap()[299_999], 299_999.0);
    }
}

#[test]
fn pipe_is_read_once_front_to_back() {
    let bytes = pack(None, &[("a", floats(&[2, 2], 1.0)), ("b", halves(&[3.0]))]);
    let pipe = StreamSource::new(std::io::Cursor::new(bytes), "pipe");
    let file = TensorFile::from_source(Arc::new(pipe), 0, &Never).unwrap();
    assert!(!file.is_seekable());
    let loaded = load(&file, &[0, 1], &LoadOptions::default(), &Never).unwrap();
    assert_eq!(loaded[0].as_slice::<f32>().unwrap(), [1.0, 2.0, 3.0, 4.0]);
    assert_eq!(loaded[1].as_slice::<bf16>().unwrap(), [bf16::from_f32(3.0)]);
}

#[test]
fn empty_metadata_differ_from_missing_metadata() {
    for (stated, found) in
        [(None, None), (Some(json!(null)), None), (Some(json!({})), Some(&[][..]))]
    {
        let bytes = pack(stated, &[("scalar", floats(&[], 7.0))]);
        let source: Arc<dyn ReadAt> = Arc::new(MemorySource::new(bytes, "memory"));
        let file = TensorFile::from_source(source, 0, &Never).unwrap();
        assert_eq!(file.metadata().unwrap(), found);
    }
}

#[test]
fn shards_are_opened_as_one_file() {
    let folder = tempfile::tempdir().unwrap();
    write_shards(folder.path());
    let index = folder.path().join("model.safetensors.index.json");
    for path in [folder.path(), &index] {
        let file = TensorFile::open(path).unwrap();
        assert_eq!(file.format(), Format::Safetensors);
        assert_eq!(file.sources().len(), 2);
        assert_eq!(names(&file), ["matrix", "half", "both", "scalar"]);
        let of: Vec<usize> = file.entries().iter().map(|entry| entry.file).collect();
        assert_eq!(of, [0, 1, 1, 1]);
        // Values of the index replace those of the shards, and its numbers become texts as written.
        let metadata = file.metadata().unwrap().unwrap();
        let pairs: Vec<(&str, &str)> =
            metadata.iter().map(|(name, value)| (&**name, &**value)).collect();
        assert_eq!(pairs, [("format", "index"), ("part", "two"), ("total_size", "4810")]);

        let read = file.read_all(&["scalar", "matrix", "both"]).unwrap();
        assert_eq!(read[0].as_slice::<f32>().unwrap(), [7.0]);
        assert_eq!(read[1].as_slice::<f32>().unwrap()[1199], 1199.0);
        assert_eq!(read[2].as_slice::<bf16>().unwrap(), [bf16::from_f32(2.0)]);
        let (mut matrix, mut half) = (vec![0; 4800], [0; 4]);
        let numbers = file.select(&["half", "matrix"]).unwrap();
        let options = LoadOptions { readers: Some(3), ..LoadOptions::default() };
        load_into(&file, &numbers, vec![&mut half, &mut matrix], &options, &Never).unwrap();
        assert_eq!(matrix, floats(&[40, 30], 0.0).2);
        assert_eq!(half[..], halves(&[0.5, -2.0]).2);
    }
}

/// Rows 10 to 20 and columns 3 to 7 of `matrix`, which has 40 rows of 30.
fn check_slices(file: &TensorFile) {
    let number = file.find("matrix").unwrap();
    let part = file.sliced(vec![(number, [10..20, 3..7].into())]).unwrap();
    assert_eq!(names(&part), ["matrix"]);
    assert_eq!(&*part.entries()[0].shape, [10, 4]);
    let values = part.read("matrix").unwrap();
    let rows = (10u8..20).map(f32::from);
    let expected: Vec<f32> =
        rows.flat_map(|row| (3u8..7).map(move |at| row * 30.0 + f32::from(at))).collect();
    assert_eq!(values.shape(), [10, 4]);
    assert_eq!(values.as_slice::<f32>().unwrap(), expected);
    let mut mine = [0.0f32; 40];
    part.read_into("matrix", &mut mine).unwrap();
    assert_eq!(mine[..], expected);

    let rows = file.sliced(vec![(number, [39..40, 0..30].into())]).unwrap();
    assert_eq!(rows.read("matrix").unwrap().as_slice::<f32>().unwrap()[0], 1170.0);
    let nothing = file.sliced(vec![(number, [5..5, 0..30].into())]).unwrap();
    assert!(nothing.read("matrix").unwrap().bytes().is_empty());
    let scalar = file.sliced(vec![(file.find("scalar").unwrap(), [].into())]).unwrap();
    assert_eq!(scalar.read("scalar").unwrap().as_slice::<f32>().unwrap(), [7.0]);
    // The whole file is as it was.
    assert_eq!(file.read("matrix").unwrap().shape(), [40, 30]);

    for slice in [vec![0..41, 0..30], vec![0..40], vec![0..40, 0..30, 0..1]] {
        let refused = file.sliced(vec![(number, slice.into())]);
        let text = text(refused);
        assert!(text.contains("of tensor `matrix`, whose shape is [40, 30]"), "{text}");
    }
    let whole = || [0..40, 0..30].into();
    assert!(matches!(file.sliced(vec![(99, whole())]), Err(Error::InvalidArgument(_))));
    // Several slices of one tensor are tensors of their own.
    let several = vec![(number, [39..40, 0..1].into()), (number, [0..1, 1..3].into())];
    let several = file.sliced(several).unwrap();
    let (mut last, mut first) = ([0; 4], [0; 8]);
    let into: Vec<&mut [u8]> = vec![&mut last, &mut first];
    load_into(&several, &[0, 1], into, &LoadOptions::default(), &Never).unwrap();
    assert_eq!(
        (last, first[4..].to_vec()),
        (1170.0f32.to_le_bytes(), 2.0f32.to_le_bytes().to_vec())
    );
    // A slice is cut from a tensor, not from a slice.
    assert!(matches!(part.sliced(vec![(0, [0..1, 0..1].into())]), Err(Error::InvalidArgument(_))));
    let mut short = [9.0f32; 39];
    assert!(text(part.read_into("matrix", &mut short)).contains("needs 160 bytes"));
    assert_eq!(short, [9.0; 39]);
}

/// Saves what [`check_slices`] needs, and a tensor of several pieces of encryption.
fn save_tensors(path: &Path, encryption: Option<EncryptionOptions>) -> Vec<u8> {
    let big: Vec<u8> = (0..3 * PIECE_LEN + 77).map(|at| at.to_le_bytes()[1]).collect();
    let (_, shape, matrix) = floats(&[40, 30], 0.0);
    let float = tensorizer::format::dtype::DType::from_name("float32").unwrap();
    let tensors = vec![
        SaveTensor::from_bytes("matrix", float, &shape, &matrix).unwrap(),
        SaveTensor::new("big", &[big.len() as u64], &big[..]).unwrap(),
        SaveTensor::new("scalar", &[], &[7.0f32]).unwrap(),
    ];
    let options = SaveOptions { encryption: encryption.map(Arc::new), ..SaveOptions::default() };
    save(path, tensors, options, &Never).unwrap();
    big
}

#[test]
fn slices_have_the_right_bytes_in_every_format() {
    let folder = tempfile::tempdir().unwrap();
    write_shards(folder.path());
    check_slices(&TensorFile::open(folder.path()).unwrap());
    let path = folder.path().join("plain");
    save_tensors(&path, None);
    check_slices(&TensorFile::open(&path).unwrap());
}

#[test]
fn slices_of_encrypted_files_have_the_right_bytes() {
    let folder = tempfile::tempdir().unwrap();
    let path = folder.path().join("sealed");
    let key = |byte| Key::new(&[byte; 32]).unwrap();
    for manifest in [false, true] {
        let encryption = EncryptionOptions { key: key(1), derivation: None, manifest };
        let big = save_tensors(&path, Some(encryption));
        let open = |byte| {
            let options = DecryptionOptions::new(Secret::Key(key(byte)));
            TensorFile::open(&path).unwrap().decrypt(Arc::new(options), &Never)
        };
        let file = open(1).unwrap();
        check_slices(&file);
        let number = file.find("big").unwrap();
        let (start, end) = (PIECE_LEN - 3, 2 * PIECE_LEN + 5);
        let part = file.sliced(vec![(number, [start..end].into())]).unwrap();
        let range = usize::try_from(start).unwrap()..usize::try_from(end).unwrap();
        for verify in [Verify::Nothing, Verify::Crc32, Verify::All] {
            let options = LoadOptions { verify, ..LoadOptions::default() };
            let loaded = load(&part, &[0], &options, &Never).unwrap();
            assert!(loaded[0].bytes() == &big[range.clone()], "{verify:?}");
        }
        let locked = TensorFile::open(&path).unwrap();
        let locked = locked.sliced(vec![(number, [start..end].into())]).unwrap();
        assert!(matches!(locked.read("big"), Err(Error::Crypt(_))));
        let wrong = open(2).and_then(|file| file.sliced(vec![(number, [start..end].into())]));
        assert!(matches!(wrong.and_then(|part| part.read("big")), Err(Error::Crypt(_))));
    }
}

#[test]
fn verification_and_decryption_of_safetensors_are_refused() {
    let folder = tempfile::tempdir().unwrap();
    write_shards(folder.path());
    let path = folder.path().join("1.safetensors");
    for path in [folder.path(), &path] {
        let file = TensorFile::open(path).unwrap();
        for verify in [Verify::Crc32, Verify::All] {
            let options = LoadOptions { verify, ..LoadOptions::default() };
            let refused = load(&file, &[0], &options, &Never);
            assert!(matches!(refused, Err(Error::NoHashes { .. })));
            assert!(text(refused).contains("safetensors files hold no hashes"));
        }
        assert!(matches!(file.read("nothing"), Err(Error::TensorNotFound { .. })));
        let options = DecryptionOptions::new(Secret::Key(Key::new(&[1; 32]).unwrap()));
        let refused = file.decrypt(Arc::new(options), &Never);
        assert!(text(refused).contains("is not encrypted"));
    }
}

#[test]
fn damaged_files_are_refused() {
    let sound = pack(None, &[("a", floats(&[2], 1.0)), ("b", halves(&[1.0]))]);
    let open = |bytes: &[u8]| {
        let source = MemorySource::new(bytes.to_vec(), "damaged");
        TensorFile::from_source(Arc::new(source), 0, &Never)
    };
    open(&sound).unwrap();
    for len in 0..sound.len() {
        let refused = open(&sound[..len]);
        assert!(
            matches!(refused, Err(Error::Truncated { .. } | Error::Format { .. })),
            "{len} bytes"
        );
    }
    assert!(text(open(&[&sound[..], b"x"].concat())).contains("expected the file to end"));
    for tensors in [
        &[("a", ("F32", vec![3], vec![0; 8]))][..],
        &[("a", ("F33", vec![2], vec![0; 8]))],
        &[("a", ("F32", vec![u64::MAX, 4], vec![0; 8]))],
        &[("a", ("F4", vec![3], vec![0; 2]))],
    ] {
        let refused = open(&pack(None, tensors));
        assert!(matches!(refused, Err(Error::Format { .. })), "{tensors:?}");
        assert!(text(refused).contains("`a`"));
    }
    let numbers = open(&pack(Some(json!({ "steps": 3 })), &[]));
    assert!(matches!(numbers, Err(Error::Format { .. })));
}

#[test]
fn shard_index_opens_no_file_outside_its_folder() {
    let folder = tempfile::tempdir().unwrap();
    let inside = folder.path().join("inside");
    write_shards(&inside);
    let shard = fs::read(inside.join("1.safetensors")).unwrap();
    fs::write(folder.path().join("outside.safetensors"), &shard).unwrap();
    let index = inside.join("model.safetensors.index.json");
    let open = |file: &str| {
        let map = json!({ "weight_map": { "matrix": file } });
        fs::write(&index, map.to_string()).unwrap();
        TensorFile::open(&inside)
    };
    open("1.safetensors").unwrap();
    let outside = folder.path().join("outside.safetensors").display().to_string();
    for file in ["../outside.safetensors", &outside, "parts/../../outside.safetensors", ""] {
        assert!(matches!(open(file), Err(Error::Format { .. })), "{file}");
    }
    assert!(matches!(open("3.safetensors"), Err(Error::Io { .. })));
    assert!(text(open("parts/2.safetensors")).contains("expected tensor `matrix` in"));
    assert!(matches!(open("model.safetensors.index.json"), Err(Error::Format { .. })));

    // Without a folder, an index cannot find its shards.
    open("1.safetensors").unwrap();
    let source = MemorySource::new(fs::read(&index).unwrap(), "memory");
    let refused = TensorFile::from_source(Arc::new(source), 0, &Never);
    assert!(matches!(refused, Err(Error::Unsupported(_))));
    assert!(text(refused).contains("is an index of shards"));
}

#[test]
fn folders_are_opened_by_one_file_in_them() {
    let folder = tempfile::tempdir().unwrap();
    let open = || TensorFile::open(folder.path());
    assert!(text(open()).contains("holds none of model.safetensors"));
    let put = |name: &str, tensor: &str| {
        let bytes = pack(None, &[(tensor, floats(&[1], 1.0))]);
        fs::write(folder.path().join(name), bytes).unwrap();
    };
    put("other.safetensors", "a");
    assert_eq!(names(&open().unwrap()), ["a"]);
    put("another.safetensors", "b");
    assert!(text(open()).contains("name one of them"));
    put("model.safetensors", "c");
    assert_eq!(names(&open().unwrap()), ["c"]);
}

#[test]
fn zip_archives_and_pickles_are_refused() {
    let folder = tempfile::tempdir().unwrap();
    let path = folder.path().join("pytorch_model.bin");
    // The beginnings of what torch.save writes, and of what it wrote before release 1.6.
    for (bytes, expected) in [(&b"PK\x03\x04"[..], "torch.save"), (b"\x80\x02\x8a\n", "pickle")] {
        fs::write(&path, [bytes, &[0; 200]].concat()).unwrap();
        for path in [folder.path(), &path] {
            let text = text(TensorFile::open(path));
            assert!(text.contains(expected), "{text}");
        }
    }
}
