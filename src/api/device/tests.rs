//! Tests of the whole path to a device, under random schedules, on a fake device.
#![allow(unsafe_code)]
#![allow(clippy::unwrap_used, clippy::indexing_slicing, clippy::cast_possible_truncation)]

mod slices;
mod waiting;

use std::collections::VecDeque;
use std::io::Cursor;
use std::sync::atomic::{AtomicUsize, Ordering};
use std::sync::{Arc, Mutex};

use super::*;
use crate::api::save_all::save;
use crate::api::save_options::{SaveOptions, SaveTensor};
use crate::cancel::Never;
use crate::codec::crypt::{DecryptionOptions, EncryptionOptions, Key, Secret};
use crate::codec::hash::Verify;
use crate::error::Error;
use crate::io::local::FileSource;
use crate::io::{ReadAt, StreamSource};
use crate::mem::Buffers;
use crate::mem::device::simulated::{FakeDevice, InjectedFaults};
use crate::mem::device::{Consumer, Device, DeviceBlocks, DeviceMemory};
use crate::mem::pinned::Pool;
use crate::memory_limit::MemoryLimit;
use crate::tests::pattern;

/// A random number generator (xorshift64), the same as that of the fake device.
struct Random(u64);

impl Random {
    fn below(&mut self, limit: u64) -> u64 {
        self.0 ^= self.0 << 13;
        self.0 ^= self.0 >> 7;
        self.0 ^= self.0 << 17;
        self.0 % limit
    }

    fn one_in(&mut self, n: u64) -> bool {
        self.below(n) == 0
    }
}

/// Memory of the fake device, one block after another.
struct TestMemory {
    bytes: Vec<u8>,
    starts: Vec<usize>,
    blocks: DeviceBlocks,
    /// Blocks that are allocated during the load.
    later: VecDeque<(usize, DeviceMemory)>,
}

impl TestMemory {
    fn new(lens: &[u64]) -> Self {
        let total = lens.iter().sum::<u64>() as usize;
        let mut bytes = vec![0xEE; total];
        let base = bytes.as_mut_ptr().expose_provenance();
        let (mut starts, mut blocks, mut at) = (Vec::new(), Vec::new(), 0);
        for len in lens {
            starts.push(at);
            // SAFETY: each block has a range of `bytes` of its own, which is not touched until the
            // load has ended.
            blocks.push(unsafe { DeviceMemory::new(base + at, *len as usize) });
            at += *len as usize;
        }
        TestMemory {
            bytes,
            starts,
            blocks: DeviceBlocks::from_memory(blocks).unwrap(),
            later: VecDeque::new(),
        }
    }

    /// Makes memory whose blocks are allocated only when the load asks for them.
    fn late(lens: &[u64]) -> Self {
        let mut memory = Self::new(lens);
        let blocks = std::mem::replace(&mut memory.blocks, DeviceBlocks::new(lens.len()));
        memory.later = blocks.into_memory().into_iter().enumerate().collect();
        memory
    }
}

/// Allocates the next block.
fn allocate(blocks: &DeviceBlocks, later: &mut VecDeque<(usize, DeviceMemory)>) -> Result<bool> {
    if let Some((at, memory)) = later.pop_front() {
        blocks.insert(at, crate::mem::device::DeviceBlock { memory, after: None })?;
    }
    Ok(!later.is_empty())
}

struct SavedFile {
    folder: tempfile::TempDir,
    plain: Vec<u8>,
    path: std::path::PathBuf,
    tensors: Vec<Vec<u8>>,
}

/// Saves a file of tensors with these lengths.
fn file(lens: &[usize], options: SaveOptions) -> SavedFile {
    let folder = tempfile::tempdir().unwrap();
    let path = folder.path().join("f.tensors");
    let tensors: Vec<Vec<u8>> = lens.iter().enumerate().map(|(n, &len)| pattern(len, n)).collect();
    let saved = tensors.iter().enumerate().map(|(n, bytes)| {
        SaveTensor::new(&format!("t{n}"), &[bytes.len() as u64], bytes.as_slice()).unwrap()
    });
    save(&path, saved.collect(), options, &|| Ok(())).unwrap();
    SavedFile { plain: std::fs::read(&path).unwrap(), folder, path, tensors }
}

/// The settings of one load.
#[derive(Debug)]
struct LoadSchedule {
    seed: u64,
    units: usize,
    buffer_len: usize,
    readers: usize,
    verify: Verify,
    separate_memory: bool,
    /// True if blocks are allocated during the load.
    late: bool,
    direct_storage: bool,
    pipe: bool,
    selection: Vec<usize>,
    /// The number of devices that share the tensors.
    devices: usize,
    /// Faults of the first device.
    faults: InjectedFaults,
    interrupted: bool,
    flipped: Option<usize>,
}

