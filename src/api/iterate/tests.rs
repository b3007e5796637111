//! Tests of iterators to host memory and to the fake device, under random schedules.
#![allow(unsafe_code)]
#![allow(clippy::unwrap_used, clippy::indexing_slicing, clippy::cast_possible_truncation)]

use std::path::{Path, PathBuf};
use std::sync::atomic::{AtomicBool, Ordering};
use std::time::{Duration, Instant};

use std::sync::Arc;
use std::thread;

use super::*;
use crate::api::file::TensorFile;
use crate::api::save_all::save;
use crate::api::save_options::{SaveOptions, SaveTensor};
use crate::cancel::{Cancel, Never};
use crate::codec::crypt::{DecryptionOptions, EncryptionOptions, Key, Secret};
use crate::codec::hash::Verify;
use crate::engine::load_options::LoadOptions;
use crate::error::{Error, Result};
use crate::io::local::FileSource;
use crate::io::{Capabilities, Facts, ReadAt};
use crate::mem::Buffers;
use crate::mem::device::simulated::{FakeDevice, InjectedFaults};
use crate::mem::device::{Consumer, Device, DeviceMemory};
use crate::mem::pinned::Pool;
use crate::memory_limit::MemoryLimit;

const LENS: [usize; 9] = [700_000, 0, 1, 3_000_000, 64, 90_000, 2_100_000, 4096, 1_200_000];

fn tensor(number: usize) -> Vec<u8> {
    crate::tests::pattern(LENS[number], number)
}

fn saved(folder: &Path, options: SaveOptions) -> PathBuf {
    let path = folder.join("f.tensors");
    let tensors: Vec<Vec<u8>> = (0..LENS.len()).map(tensor).collect();
    let named = tensors.iter().enumerate().map(|(number, bytes)| {
        SaveTensor::new(&format!("t{number}"), &[bytes.len() as u64], &bytes[..]).unwrap()
    });
    save(&path, named.collect(), options, &Never).unwrap();
    path
}

/// Memory of the fake device, which is host memory.
#[derive(Default)]
struct HostBlocks {
    blocks: Vec<Vec<u8>>,
    /// Bytes of blocks that were allocated and not let go.
    held: usize,
    most_held: usize,
    /// Blocks from this one on cannot be allocated while others are held.
    refused_from: Option<usize>,
}

impl Allocate for HostBlocks {
    fn allocate(&mut self, first: usize, lens: &[u64]) -> Result<Vec<DeviceMemory>> {
        assert_eq!(first, self.blocks.len(), "in order");
        if self.held > 0 && self.refused_from.is_some_and(|from| first >= from) {
            return Err(Error::DeviceMemory { what: "no more".to_owned() });
        }
        let memory = lens.iter().map(|&len| {
            let mut block = vec![0xEE; len as usize];
            // SAFETY: the block's bytes do not move, and are not touched until it was delivered.
            let memory =
                unsafe { DeviceMemory::new(block.as_mut_ptr().expose_provenance(), block.len()) };
            self.held += block.len();
            self.blocks.push(block);
            memory
        });
        let memory = memory.collect();
        self.most_held = self.most_held.max(self.held);
        Ok(memory)
    }

    fn consumer(&mut self) -> Result<Consumer> {
        Ok(Consumer(0))
    }
}

/// The settings of one iterator.
#[derive(Debug, Clone, Copy)]
struct IteratorSchedule {
    seed: u64,
    device: bool,
    budget: u64,
    order: Order,
    complete: bool,
    verify: Verify,
    readers: Option<usize>,
    refused_from: Option<usize>,
    faults: InjectedFaults,
    /// Bytes of a staging buffer.
    buffer_len: usize,
}

impl IteratorSchedule {
    fn of(seed: u64) -> Self {
        IteratorSchedule {
            seed,
            device: seed % 2 == 1,
            budget: [1, 100_000, 3 << 20, 1 << 30][(seed / 2 % 4) as usize],
            order: if seed.is_multiple_of(3) { Order::Ready } else { Order::File },
            complete: seed % 4 == 3,
            verify: [Verify::Nothing, Verify::Crc32, Verify::All][(seed / 3 % 3) as usize],
            readers: [None, Some(1), Some(3)][(seed / 5 % 3) as usize],
            refused_from: seed.is_multiple_of(7).then_some((seed % 9) as usize),
            faults: InjectedFaults::default(),
            buffer_len: 256 << 10,
        }
    }

