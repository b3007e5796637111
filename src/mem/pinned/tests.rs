//! Tests of the pool with the fake device.
#![allow(unsafe_code)]

use super::*;
use crate::cancel::Never;
use crate::error::Error;
use crate::mem::device::simulated::{FakeDevice, InjectedFaults};
use crate::mem::device::{Consumer, DeviceMemory};

/// Number of buffers in flight that saturates the bus.
const SATURATING: usize = 16;

fn device(faults: InjectedFaults) -> (Arc<FakeDevice>, Arc<dyn Device>) {
    let fake = FakeDevice::new(7, faults);
    (Arc::clone(&fake), fake)
}

/// Begins the copy of some bytes of a lease.
fn upload<'d>(
    lease: StagingLease<'d>,
    stream: &Arc<dyn crate::mem::device::Stream>,
    from: (usize, usize, usize),
    (to, offset): (&'d DeviceMemory, usize),
) -> Upload<'d> {
    let mut upload = Upload { lease, copies: vec![(from, to, offset)], after: Vec::new() };
    upload_all(std::slice::from_mut(&mut upload), stream).unwrap();
    upload
}

#[test]
fn the_pool_grows_as_needed_and_releases_unused_memory() {
    let (fake, device) = device(InjectedFaults::default());
    let pool = Pool::new(4096, 20, SATURATING);
    assert_eq!(pool.size(), 0);
    let first = pool.enqueue(None).lease(3, &device, &Never).unwrap();
    assert_eq!(pool.size(), 8 * 4096);
    let second = pool.enqueue(None).lease(17, &device, &Never).unwrap();
    assert_eq!((pool.size(), fake.pinned()), (20 * 4096, 3));
    assert!(pool.try_lease(None).is_none());
    drop(second);
    // The first slab is still in use.
    assert_eq!(pool.release(), 12 * 4096);
    drop(first);
    assert_eq!((pool.release(), pool.size(), fake.pinned()), (8 * 4096, 0, 0));
    // A single request for more than the limit is granted.
    assert!(pool.enqueue(None).lease(21, &device, &Never).is_ok());
}

#[test]
#[cfg_attr(miri, ignore = "asks for more memory than Miri has")]
fn missing_memory_is_an_error_only_if_it_is_needed() {
    let (_, device) = device(InjectedFaults::default());
    let pool = Pool::new(1 << 46, 4, SATURATING);
    let refused = pool.enqueue(None).lease(1, &device, &Never);
    assert!(matches!(refused, Err(Error::OutOfMemory { .. })));
    assert_eq!(pool.size(), 0);
}

#[test]
fn waiting_readers_are_served_in_ticket_order_or_cancelled() {
    let (_, device) = device(InjectedFaults::default());
    let pool = Pool::new(64, 2, SATURATING);
    let all = pool.enqueue(None).lease(2, &device, &Never).unwrap();
    assert!(pool.enqueue(None).lease(1, &device, &|| Err(Error::Cancelled)).is_err());
    let (first, second) = (pool.enqueue(None), pool.enqueue(None));
    thread::scope(|scope| {
        let later = scope.spawn(|| second.lease(1, &device, &Never).is_ok());
        let sooner = scope.spawn(|| first.lease(2, &device, &Never).is_ok());
        drop(all);
        assert!(sooner.join().unwrap() && later.join().unwrap());
    });
}

#[test]
fn buffers_are_reused_only_after_their_copies() {
    let (fake, device) = device(InjectedFaults::default());
    let pool = Pool::new(256, 2, SATURATING);
    let stream = Arc::clone(&device).stream(Consumer(0)).unwrap();
    let mut device_bytes = vec![0u8; 256 * 200];
    // SAFETY: host memory, as that of the fake device; outlives the copies, and nothing else uses
    // it until they end.
    let memory = unsafe {
        DeviceMemory::new(device_bytes.as_mut_ptr().expose_provenance(), device_bytes.len())
    };
    for number in 0..200usize {
        let mut lease = pool.enqueue(None).lease(1, &device, &Never).unwrap();
        lease.buffers()[0].fill(u8::try_from(number).unwrap());
        let mut upload = upload(lease, &stream, (0, 0, 256), (&memory, number * 256));
        assert!(upload.lease.buffers().is_empty(), "nobody touches what is being copied");
    }
    stream.finish().unwrap();
    assert_eq!(fake.under_way(), 0);
    assert!(device_bytes.chunks(256).zip(0u8..).all(|(chunk, n)| chunk.iter().all(|&b| b == n)));
}

