//! Tests that hashes and decryption, which wait for bytes, and bytes, which wait for memory, never
//! deadlock.

use super::*;

#[test]
fn short_load_pins_at_most_its_bytes_and_one_buffer() {
    const LEN: usize = 4 << 20;
    for (len, most) in [(100_000, 2), (5_000_000, 3)] {
        let files = file(&[len], SaveOptions::default());
        let source = Arc::new(FileSource::open(&files.path).unwrap());
        let opened = TensorFile::from_source(source, 0, &Never).unwrap();
        let planned = DeviceLoad::new(&opened, &[0], &[], false).unwrap();
        let memory = TestMemory::new(&planned.block_lens());
        let device: Arc<dyn Device> = FakeDevice::new(3, InjectedFaults::default());
        let pool = Pool::new(LEN, 64, 16);
        let one = [DestinationDevice { device: &device, consumer: Consumer(0), pool: &pool }];
        let to =
            DeviceMemoryBlocks { devices: &one, memory: &memory.blocks, direct_storage: false };
        let options = LoadOptions { readers: Some(4), ..LoadOptions::default() };
        let (_, streams) =
            planned.run(&to, &options, &Counters::default(), &Never, &mut || Ok(false)).unwrap();
        Streams::hand_over_all(streams).unwrap();
        assert!(pool.size() <= most * LEN, "{} bytes are pinned for {len}", pool.size());
    }
}

/// Lengths of medium tensors: the end of each shares a batch with the beginning of a larger one.
/// They are just long enough to be cut.
const NEIGHBOURS: [usize; 6] = [17 << 18, 21 << 18, 17 << 18, 23 << 18, 17 << 18, 20 << 18];

#[test]
fn hashes_and_staging_buffers_never_deadlock() {
    let files = file(&NEIGHBOURS, SaveOptions::default());
    for (readers, devices) in [(1, 1), (2, 1), (5, 1), (1, 2), (2, 2), (5, 3)] {
        let schedule = LoadSchedule {
            seed: 7,
            units: 4,
            // Each tensor needs more than there are.
            buffer_len: 1 << 20,
            readers,
            verify: Verify::All,
            separate_memory: false,
            late: false,
            direct_storage: false,
            pipe: false,
            selection: (0..NEIGHBOURS.len()).collect(),
            devices,
            faults: InjectedFaults::default(),
            interrupted: false,
            flipped: None,
        };
        load(&files, &schedule, None).unwrap();
    }
}

#[test]
fn decryption_never_waits_for_a_later_header() {
    let key = Key::new(&[5; 32]).unwrap();
    let encryption = EncryptionOptions { key: key.clone(), derivation: None, manifest: false };
    let options = SaveOptions { encryption: Some(Arc::new(encryption)), ..SaveOptions::default() };
    let files = file(&NEIGHBOURS, options);
    let file = TensorFile::open(&files.path).unwrap();
    let file = file.decrypt(Arc::new(DecryptionOptions::new(Secret::Key(key))), &Never).unwrap();
    let all: Vec<usize> = (0..NEIGHBOURS.len()).collect();
    for readers in [1, 2, 5] {
        let options =
            LoadOptions { readers: Some(readers), verify: Verify::All, ..LoadOptions::default() };
        let loaded = crate::load(&file, &all, &options, &Never).unwrap();
        for (tensor, expected) in loaded.iter().zip(&files.tensors) {
            assert!(tensor.bytes() == *expected);
        }
    }
}
