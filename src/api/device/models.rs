//! Models of whole loads, under schedules that the model checker chooses: workers that start and
//! retire, their work queue, staging buffers and hashes together. Only the caller's thread polls;
//! all others have to be woken.
#![allow(unsafe_code)]
#![allow(clippy::unwrap_used, clippy::indexing_slicing)]

use std::sync::{Arc, OnceLock};
use std::time::Duration;

use super::*;
use crate::api::save_all::save;
use crate::api::save_options::{SaveOptions, SaveTensor};
use crate::cancel::Never;
use crate::codec::hash::Verify;
use crate::error::Error;
use crate::io::{Capabilities, Facts, ReadAt};
use crate::mem::Buffers;
use crate::mem::device::simulated::{FakeDevice, InjectedFaults};
use crate::mem::device::{Consumer, Device, DeviceBlocks, DeviceMemory};
use crate::mem::pinned::Pool;
use crate::sys::sync::{ModelRules, Rng as _, check_model, thread, thread_rng};

/// Bytes of a staging buffer.
const LEN: usize = 256;
/// Lengths of tensors: some are hashed at once, others come in several batches.
const LENS: [usize; 5] = [40, 900, 0, 300, 100];

/// A file like that of a server, from which more readers may read faster.
struct ServerLikeSource(&'static [u8], Facts);

impl ReadAt for ServerLikeSource {
    fn facts(&self) -> &Facts {
        &self.1
    }

    fn capabilities(&self) -> Capabilities {
        Capabilities {
            max_readers: 4,
            initial_readers: 2,
            max_auto_readers: 4,
            request_len: 16 << 20,
            merge_gap: 0,
            reader_memory: 0,
        }
    }

    fn read_at(
        &self,
        offset: u64,
        buffers: &mut Buffers<'_>,
        _cancel: &dyn Cancel,
    ) -> Result<usize> {
        thread::sleep(Duration::from_millis(1));
        let read = buffers.fill_from(&self.0[usize::try_from(offset).unwrap()..]);
        buffers.arrived(read as u64);
        Ok(read)
    }
}

fn tensor(number: usize) -> Vec<u8> {
    (0..LENS[number]).map(|at| u8::try_from((at * 7 + number) % 251).unwrap()).collect()
}

/// Returns a file of all tensors, which is written once.
fn file() -> &'static [u8] {
    static FILE: OnceLock<Vec<u8>> = OnceLock::new();
    if FILE.get().is_none() {
        let folder = tempfile::tempdir().unwrap();
        let path = folder.path().join("f.tensors");
        let tensors: Vec<Vec<u8>> = (0..LENS.len()).map(tensor).collect();
        let named = tensors.iter().enumerate().map(|(number, bytes)| {
            SaveTensor::new(&format!("t{number}"), &[bytes.len() as u64], &bytes[..]).unwrap()
        });
        save(&path, named.collect(), SaveOptions::default(), &Never).unwrap();
        let _ = FILE.set(std::fs::read(&path).unwrap());
    }
    FILE.get().unwrap()
}

fn load(interrupted: bool) {
    let len = Some(file().len() as u64);
    let facts = Facts { uri: "file".to_owned(), len, ..Facts::default() };
    let source = Arc::new(ServerLikeSource(file(), facts));
    let opened = TensorFile::from_source(source, 0, &Never).unwrap();
    let numbers: Vec<usize> = (0..LENS.len()).collect();
    let planned = DeviceLoad::new(&opened, &numbers, &[], true).unwrap();
    let mut memory: Vec<Vec<u8>> =
        planned.block_lens().iter().map(|&len| vec![0; usize::try_from(len).unwrap()]).collect();
    // SAFETY: each block has bytes of its own, which are not touched until the load has ended.
    let block = |block: &mut Vec<u8>| unsafe {
        DeviceMemory::new(block.as_mut_ptr().expose_provenance(), block.len())
    };
    let blocks = DeviceBlocks::from_memory(memory.iter_mut().map(block).collect()).unwrap();
    let device: Arc<dyn Device> = FakeDevice::new(7, InjectedFaults::default());
    let pool = Pool::new(LEN, 4, 2);
    let one = [DestinationDevice { device: &device, consumer: Consumer(0), pool: &pool }];
    let to = DeviceMemoryBlocks { devices: &one, memory: &blocks, direct_storage: false };
    // A thread that waits for a hash polls for cancellation. Locks of models never wake a thread
    // for a poll, so that a load that may be cancelled verifies nothing here.
    let kinds = if interrupted { 1 } else { 3 };
    let verify = [Verify::Nothing, Verify::Crc32, Verify::All][thread_rng().gen_range(0..kinds)];
    let options = LoadOptions { verify, ..LoadOptions::default() };
    let gives_up = interrupted && thread_rng().gen_bool(0.5);
    let cancel = || if gives_up { Err(Error::Cancelled) } else { Ok(()) };
    let outcome = planned.run(&to, &options, &Counters::default(), &cancel, &mut || Ok(false));
    let outcome =
        outcome.and_then(|(headers, streams)| Streams::hand_over_all(streams).map(|()| headers));
    pool.release();
    assert_eq!(pool.size(), 0, "all staging memory came back");
    match outcome {
        Err(Error::Cancelled) if gives_up => return,
        outcome => assert_eq!(outcome.unwrap().len(), LENS.len()),
    }
    drop(blocks);
    for (number, location) in planned.locations().into_iter().enumerate() {
        assert_eq!(memory[location.block], tensor(number), "tensor {number}");
    }
}

#[test]
fn every_tensor_is_loaded_completely() {
    check_model(
        ModelRules { longest_timeout: Duration::from_millis(5), spawn_may_fail: true },
        || load(false),
    );
}

#[test]
fn cancelled_load_returns_all_staging_memory() {
    check_model(
        ModelRules { longest_timeout: Duration::from_millis(50), spawn_may_fail: false },
        || load(true),
    );
}
