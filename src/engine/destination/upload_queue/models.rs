//! Model check of the queue: every upload reaches the device, whichever thread submits it.
#![allow(unsafe_code, clippy::unwrap_used)]

use super::*;
use crate::cancel::Never;
use crate::mem::device::simulated::{FakeDevice, InjectedFaults};
use crate::mem::device::{Consumer, Device, DeviceMemory};
use crate::mem::pinned::Pool;
use crate::sys::sync::{ModelRules, check_model, thread};

const RULES: ModelRules =
    ModelRules { longest_timeout: std::time::Duration::from_micros(20), spawn_may_fail: false };
const LEN: usize = 64;

#[test]
fn every_upload_is_submitted() {
    check_model(RULES, || {
        let device: Arc<dyn Device> = FakeDevice::new(7, InjectedFaults::default());
        let pool = Pool::new(LEN, 6, 6);
        let mut device_bytes = vec![0u8; 6 * LEN];
        // SAFETY: host memory, as that of the fake device; outlives the copies, and nothing else
        // uses it until they end.
        let memory = unsafe {
            DeviceMemory::new(device_bytes.as_mut_ptr().expose_provenance(), device_bytes.len())
        };
        let streams = Streams::open(&device, Consumer(0)).unwrap();
        let queue = UploadQueue::new(&streams);
        thread::scope(|scope| {
            for thread in 0..3u8 {
                let (device, pool, memory, queue) = (&device, &pool, &memory, &queue);
                scope.spawn(move || {
                    for part in 0..2u8 {
                        let number = 2 * thread + part;
                        let mut lease = pool.enqueue(None).lease(1, device, &Never).unwrap();
                        lease.buffers().into_iter().for_each(|buffer| buffer.fill(number + 1));
                        let copies = vec![((0, 0, LEN), memory, usize::from(number) * LEN)];
                        let mut upload = Upload { lease, copies, after: Vec::new() };
                        match thread {
                            0 => drop(queue.submit_now(&mut upload).unwrap()),
                            _ => queue.add(upload).unwrap(),
                        }
                    }
                });
            }
        });
        assert!(unpoisoned(queue.waiting.lock()).is_empty());
        streams.finish().unwrap();
        let of = |(chunk, number): (&[u8], u8)| chunk.iter().all(|&byte| byte == number);
        assert!(device_bytes.chunks(LEN).zip(1..).all(of));
    });
}
