#![allow(
    unsafe_code,
    clippy::unwrap_used,
    clippy::indexing_slicing,
    clippy::cast_possible_truncation
)]

use std::path::Path;
use std::sync::Arc;
use std::sync::atomic::{AtomicU64, AtomicUsize, Ordering};

use super::{Item, Origin, WriteOptions, write_tensors};
use crate::cancel::Never;
use crate::error::{Error, Result};
use crate::format::TensorKind;
use crate::format::catalog::Entry;
use crate::format::dtype::DType;
use crate::format::name::Name;
use crate::format::tensors::header::Hashes;
use crate::format::tensors::layout::{Placed, place};
use crate::io::WriteAt;
use crate::io::local::FileSink;
use crate::mem::device::fake::{FakeDevice, InjectedFaults};
use crate::mem::device::{Consumer, Device, DeviceBytes, DeviceMemory};
use crate::mem::pinned::Pool;
use crate::memory_limit::MemoryLimit;

/// Default bytes of a staging buffer.
const BUFFER_LEN: usize = 4 << 20;

/// The origin of a tensor of the test.
#[derive(Clone, Copy, PartialEq)]
enum From {
    Memory,
    Device,
    Deferred,
}

/// Tensors of all sizes: empty ones, those that are hashed at once, and those of several batches.
const LENS: [(From, usize); 16] = [
    (From::Memory, 3_000_000),
    (From::Memory, 10),
    (From::Device, 9 << 20),
    (From::Device, 0),
    (From::Device, 100),
    (From::Device, 1_500_000),
    (From::Device, BUFFER_LEN),
    (From::Device, BUFFER_LEN + 1),
    (From::Memory, 0),
    (From::Memory, 20 << 20),
    (From::Deferred, 5_000_000),
    (From::Device, 23 << 20),
    (From::Deferred, 0),
    (From::Deferred, 70),
    (From::Deferred, 17 << 20),
    (From::Device, 13 << 20),
];

struct Tensors {
    entries: Vec<Entry>,
    end: u64,
    data: Vec<Vec<u8>>,
}

fn tensors(hashes: Hashes) -> Tensors {
    let placed = LENS.iter().enumerate().map(|(n, &(_, len))| Placed {
        name: Name::from_key(&format!("t{n}")).unwrap(),
        kind: TensorKind::StateDict,
        dtype: DType::from_name("uint8").unwrap(),
        shape: vec![len as u64],
        meta: false,
    });
    let layout = place(placed.collect(), 0, 64, hashes, None).unwrap();
    let data = LENS.iter().enumerate();
    let data =
        data.map(|(n, &(_, len))| (0..len).map(|i| (i * 31 + i / 255 + n * 7) as u8).collect());
    Tensors { entries: layout.entries, end: layout.end, data: data.collect() }
}

/// The number of copies that exist, and the maximum so far.
#[derive(Default)]
struct Live(AtomicUsize, AtomicUsize);

struct Held(Vec<u8>, Arc<Live>);

impl AsRef<[u8]> for Held {
    fn as_ref(&self) -> &[u8] {
        &self.0
    }
}

impl Drop for Held {
    fn drop(&mut self) {
        self.1.0.fetch_sub(1, Ordering::SeqCst);
    }
}

fn origin<'t>(
    from: From,
    data: &'t [u8],
    device: &Arc<dyn Device>,
    live: &Arc<Live>,
) -> Origin<'t> {
    match from {
        From::Memory => Origin::Bytes(data),
        From::Device => {
            let address = data.as_ptr().expose_provenance();
            // SAFETY: the fake device's memory is host memory; the data outlive the save, which
            // only reads them.
            let memory = unsafe { DeviceMemory::new(address, data.len()) };
            Origin::Device(DeviceBytes {
                device: Arc::clone(device),
                consumer: Consumer(0),
                memory,
            })
        }
        From::Deferred => {
            let live = Arc::clone(live);
            Origin::Deferred(Box::new(move || {
                live.1.fetch_max(live.0.fetch_add(1, Ordering::SeqCst) + 1, Ordering::SeqCst);
                Ok(Box::new(Held(data.to_vec(), Arc::clone(&live))))
            }))
        }
    }
}

/// Writes the tensors, each from the origin that `from` returns, and returns the bytes of the file.
fn written(
    tensors: &Tensors,
    path: &Path,
    hashes: Hashes,
    threads: usize,
    (device, live): (&Arc<dyn Device>, &Arc<Live>),
    from: impl Fn(From) -> From,
) -> Result<Vec<u8>> {
    let mut sink = FileSink::create(path)?;
    let items = tensors.entries.iter().zip(&tensors.data).zip(LENS);
    let items: Vec<Item<'_>> = items
        .map(|((entry, data), (is, _))| {
            let origin = origin(from(is), data, device, live);
            Item { entry, module_index: 0, origin }
        })
        .collect();
    let options = WriteOptions {
        threads: Some(threads),
        hashes: Some(hashes),
        encryption: None,
        named: false,
        memory: MemoryLimit::default(),
    };
    let progress = AtomicU64::new(0);
    write_tensors(&sink, &items, &options, &progress, &Never)?;
    let all: u64 = tensors.entries.iter().map(|entry| entry.data_len).sum();
    assert_eq!(progress.into_inner(), all);
    sink.publish(tensors.end, &Never)?;
    std::fs::read(path).map_err(|error| Error::io("reading", "the file", error))
}

/// Chunks that wait to be hashed hold staging buffers. Several saves must finish even with the
/// minimum number of buffers.
#[test]
fn every_origin_gives_the_same_file_with_little_memory() {
    let folder = tempfile::tempdir().unwrap();
    for (hashes, seed) in [(Hashes::All, 1), (Hashes::Crc32, 2)] {
        let device: Arc<dyn Device> = FakeDevice::new(seed, InjectedFaults::default());
        Pool::of(&device).unwrap().set_limit(0);
        let tensors = &tensors(hashes);
        let live = Arc::default();
        let path = folder.path().join("memory");
        let memory = |_| From::Memory;
        let expected = &written(tensors, &path, hashes, 1, (&device, &live), memory).unwrap();
        std::thread::scope(|scope| {
            for (save, threads) in [1, 2, 3, 8].into_iter().enumerate() {
                let (folder, device) = (&folder, &device);
                scope.spawn(move || {
                    let live: Arc<Live> = Arc::default();
                    let path = folder.path().join(save.to_string());
                    let found = written(tensors, &path, hashes, threads, (device, &live), |is| is);
                    assert!(found.unwrap() == *expected, "{threads} threads, {hashes:?}");
                    let Live(now, most) = &*live;
                    assert_eq!(now.load(Ordering::SeqCst), 0);
                    assert!(most.load(Ordering::SeqCst) <= threads, "copies at once");
                });
            }
        });
    }
}