impl LoadSchedule {
    /// Returns the device of each tensor; none if there is one device.
    fn device_of(&self) -> Vec<usize> {
        let of = |number: &usize| (number * 5 + self.seed as usize / 7) % self.devices;
        if self.devices > 1 { self.selection.iter().map(of).collect() } else { Vec::new() }
    }

    /// Makes the devices.
    fn fakes(&self) -> Vec<Arc<FakeDevice>> {
        let faults = |at| {
            let faults = if at == 0 { self.faults } else { InjectedFaults::default() };
            InjectedFaults { node: self.seed.is_multiple_of(2).then_some(at), ..faults }
        };
        (0..self.devices).map(|at| FakeDevice::new(self.seed + at as u64, faults(at))).collect()
    }
}

/// Opens the file of a schedule.
fn opened(files: &SavedFile, schedule: &LoadSchedule, key: Option<Key>) -> Result<TensorFile> {
    let flipped = schedule.flipped.map(|at| {
        let mut bytes = files.plain.clone();
        let last = bytes.len() - 9;
        bytes[last - at % files.tensors.last().unwrap().len()] ^= 0x40;
        bytes
    });
    let source: Arc<dyn ReadAt> = match (schedule.pipe, flipped) {
        (true, flipped) => {
            let bytes = flipped.unwrap_or_else(|| files.plain.clone());
            Arc::new(StreamSource::new(Cursor::new(bytes), "pipe".to_owned()))
        }
        (false, Some(bytes)) => {
            let path = files.folder.path().join("flipped.tensors");
            std::fs::write(&path, bytes).unwrap();
            Arc::new(FileSource::open(&path)?)
        }
        (false, None) => Arc::new(FileSource::open(&files.path)?),
    };
    let file = TensorFile::from_source(source, 0, &Never)?;
    match key {
        None => Ok(file),
        Some(key) => file.decrypt(Arc::new(DecryptionOptions::new(Secret::Key(key))), &|| Ok(())),
    }
}

fn load(files: &SavedFile, schedule: &LoadSchedule, key: Option<Key>) -> Result<()> {
    let encrypted = key.is_some();
    let file = opened(files, schedule, key)?;
    let device_of = schedule.device_of();
    let planned =
        DeviceLoad::new(&file, &schedule.selection, &device_of, schedule.separate_memory)?;
    let lens = planned.block_lens();
    let mut memory = if schedule.late { TestMemory::late(&lens) } else { TestMemory::new(&lens) };
    let fakes = schedule.fakes();
    let devices: Vec<Arc<dyn Device>> =
        fakes.iter().map(|fake| Arc::clone(fake) as Arc<dyn Device>).collect();
    let pools: Vec<Pool> =
        fakes.iter().map(|_| Pool::new(schedule.buffer_len, schedule.units, 16)).collect();
    let TestMemory { blocks, later, .. } = &mut memory;
    let blocks = &*blocks;
    let mut allocate = || allocate(blocks, later);
    let devices: Vec<DestinationDevice<'_>> = devices
        .iter()
        .zip(&pools)
        .map(|(device, pool)| DestinationDevice { device, consumer: Consumer(0), pool })
        .collect();
    let direct_storage = schedule.direct_storage;
    let to = DeviceMemoryBlocks { devices: &devices, memory: blocks, direct_storage };
    // A load from a file, without decryption, needs only staging buffers and 256 KiB for the bytes
    // that pass one reader.
    let buffers = 4 + schedule.seed % 5;
    let plain = !schedule.pipe && !schedule.direct_storage && !encrypted;
    let bounded = plain && schedule.seed.is_multiple_of(3);
    let of_all = buffers * schedule.devices as u64;
    let limit = bounded.then(|| (256 << 10) + of_all * schedule.buffer_len as u64);
    let options = LoadOptions {
        readers: Some(schedule.readers),
        verify: schedule.verify,
        memory: MemoryLimit::of(limit),
        ..LoadOptions::default()
    };
    let interrupt = || {
        if schedule.interrupted { Err(Error::Cancelled) } else { Ok(()) }
    };
    let counters = Counters::default();
    let outcome = planned.run(&to, &options, &counters, &interrupt, &mut allocate);
    let outcome =
        outcome.and_then(|(headers, streams)| Streams::hand_over_all(streams).map(|()| headers));
    for (fake, pool) in fakes.iter().zip(&pools) {
        assert_eq!(fake.under_way(), 0, "nothing goes on after a load, whatever its outcome");
        if bounded {
            let size = pool.size() as u64;
            assert!(size <= buffers * schedule.buffer_len as u64, "{buffers} buffers");
        }
        pool.release();
        // A lost device may still use staging memory, which is then not freed.
        if schedule.faults.lost.is_none() {
            assert_eq!((pool.size(), fake.pinned()), (0, 0), "all staging memory came back");
        }
    }
    assert_eq!(outcome?.len(), schedule.selection.len());
    memory.blocks = DeviceBlocks::new(0);
    check(files, schedule, &memory, &planned.locations());
    Ok(())
}