    /// Loads all tensors, of which the caller keeps none. Returns their numbers in the order of
    /// arrival.
    fn run(&self, file: &TensorFile) -> Result<Vec<usize>> {
        let device: Arc<dyn Device> = FakeDevice::new(self.seed + 1, self.faults);
        let pool: &'static Pool = Box::leak(Box::new(Pool::new(self.buffer_len, 8, 16)));
        let to = IteratorDevice {
            device,
            consumer: Consumer(0),
            pool,
            direct_storage: self.seed.is_multiple_of(5),
        };
        let load = LoadOptions {
            readers: self.readers,
            verify: self.verify,
            memory: MemoryLimit::of(None),
            ..LoadOptions::default()
        };
        let complete = self.complete;
        let options =
            IterateOptions { load, buffer_bytes: self.budget, order: self.order, complete };
        let numbers: Vec<usize> = (0..LENS.len()).collect();
        let mut blocks = HostBlocks { refused_from: self.refused_from, ..HostBlocks::default() };
        let mut iterator = TensorIterator::new(
            file,
            &numbers,
            self.device.then_some(to),
            &options,
            self.device.then_some(&mut blocks as &mut dyn Allocate),
        )?;
        let mut found = Vec::new();
        loop {
            let landed =
                iterator.next(self.device.then_some(&mut blocks as &mut dyn Allocate), &Never)?;
            if landed.is_empty() {
                break;
            }
            for ReadyTensor { number, memory } in landed {
                let expected = tensor(number);
                let bytes = match &memory {
                    ReadyMemory::Host(buffer) => buffer.bytes().to_vec(),
                    ReadyMemory::Block(at) => {
                        blocks.held -= blocks.blocks[*at].len();
                        std::mem::take(&mut blocks.blocks[*at])
                    }
                    ReadyMemory::Zeros => Vec::new(),
                };
                assert!(bytes == expected, "tensor {number}: {self:?}");
                found.push(number);
            }
        }
        let largest = LENS.iter().max().copied().unwrap();
        let most = self.budget as usize + largest + (64 << 10);
        assert!(blocks.most_held <= most, "{} bytes held: {self:?}", blocks.most_held);
        Ok(found)
    }
}

#[test]
fn every_tensor_is_delivered_once_within_the_budget() {
    let folder = tempfile::tempdir().unwrap();
    let file = TensorFile::open(&saved(folder.path(), SaveOptions::default())).unwrap();
    let all: Vec<usize> = (0..LENS.len()).collect();
    for seed in 0..40 {
        let schedule = IteratorSchedule::of(seed);
        let mut found = schedule.run(&file).unwrap_or_else(|error| panic!("{error}: {schedule:?}"));
        if schedule.order == Order::Ready {
            found.sort_unstable();
        }
        assert_eq!(found, all, "{schedule:?}");
    }
}

#[test]
fn encrypted_tensors_are_delivered_decrypted() {
    let key = || Key::new(&[5; 32]).unwrap();
    let encryption = EncryptionOptions { key: key(), derivation: None, manifest: false };
    let options = SaveOptions { encryption: Some(Arc::new(encryption)), ..SaveOptions::default() };
    let folder = tempfile::tempdir().unwrap();
    let path = saved(folder.path(), options);
    for seed in 0..24 {
        let file = TensorFile::open(&path).unwrap();
        let options = Arc::new(DecryptionOptions::new(Secret::Key(key())));
        let file = file.decrypt(options, &Never).unwrap();
        // A buffer has room for two pieces of encryption.
        let schedule = IteratorSchedule { buffer_len: 4 << 20, ..IteratorSchedule::of(seed) };
        let found = schedule.run(&file).unwrap_or_else(|error| panic!("{error}: {schedule:?}"));
        assert_eq!(found.len(), LENS.len());
    }
}

#[test]
fn damaged_tensors_are_an_error_and_not_delivered() {
    let folder = tempfile::tempdir().unwrap();
    let path = saved(folder.path(), SaveOptions::default());
    let mut bytes = std::fs::read(&path).unwrap();
    let last = bytes.len() - 100;
    bytes[last] ^= 1;
    std::fs::write(&path, bytes).unwrap();
    let file = TensorFile::open(&path).unwrap();
    for seed in 0..60 {
        let schedule = IteratorSchedule::of(seed);
        if schedule.verify != Verify::Nothing {
            let outcome = schedule.run(&file);
            assert!(matches!(outcome, Err(Error::HashMismatch { .. })), "{schedule:?}");
        }
    }
}