#[test]
fn a_reader_waits_for_the_bus_instead_of_taking_more_memory() {
    let (_, device) = device(InjectedFaults::default());
    let pool = Pool::new(64, 60, SATURATING);
    let stream = Arc::clone(&device).stream(Consumer(0)).unwrap();
    let mut device_bytes = [0u8; 64 * SATURATING];
    // SAFETY: host memory, as that of the fake device; outlives the copies, and nothing else uses
    // it until they end.
    let memory = unsafe {
        DeviceMemory::new(device_bytes.as_mut_ptr().expose_provenance(), device_bytes.len())
    };
    let lease = pool.enqueue(None).lease(SATURATING, &device, &Never).unwrap();
    let copies = (0..SATURATING).map(|buffer| ((buffer, 0, 64), &memory, buffer * 64)).collect();
    upload_all(&mut [Upload { lease, copies, after: Vec::new() }], &stream).unwrap();
    let sizes = pool.size();
    assert!(pool.enqueue(None).lease(1, &device, &Never).is_ok());
    assert_eq!(pool.size(), sizes);
}

#[test]
fn lease_does_not_wait_for_later_copies() {
    let (fake, device) = device(InjectedFaults::default());
    let pool = Pool::new(64, 8, SATURATING);
    let stream = Arc::clone(&device).stream(Consumer(0)).unwrap();
    let mut device_bytes = [7u8; 64];
    // SAFETY: host memory, as that of the fake device; outlives the copies, and nothing else uses
    // it until they end.
    let memory = unsafe { DeviceMemory::new(device_bytes.as_mut_ptr().expose_provenance(), 64) };
    let lease = || pool.enqueue(None).lease(1, &device, &Never).unwrap();
    let (mut first, mut later) = (lease(), lease());
    first.download(&stream, (0, 0, 64), &memory, 0).unwrap();
    first.record_end().unwrap();
    for _ in 0..50 {
        later.download(&stream, (0, 0, 1), &memory, 0).unwrap();
    }
    first.wait(&Never).unwrap();
    assert!(fake.under_way() > 0 && first.buffers()[0] == [7; 64]);
    stream.finish().unwrap();
}

#[test]
fn downloaded_bytes_are_valid_after_the_wait() {
    let (_, device) = device(InjectedFaults::default());
    let pool = Pool::new(64, 1, SATURATING);
    let stream = Arc::clone(&device).stream(Consumer(0)).unwrap();
    let mut device_bytes = *b"0123456789";
    // SAFETY: host memory, as that of the fake device; outlives the copies, and nothing else uses
    // it until they end.
    let memory = unsafe { DeviceMemory::new(device_bytes.as_mut_ptr().expose_provenance(), 10) };
    let mut lease = pool.enqueue(None).lease(1, &device, &Never).unwrap();
    lease.download(&stream, (0, 5, 3), &memory, 4).unwrap();
    assert!(lease.download(&stream, (0, 5, 3), &memory, 8).is_err(), "beyond its end");
    assert!(lease.download(&stream, (0, 62, 3), &memory, 0).is_err(), "beyond the buffer");
    lease.wait(&Never).unwrap();
    assert_eq!(lease.buffers()[0][5..8], *b"456");
}

#[test]
fn memory_that_cannot_be_pinned_is_used_unpinned() {
    let (fake, device) = device(InjectedFaults { pin: true, ..InjectedFaults::default() });
    let pool = Pool::new(64, 1, SATURATING);
    drop(pool.enqueue(None).lease(1, &device, &Never).unwrap());
    assert!(pool.is_pageable());
    assert_eq!((fake.pinned(), pool.release()), (0, 64));
    assert!(!pool.is_pageable());
}

