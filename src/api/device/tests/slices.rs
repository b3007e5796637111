//! Tests of several slices of one tensor. Each gets its bytes by every path, and a tensor that is
//! read as a whole is read once for all its slices.

use std::ops::Range;
use std::sync::Arc;
use std::sync::atomic::AtomicU64;

use super::*;
use crate::api::load::load_counted;
use crate::codec::hash::Verify;
use crate::io::{Capabilities, Facts, ReadAt};
use crate::mem::device::simulated::{FakeDevice, InjectedFaults};
use crate::mem::device::{Consumer, Device, DeviceBlocks};
use crate::mem::pinned::Pool;

/// Number of the tensor, rows and columns.
type TestSlice = (usize, Range<u64>, Range<u64>);

/// Rows and columns. Contiguous ranges of 16 KiB and more are read straight to their destination.
const SHAPES: [[u64; 2]; 3] = [[40, 20_000], [30, 50], [7, 300_001]];

/// Returns slices that are out of order and overlap, one of them twice.
fn parts() -> Vec<TestSlice> {
    vec![
        (2, 3..5, 1..280_000),
        (0, 2..9, 5..12),
        (1, 1..2, 0..50),
        (0, 0..40, 0..20_000),
        (0, 2..9, 5..12),
        (2, 0..7, 9..10),
        (0, 7..30, 100..17_000),
        (1, 0..30, 3..3),
        (1, 0..30, 49..50),
    ]
}

/// A file that counts the bytes that are read from it.
struct CountingSource(FileSource, Arc<AtomicU64>);

impl ReadAt for CountingSource {
    fn facts(&self) -> &Facts {
        self.0.facts()
    }

    fn capabilities(&self) -> Capabilities {
        self.0.capabilities()
    }

    fn read_at(
        &self,
        offset: u64,
        buffers: &mut Buffers<'_>,
        cancel: &dyn Cancel,
    ) -> Result<usize> {
        let read = self.0.read_at(offset, buffers, cancel)?;
        self.1.fetch_add(read as u64, Ordering::Relaxed);
        Ok(read)
    }
}

struct SavedSlices {
    _folder: tempfile::TempDir,
    path: std::path::PathBuf,
    tensors: Vec<Vec<u8>>,
    key: Option<Key>,
}

fn saved(key: Option<Key>) -> SavedSlices {
    let folder = tempfile::tempdir().unwrap();
    let path = folder.path().join("f.tensors");
    let bytes = |[rows, columns]: [u64; 2]| pattern((rows * columns) as usize, 0);
    let tensors: Vec<Vec<u8>> = SHAPES.map(bytes).into();
    let encryption = key
        .clone()
        .map(|key| Arc::new(EncryptionOptions { key, derivation: None, manifest: false }));
    let all = SHAPES.iter().zip(&tensors).enumerate().map(|(number, (shape, bytes))| {
        SaveTensor::new(&format!("t{number}"), shape, bytes.as_slice()).unwrap()
    });
    let options = SaveOptions { encryption, ..SaveOptions::default() };
    save(&path, all.collect(), options, &Never).unwrap();
    SavedSlices { _folder: folder, path, tensors, key }
}

impl SavedSlices {
    /// Returns the slices as a file of their own, and the count of the bytes that are read.
    fn sliced(&self, parts: &[TestSlice]) -> (TensorFile, Arc<AtomicU64>) {
        let read = Arc::new(AtomicU64::new(0));
        let source = CountingSource(FileSource::open(&self.path).unwrap(), Arc::clone(&read));
        let mut file = TensorFile::from_source(Arc::new(source), 0, &Never).unwrap();
        if let Some(key) = self.key.clone() {
            let options = DecryptionOptions::new(Secret::Key(key));
            file = file.decrypt(Arc::new(options), &Never).unwrap();
        }
        let slices = parts
            .iter()
            .map(|(number, rows, columns)| (*number, [rows.clone(), columns.clone()].into()));
        let sliced = file.sliced(slices.collect()).unwrap();
        read.store(0, Ordering::Relaxed);
        (sliced, read)
    }