/// Compares what was loaded with what was saved.
fn check(
    files: &SavedFile,
    schedule: &LoadSchedule,
    memory: &TestMemory,
    locations: &[BlockLocation],
) {
    for (&number, location) in schedule.selection.iter().zip(locations) {
        let start = memory.starts[location.block] + location.offset as usize;
        let expected = &files.tensors[number];
        let same = memory.bytes[start..][..expected.len()] == *expected;
        assert!(same || schedule.flipped.is_some(), "tensor {number}: {schedule:?}");
    }
}

#[test]
fn random_schedules_load_the_right_bytes_or_report_the_fault() {
    let lens = [
        [7000usize, 0, 1, 300, 64, 90_000, 4096, 1000],
        [20, 20, 20, 20, 20, 20, 20, 20],
        [500_000, 1_400_000, 300_000, 1_100_000, 64, 0, 1_200_000, 400_000],
    ];
    let files = lens.map(|lens| file(&lens, SaveOptions::default()));
    let mut failed = [0; 6];
    for seed in 1..=850u64 {
        let mut random = Random(seed.wrapping_mul(0x9E37_79B9_7F4A_7C15) | 1);
        let files = &files[if seed % 20 == 0 { 2 } else { (seed % 2) as usize }];
        let large = files.tensors.iter().any(|tensor| tensor.len() > 1 << 20);
        let mut selection: Vec<usize> = (0..files.tensors.len()).collect();
        selection.retain(|_| !random.one_in(5));
        let fault = if random.one_in(3) { random.below(6) } else { 6 };
        let nth = Some(1 + random.below(12));
        let schedule = LoadSchedule {
            seed,
            units: 4 + random.below(12) as usize,
            buffer_len: if large { 256 << 10 } else { 64 << random.below(8) },
            readers: 1 + random.below(6) as usize,
            verify: [Verify::Nothing, Verify::Crc32, Verify::All][random.below(3) as usize],
            separate_memory: random.one_in(2),
            late: random.one_in(2),
            direct_storage: random.one_in(4),
            pipe: random.one_in(4),
            faults: InjectedFaults {
                copy: nth.filter(|_| fault == 0),
                event: nth.filter(|_| fault == 1),
                lost: nth.filter(|_| fault == 2),
                pin: fault == 3,
                file: random.one_in(2),
                node: None,
            },
            interrupted: fault == 4,
            flipped: (fault == 5).then(|| random.below(1 << 20) as usize),
            selection,
            devices: if random.one_in(2) { 1 } else { 2 + random.below(2) as usize },
        };
        let outcome = load(files, &schedule, None);
        let last = files.tensors.len() - 1;
        match (fault, outcome) {
            (_, Ok(())) => {
                let seen = fault == 5 && schedule.selection.contains(&last);
                assert!(schedule.verify == Verify::Nothing || !seen, "{schedule:?}");
            }
            (0..=2, Err(Error::Device { .. }))
            | (4, Err(Error::Cancelled))
            | (5, Err(Error::HashMismatch { .. })) => failed[fault as usize] += 1,
            (_, Err(error)) => panic!("{error}: {schedule:?}"),
        }
    }
    assert_eq!(failed[1], 0, "without an event, the stream is waited for");
    for fault in [0, 2, 5] {
        assert!(failed[fault] > 10, "every fault was met: {failed:?}");
    }
}

/// A source that notes how many copies were under way while it was read.
struct RecordingSource {
    file: FileSource,
    fake: Arc<FakeDevice>,
    most: AtomicUsize,
    offsets: Mutex<Vec<u64>>,
}

impl RecordingSource {
    fn new(file: FileSource, fake: &Arc<FakeDevice>) -> Self {
        let (most, offsets) = (AtomicUsize::new(0), Mutex::default());
        RecordingSource { file, fake: Arc::clone(fake), most, offsets }
    }
}

impl ReadAt for RecordingSource {
    fn facts(&self) -> &crate::io::Facts {
        self.file.facts()
    }

    fn capabilities(&self) -> crate::io::Capabilities {
        self.file.capabilities()
    }

