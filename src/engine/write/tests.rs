#![allow(
    unsafe_code,
    clippy::unwrap_used,
    clippy::indexing_slicing,
    clippy::cast_possible_truncation
)]

use std::io::IoSlice;
use std::ops::Range;
use std::path::Path;
use std::sync::atomic::{AtomicU64, AtomicUsize, Ordering};
use std::sync::{Arc, Mutex};

use super::{TensorData, WriteOptions, WriteTensor, write_tensors};
use crate::cancel::{Cancel, Never};
use crate::error::{Error, Result};
use crate::format::TensorKind;
use crate::format::catalog::Entry;
use crate::format::dtype::DType;
use crate::format::name::Name;
use crate::format::tensors::header::Hashes;
use crate::format::tensors::layout::{UnplacedTensor, place_tensors};
use crate::io::local::FileSink;
use crate::io::{Ending, Published, SinkFacts, WriteAt};
use crate::mem::device::simulated::{FakeDevice, InjectedFaults};
use crate::mem::device::{Consumer, Device, DeviceBytes, DeviceMemory};
use crate::mem::pinned::Pool;

/// Default bytes of a staging buffer.
const BUFFER_LEN: usize = 4 << 20;

/// The origin of a tensor of the test.
#[derive(Clone, Copy, PartialEq)]
enum DataKind {
    Memory,
    Device,
    Deferred,
}

/// Tensors of all sizes: empty ones, those that are hashed at once, and those of several batches.
const TENSORS: [(DataKind, usize); 16] = [
    (DataKind::Memory, 3_000_000),
    (DataKind::Memory, 10),
    (DataKind::Device, 9 << 20),
    (DataKind::Device, 0),
    (DataKind::Device, 100),
    (DataKind::Device, 1_500_000),
    (DataKind::Device, BUFFER_LEN),
    (DataKind::Device, BUFFER_LEN + 1),
    (DataKind::Memory, 0),
    (DataKind::Memory, 16 << 20),
    (DataKind::Deferred, 5_000_000),
    (DataKind::Device, 17 << 20),
    (DataKind::Deferred, 0),
    (DataKind::Deferred, 70),
    (DataKind::Deferred, 9 << 20),
    (DataKind::Device, 13 << 20),
];

struct TestTensors {
    entries: Vec<Entry>,
    end: u64,
    data: Vec<Vec<u8>>,
}

fn tensors(lens: &[usize], hashes: Hashes) -> TestTensors {
    let placed = lens.iter().enumerate().map(|(n, &len)| UnplacedTensor {
        name: Name::from_key(&format!("t{n}")).unwrap(),
        kind: TensorKind::StateDict,
        dtype: DType::from_name("uint8").unwrap(),
        shape: vec![len as u64],
        meta: false,
    });
    let layout = place_tensors(placed.collect(), 0, 64, hashes, None).unwrap();
    let data = lens.iter().enumerate().map(|(n, &len)| crate::tests::pattern(len, n));
    TestTensors { entries: layout.entries, end: layout.end, data: data.collect() }
}

/// The number of copies that exist, and the maximum so far.
#[derive(Default)]
struct LiveCopies(AtomicUsize, AtomicUsize);

struct CountedCopy(Vec<u8>, Arc<LiveCopies>);

impl AsRef<[u8]> for CountedCopy {
    fn as_ref(&self) -> &[u8] {
        &self.0
    }
}

impl Drop for CountedCopy {
    fn drop(&mut self) {
        self.1.0.fetch_sub(1, Ordering::SeqCst);
    }
}

fn tensor_data<'t>(
    from: DataKind,
    data: &'t [u8],
    device: &Arc<dyn Device>,
    live_copies: &Arc<LiveCopies>,
) -> TensorData<'t> {
    match from {
        DataKind::Memory => TensorData::Bytes(data),
        DataKind::Device => {
            let address = data.as_ptr().expose_provenance();
            // SAFETY: the fake device's memory is host memory; the data outlive the save, which
            // only reads them.
            let memory = unsafe { DeviceMemory::new(address, data.len()) };
            TensorData::Device(DeviceBytes {
                device: Arc::clone(device),
                consumer: Consumer(0),
                memory,
            })
        }
        DataKind::Deferred => {
            let live_copies = Arc::clone(live_copies);
            TensorData::Deferred(Box::new(move || {
                live_copies
                    .1
                    .fetch_max(live_copies.0.fetch_add(1, Ordering::SeqCst) + 1, Ordering::SeqCst);
                Ok(Box::new(CountedCopy(data.to_vec(), Arc::clone(&live_copies))))
            }))
        }
    }
}

/// Writes the tensors, each from the origin that `from` returns, and returns the bytes of the file.
fn written(
    tensors: &TestTensors,
    path: &Path,
    hashes: Hashes,
    threads: usize,
    (device, live_copies): (&Arc<dyn Device>, &Arc<LiveCopies>),
    from: impl Fn(DataKind) -> DataKind,
) -> Result<Vec<u8>> {
    let mut sink = FileSink::create(path)?;
    let items = tensors.entries.iter().zip(&tensors.data).zip(TENSORS);
    let items: Vec<WriteTensor<'_>> = items
        .map(|((entry, data), (is, _))| {
            let data = tensor_data(from(is), data, device, live_copies);
            WriteTensor { entry, module_index: 0, data }
        })
        .collect();
    let (threads, hashes) = (Some(threads), Some(hashes));
    let options = WriteOptions { threads, hashes, ..WriteOptions::default() };
    let progress = AtomicU64::new(0);
    write_tensors(&sink, &items, &options, &progress, &Never)?;
    let all: u64 = tensors.entries.iter().map(|entry| entry.data_len).sum();
    assert_eq!(progress.into_inner(), all);
    sink.publish(tensors.end, Ending::Finished, &Never)?;
    std::fs::read(path).map_err(|error| Error::io("reading", "the file", error))
}