#[test]
fn faults_of_a_device_are_errors() {
    let folder = tempfile::tempdir().unwrap();
    let file = TensorFile::open(&saved(folder.path(), SaveOptions::default())).unwrap();
    for seed in (1..80).step_by(2) {
        let nth = Some(1 + seed % 7);
        let faults = match seed % 3 {
            0 => InjectedFaults { copy: nth, ..InjectedFaults::default() },
            1 => InjectedFaults { lost: nth, ..InjectedFaults::default() },
            _ => InjectedFaults { event: nth, ..InjectedFaults::default() },
        };
        let schedule = IteratorSchedule { faults, ..IteratorSchedule::of(seed) };
        match schedule.run(&file) {
            Ok(found) => assert_eq!(found.len(), LENS.len()),
            Err(Error::Device { .. }) => {}
            Err(error) => panic!("{error}: {schedule:?}"),
        }
    }
}

#[test]
fn closing_ends_the_load_and_calls_that_wait() {
    let folder = tempfile::tempdir().unwrap();
    let file = TensorFile::open(&saved(folder.path(), SaveOptions::default())).unwrap();
    let numbers: Vec<usize> = (0..LENS.len()).collect();
    let options = IterateOptions { buffer_bytes: 1 << 20, ..IterateOptions::default() };
    for taken in 0..4 {
        let mut iterator = TensorIterator::new(&file, &numbers, None, &options, None).unwrap();
        for _ in 0..taken {
            assert!(!iterator.next(None, &Never).unwrap().is_empty());
        }
        let closer = iterator.closer();
        let closing = thread::spawn(move || {
            thread::sleep(Duration::from_millis(2));
            closer.close();
        });
        closing.join().unwrap();
        assert!(matches!(iterator.next(None, &Never), Err(Error::Closed(_))));
        iterator.close();
        iterator.close();
    }
    let mut given_up = TensorIterator::new(&file, &numbers, None, &options, None).unwrap();
    let cancel = || Err(Error::Cancelled);
    assert!(matches!(given_up.next(None, &cancel), Err(Error::Cancelled)));
}

/// A file that withholds some bytes until the rest was handed out.
struct BlockedSource {
    file: FileSource,
    /// Reads that include this position have to wait.
    position: u64,
    let_go: Arc<AtomicBool>,
}

impl ReadAt for BlockedSource {
    fn facts(&self) -> &Facts {
        self.file.facts()
    }

    fn capabilities(&self) -> Capabilities {
        self.file.capabilities()
    }

    fn read_at(
        &self,
        offset: u64,
        buffers: &mut Buffers<'_>,
        cancel: &dyn Cancel,
    ) -> Result<usize> {
        let end = offset + buffers.remaining() as u64;
        let started = Instant::now();
        while (offset..end).contains(&self.position)
            && !self.let_go.load(Ordering::Relaxed)
            && started.elapsed() < Duration::from_secs(20)
        {
            cancel.check()?;
            thread::sleep(Duration::from_millis(1));
        }
        self.file.read_at(offset, buffers, cancel)
    }
}

#[test]
fn gathered_slices_do_not_delay_other_tensors() {
    let folder = tempfile::tempdir().unwrap();
    let path = folder.path().join("f.tensors");
    // So many bytes that several readers read them.
    let values = vec![7u8; 3000 * 1000];
    let named = ["columns", "a", "b", "c"]
        .map(|name| SaveTensor::new(name, &[3000, 1000], values.as_slice()).unwrap());
    save(&path, named.into(), SaveOptions::default(), &Never).unwrap();
    let entry = TensorFile::open(&path).unwrap().entry(0).unwrap().clone();
    let let_go = Arc::new(AtomicBool::new(false));
    let source = BlockedSource {
        file: FileSource::open(&path).unwrap(),
        position: entry.data_offset + entry.data_len / 2,
        let_go: Arc::clone(&let_go),
    };
    let file = TensorFile::from_source(Arc::new(source), 0, &Never).unwrap();
    let columns: Box<[_]> = Box::new([0..3000, 0..2]);
    let slices = [Some(columns), None, None, None];
    let file = file.with_slices((0..4).zip(slices)).unwrap();
    let options = IterateOptions { order: Order::Ready, ..IterateOptions::default() };
    let mut found = Vec::new();
    for tensor in file.iterate(&[0, 1, 2, 3], &options).unwrap() {
        found.push(tensor.unwrap().name().to_string());
        if found.len() == 3 {
            let_go.store(true, Ordering::Relaxed);
        }
    }
    assert_eq!(found.last().map(String::as_str), Some("columns"), "{found:?}");
}