    fn expected(&self, (number, rows, columns): &TestSlice) -> Vec<u8> {
        let width = SHAPES[*number][1];
        let rows = rows.clone().map(|row| {
            let at = |column: u64| (row * width + column) as usize;
            &self.tensors[*number][at(columns.start)..at(columns.end)]
        });
        rows.collect::<Vec<_>>().concat()
    }
}

/// Loads all tensors of a file to the fake device, and returns their bytes.
fn on_device(
    file: &TensorFile,
    seed: u64,
    separate_memory: bool,
    options: &LoadOptions,
) -> Vec<Vec<u8>> {
    let numbers: Vec<usize> = (0..file.entries().len()).collect();
    let planned = DeviceLoad::new(file, &numbers, &[], separate_memory).unwrap();
    let mut memory = TestMemory::new(&planned.block_lens());
    let device: Arc<dyn Device> = FakeDevice::new(seed, InjectedFaults::default());
    let pool = Pool::new(4 << 20, 8, 16);
    let one = [DestinationDevice { device: &device, consumer: Consumer(0), pool: &pool }];
    let to = DeviceMemoryBlocks {
        devices: &one,
        memory: &memory.blocks,
        direct_storage: seed.is_multiple_of(2),
    };
    let (_, streams) =
        planned.run(&to, options, &Counters::default(), &Never, &mut || Ok(false)).unwrap();
    Streams::hand_over_all(streams).unwrap();
    memory.blocks = DeviceBlocks::new(0);
    let locations = planned.locations();
    let bytes = locations.iter().zip(file.entries()).map(|(location, entry)| {
        let start = memory.starts[location.block] + location.offset as usize;
        memory.bytes[start..][..entry.loaded_len() as usize].to_vec()
    });
    bytes.collect()
}

fn in_host_memory(file: &TensorFile, options: &LoadOptions) -> Vec<Vec<u8>> {
    let numbers: Vec<usize> = (0..file.entries().len()).collect();
    let loaded = load_counted(file, &numbers, options, &Counters::default(), &Never).unwrap();
    loaded.iter().map(|tensor| tensor.bytes().to_vec()).collect()
}

#[test]
fn slices_have_the_right_bytes_by_every_path() {
    for key in [None, Some(Key::new(&[5; 32]).unwrap())] {
        let saved = saved(key);
        let expected: Vec<Vec<u8>> = parts().iter().map(|part| saved.expected(part)).collect();
        for seed in 1..=12u64 {
            let verify = [Verify::Nothing, Verify::Crc32, Verify::All][(seed % 3) as usize];
            let options = LoadOptions { verify, ..LoadOptions::default() };
            let (file, _) = saved.sliced(&parts());
            assert!(on_device(&file, seed, seed % 2 == 0, &options) == expected, "seed {seed}");
            assert!(in_host_memory(&file, &options) == expected, "seed {seed}");
        }
    }
}

#[test]
fn whole_tensor_is_read_once_for_all_its_slices() {
    let saved = saved(None);
    let [rows, columns] = SHAPES[0];
    let whole = (0, 0..rows, 0..columns);
    let parts = [whole.clone(), (0, 2..9, 5..12), whole.clone(), whole];
    let (file, read) = saved.sliced(&parts);
    let expected: Vec<Vec<u8>> = parts.iter().map(|part| saved.expected(part)).collect();
    let options = LoadOptions { verify: Verify::All, ..LoadOptions::default() };
    let loads: [&dyn Fn() -> Vec<Vec<u8>>; 2] =
        [&|| on_device(&file, 1, false, &options), &|| in_host_memory(&file, &options)];
    for load in loads {
        assert!(load() == expected);
        let read = read.swap(0, Ordering::Relaxed);
        assert!((rows * columns..rows * columns + 4096).contains(&read), "{read} bytes read");
    }
}