    fn read_at(
        &self,
        offset: u64,
        buffers: &mut Buffers<'_>,
        cancel: &dyn Cancel,
    ) -> Result<usize> {
        self.most.fetch_max(self.fake.under_way(), Ordering::Relaxed);
        self.offsets.lock().unwrap().push(offset);
        self.file.read_at(offset, buffers, cancel)
    }
}

#[test]
fn reads_overlap_copies_and_small_tensors_share_copies() {
    let lens = vec![500; 2000];
    let files = file(&lens, SaveOptions::default());
    let fake = FakeDevice::new(9, InjectedFaults::default());
    let device: Arc<dyn Device> = fake.clone();
    let source = FileSource::open(&files.path).unwrap();
    let noting = Arc::new(RecordingSource::new(source, &fake));
    let opened =
        TensorFile::from_source(Arc::clone(&noting) as Arc<dyn ReadAt>, 0, &Never).unwrap();
    let all: Vec<usize> = (0..2000).collect();
    let planned = DeviceLoad::new(&opened, &all, &[], false).unwrap();
    assert_eq!(planned.block_lens().len(), 1, "an image");
    let memory = TestMemory::new(&planned.block_lens());
    let pool = Pool::new(64 << 10, 8, 16);
    let one = [DestinationDevice { device: &device, consumer: Consumer(0), pool: &pool }];
    let to = DeviceMemoryBlocks { devices: &one, memory: &memory.blocks, direct_storage: false };
    let (options, counters) = (LoadOptions::default(), Counters::default());
    let (_, streams) =
        planned.run(&to, &options, &counters, &|| Ok(()), &mut || Ok(false)).unwrap();
    Streams::hand_over_all(streams).unwrap();
    assert!(noting.most.load(Ordering::Relaxed) > 0, "nobody waited for a copy to read on");
    assert!(fake.copies() < 60, "{} copies of 2,000 tensors", fake.copies());
}

#[test]
fn other_tensors_are_read_while_a_large_one_waits_for_its_hash() {
    let files = file(&[4 << 20, 4 << 20, 100], SaveOptions::default());
    let fake = FakeDevice::new(3, InjectedFaults::default());
    let device: Arc<dyn Device> = fake.clone();
    let noting = Arc::new(RecordingSource::new(FileSource::open(&files.path).unwrap(), &fake));
    let opened =
        TensorFile::from_source(Arc::clone(&noting) as Arc<dyn ReadAt>, 0, &Never).unwrap();
    let planned = DeviceLoad::new(&opened, &[0, 1, 2], &[], false).unwrap();
    let memory = TestMemory::new(&planned.block_lens());
    let pool = Pool::new(256 << 10, 8, 16);
    let one = [DestinationDevice { device: &device, consumer: Consumer(0), pool: &pool }];
    let to = DeviceMemoryBlocks { devices: &one, memory: &memory.blocks, direct_storage: false };
    let options = LoadOptions { readers: Some(1), verify: Verify::All, ..LoadOptions::default() };
    noting.offsets.lock().unwrap().clear();
    let (_, streams) =
        planned.run(&to, &options, &Counters::default(), &Never, &mut || Ok(false)).unwrap();
    Streams::hand_over_all(streams).unwrap();
    let offsets = noting.offsets.lock().unwrap();
    let second = opened.entry(1).unwrap().data_offset;
    let begun = offsets.iter().position(|&offset| offset > second + (1 << 20)).unwrap();
    assert!(offsets[begun..].iter().any(|&offset| offset < second), "{offsets:?}");
}

#[test]
fn encrypted_files_are_decrypted_in_staging_memory() {
    let key = || Key::new(&[5; 32]).unwrap();
    let encryption = EncryptionOptions { key: key(), derivation: None, manifest: false };
    let options = SaveOptions { encryption: Some(Arc::new(encryption)), ..SaveOptions::default() };
    let files = file(&[(4 << 20) + 5, 100, 0, 2_200_001, 17], options);
    for seed in 1..=20u64 {
        let schedule = |flipped| LoadSchedule {
            seed,
            units: 4 + (seed % 3) as usize,
            buffer_len: 4 << 20,
            readers: 1 + (seed % 5) as usize,
            verify: [Verify::Nothing, Verify::Crc32, Verify::All][(seed % 3) as usize],
            separate_memory: seed % 2 == 0,
            late: seed % 3 == 0,
            direct_storage: true,
            pipe: false,
            selection: vec![0, 1, 2, 3, 4],
            devices: 1 + (seed % 4) as usize,
            faults: InjectedFaults::default(),
            interrupted: false,
            flipped,
        };
        load(&files, &schedule(None), Some(key())).unwrap();
        let damaged = load(&files, &schedule(Some(3)), Some(key()));
        assert!(matches!(damaged, Err(Error::Crypt(_))), "{damaged:?}");
    }
}