#[test]
fn buffers_of_a_lost_device_are_never_reused() {
    let (_, device) = device(InjectedFaults { lost: Some(1), ..InjectedFaults::default() });
    let pool = Pool::new(64, 1, SATURATING);
    let stream = Arc::clone(&device).stream(Consumer(0)).unwrap();
    let mut device_bytes = [0u8; 64];
    // SAFETY: host memory, as that of the fake device; outlives the copies, and nothing else uses
    // it until they end.
    let memory = unsafe { DeviceMemory::new(device_bytes.as_mut_ptr().expose_provenance(), 64) };
    let lease = pool.enqueue(None).lease(1, &device, &Never).unwrap();
    drop(upload(lease, &stream, (0, 0, 64), (&memory, 0)));
    let lost = pool.enqueue(None).lease(1, &device, &Never);
    assert!(matches!(lost, Err(Error::Device { .. })));
    // The next lease gets fresh memory.
    assert!(pool.enqueue(None).lease(1, &device, &Never).is_ok());
    stream.finish().unwrap();
}

/// A device that pins memory only if two threads ask for it at the same time.
#[derive(Default)]
struct PinsInPairs {
    pinning: Mutex<usize>,
    changed: std::sync::Condvar,
}

impl PinsInPairs {
    /// Waits until `count` threads have asked; false if they have not after a long time.
    fn asked(&self, count: usize) -> bool {
        let (pinning, limit) = (self.pinning.lock().unwrap(), Duration::from_secs(60));
        let few = |pinning: &mut usize| *pinning < count;
        !self.changed.wait_timeout_while(pinning, limit, few).unwrap().1.timed_out()
    }
}

impl Device for PinsInPairs {
    fn name(&self) -> &str {
        "pairs"
    }

    unsafe fn pin(&self, _: *mut u8, _: usize) -> bool {
        *self.pinning.lock().unwrap() += 1;
        self.changed.notify_all();
        self.asked(2)
    }

    unsafe fn unpin(&self, _: *mut u8) {}

    fn stream(self: Arc<Self>, _: Consumer) -> Result<Arc<dyn crate::mem::device::Stream>> {
        Err(Error::Bug("no copies".to_owned()))
    }

    fn record_event(self: Arc<Self>, _: Consumer) -> Result<Arc<dyn crate::mem::device::Event>> {
        Err(Error::Bug("no copies".to_owned()))
    }
}

/// Takes two tickets; the ticket with the index `earlier` asks for memory first.
fn two_readers_pin_at_once(earlier: usize) {
    let pairs = Arc::new(PinsInPairs::default());
    let device: Arc<dyn Device> = pairs.clone();
    let pool = Pool::new(64, 16, SATURATING);
    let mut tickets = vec![pool.enqueue(None), pool.enqueue(None)];
    let (first, both) = (tickets.remove(earlier), std::sync::Barrier::new(2));
    let second = tickets.remove(0);
    let lease = |ticket: QueueTicket<'_>| {
        let lease = ticket.lease(8, &device, &Never).unwrap();
        both.wait();
        drop(lease);
    };
    thread::scope(|scope| {
        scope.spawn(|| lease(first));
        assert!(pairs.asked(1));
        scope.spawn(|| lease(second));
    });
    assert!(!pool.is_pageable(), "one after another");
    assert_eq!(pool.size(), 16 * 64);
}

#[test]
fn readers_pin_memory_concurrently() {
    two_readers_pin_at_once(0);
    two_readers_pin_at_once(1);
}

#[test]
fn a_call_without_remaining_share_blocks_no_other_call() {
    let (_, device) = device(InjectedFaults::default());
    let pool = Pool::new(64, 8, SATURATING);
    let share = Share::new(1);
    let held = pool.enqueue(Some(&share)).lease(1, &device, &Never).unwrap();
    let (full, next) = (pool.enqueue(Some(&share)), pool.enqueue(Some(&share)));
    let waits = || Err(Error::Cancelled);
    assert!(pool.enqueue(None).lease_with_idle_work(1, &device, &waits, &Never).is_ok());
    let other = Share::new(1);
    assert!(pool.enqueue(Some(&other)).lease_with_idle_work(1, &device, &waits, &Never).is_ok());
    assert!(pool.try_lease(Some(&other)).is_some() && pool.try_lease(None).is_some());
    assert!(pool.try_lease(Some(&share)).is_none(), "before those of its own call");
    drop(held);
    // The tickets of one call are served in order, also once its share allows more.
    assert!(next.lease_with_idle_work(1, &device, &waits, &Never).is_err());
    assert!(pool.enqueue(None).lease_with_idle_work(1, &device, &waits, &Never).is_err());
    assert!(full.lease_with_idle_work(1, &device, &waits, &Never).is_ok());
}