/// Chunks that wait to be hashed hold staging buffers. Several saves must finish even with the
/// minimum number of buffers.
#[test]
fn every_data_source_gives_the_same_file_with_minimum_buffers() {
    let folder = tempfile::tempdir().unwrap();
    // With CRC-32 alone, chunks do not wait.
    for (hashes, seed, saves) in [(Hashes::All, 1, &[1, 2, 3, 8][..]), (Hashes::Crc32, 2, &[2, 8])]
    {
        let device: Arc<dyn Device> = FakeDevice::new(seed, InjectedFaults::default());
        Pool::of(&device).unwrap().set_limit(0);
        let tensors = &tensors(&TENSORS.map(|(_, len)| len), hashes);
        let live_copies = Arc::default();
        let path = folder.path().join("memory");
        let memory = |_| DataKind::Memory;
        let expected =
            &written(tensors, &path, hashes, 1, (&device, &live_copies), memory).unwrap();
        std::thread::scope(|scope| {
            for (save, &threads) in saves.iter().enumerate() {
                let (folder, device) = (&folder, &device);
                scope.spawn(move || {
                    let live_copies: Arc<LiveCopies> = Arc::default();
                    let path = folder.path().join(save.to_string());
                    let found =
                        written(tensors, &path, hashes, threads, (device, &live_copies), |is| is);
                    assert!(found.unwrap() == *expected, "{threads} threads, {hashes:?}");
                    let LiveCopies(now, most) = &*live_copies;
                    assert_eq!(now.load(Ordering::SeqCst), 0);
                    assert!(most.load(Ordering::SeqCst) <= threads, "copies at once");
                });
            }
        });
    }
}

/// An upload that keeps its bytes, and the ranges that were written.
struct RecordedUpload(Mutex<(Vec<u8>, Vec<Range<usize>>)>);

impl WriteAt for RecordedUpload {
    fn uri(&self) -> &str {
        "counted"
    }

    fn facts(&self) -> SinkFacts {
        SinkFacts {
            max_writers: 4,
            default_writers: 4,
            max_positions: 4,
            is_visible_early: false,
            retained: 0,
            part_len: 8 << 20,
        }
    }

    fn write_at(&self, offset: u64, buffers: &[IoSlice<'_>], _: &dyn Cancel) -> Result<usize> {
        let (bytes, ranges) = &mut *self.0.lock().unwrap();
        let mut at = offset as usize;
        for buffer in buffers {
            bytes[at..at + buffer.len()].copy_from_slice(buffer);
            at += buffer.len();
        }
        ranges.push(offset as usize..at);
        Ok(at - offset as usize)
    }

    fn read_back(&self, _: u64, _: &mut [u8]) -> Result<()> {
        unreachable!()
    }

    fn publish(&mut self, _: u64, _: Ending, _: &dyn Cancel) -> Result<Published> {
        unreachable!()
    }
}

/// The batches of an upload are shorter than those of a file.
#[test]
fn uploads_write_each_byte_once_and_hash_whole_tensors() {
    let kib = [1, 512, 700, 1024, 2048];
    let lens = kib.iter().flat_map(|kib| [(kib << 10) - 1, kib << 10, (kib << 10) + 1]);
    let lens: Vec<usize> = lens.collect();
    let folder = tempfile::tempdir().unwrap();
    for hashes in [Hashes::All, Hashes::Crc32] {
        let TestTensors { entries, end, data } = tensors(&lens, hashes);
        let items = || -> Vec<WriteTensor<'_>> {
            let item = |(entry, data)| WriteTensor { entry, module_index: 0, data };
            entries.iter().zip(data.iter().map(|data| TensorData::Bytes(data))).map(item).collect()
        };
        let options = WriteOptions { hashes: Some(hashes), ..WriteOptions::default() };
        let upload = RecordedUpload(Mutex::new((vec![0; end as usize], Vec::new())));
        write_tensors(&upload, &items(), &options, &AtomicU64::new(0), &Never).unwrap();
        let path = folder.path().join("file");
        let mut file = FileSink::create(&path).unwrap();
        write_tensors(&file, &items(), &options, &AtomicU64::new(0), &Never).unwrap();
        file.publish(end, Ending::Finished, &Never).unwrap();
        let expected = std::fs::read(path).unwrap();
        let (bytes, mut ranges) = upload.0.into_inner().unwrap();
        let mut position = entries[0].header_offset as usize;
        assert!(bytes[position..] == expected[position..], "{hashes:?}");
        ranges.sort_unstable_by_key(|range| range.start);
        ranges.push(bytes.len()..bytes.len());
        for Range { start, end } in ranges {
            assert!(start >= position, "byte {start} was written twice");
            assert!(expected[position..start].iter().all(|&byte| byte == 0), "byte {position}");
            position = end;
        }
    }
}
