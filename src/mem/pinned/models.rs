//! Model checks of the pool, under schedules that the checker chooses. Only waits for copies time
//! out, so a lost wake-up shows as a deadlock.
#![allow(unsafe_code, clippy::unwrap_used)]

// Atomics of the standard library: the counters of the test are no part of the model.
use std::sync::atomic::{AtomicU32, AtomicUsize, Ordering};

use super::*;
use crate::cancel::Never;
use crate::error::Error;
use crate::mem::device::simulated::{FakeDevice, InjectedFaults};
use crate::mem::device::{Consumer, DeviceMemory};
use crate::sys::sync::{ModelRules, Rng as _, check_model, thread_rng};

const RULES: ModelRules = ModelRules { longest_timeout: MIN_SLEEP, spawn_may_fail: false };
const LEN: usize = 64;

fn device() -> Arc<dyn Device> {
    FakeDevice::new(7, InjectedFaults::default())
}

fn up_to(most: usize) -> usize {
    thread_rng().gen_range(1..=most)
}

/// Fills buffers, and checks that no other thread writes to them.
fn fill_and_check(lease: &mut StagingLease<'_>, mark: u8) {
    lease.buffers().into_iter().for_each(|buffer| buffer.fill(mark));
    thread::yield_now();
    assert!(lease.buffers().iter().all(|buffer| buffer.iter().all(|&byte| byte == mark)));
}

#[test]
fn every_reader_is_served_and_no_buffer_is_leased_twice() {
    check_model(RULES, || {
        let (device, pool) = (device(), Pool::new(LEN, 3, 1));
        thread::scope(|scope| {
            for mark in 1..=3 {
                let (device, pool) = (&device, &pool);
                scope.spawn(move || {
                    for _ in 0..2 {
                        fill_and_check(
                            &mut pool.enqueue(None).lease(up_to(3), device, &Never).unwrap(),
                            mark,
                        );
                        assert!(pool.size() <= 3 * LEN);
                    }
                });
            }
        });
        assert_eq!(pool.release(), pool.inner.len * 3);
    });
}

#[test]
fn calls_stay_within_their_shares_and_block_no_other_call() {
    check_model(RULES, || {
        let (device, pool) = (device(), Pool::new(LEN, 3, 1));
        let calls = [Some(Share::new(1)), Some(Share::new(2)), None];
        let held = [const { AtomicUsize::new(0) }; 3];
        thread::scope(|scope| {
            for (number, mark) in [0, 1, 1, 2].into_iter().zip(1..) {
                let (device, pool) = (&device, &pool);
                let (share, held) = (calls[number].as_ref(), &held[number]);
                scope.spawn(move || {
                    for _ in 0..2 {
                        // A request for more than the share is granted while the call holds none.
                        let buffers = up_to(2);
                        let mut lease = pool.enqueue(share).lease(buffers, device, &Never).unwrap();
                        let now = held.fetch_add(buffers, Ordering::Relaxed) + buffers;
                        let most = share.map_or(3, |share| share.max_buffers);
                        assert!(now <= most.max(buffers), "{now} of {most}");
                        fill_and_check(&mut lease, mark);
                        // Before the drop of the lease, after which other threads may take the
                        // buffers.
                        held.fetch_sub(buffers, Ordering::Relaxed);
                    }
                });
            }
        });
        assert!(pool.size() <= 3 * LEN);
    });
}

#[test]
fn a_cancelled_reader_loses_no_wake_up() {
    check_model(RULES, || {
        let (device, pool) = (device(), Pool::new(LEN, 2, 1));
        let share = Share::new(1);
        thread::scope(|scope| {
            for mark in 1..=4 {
                let (device, pool) = (&device, &pool);
                let share = (mark > 2).then_some(&share);
                scope.spawn(move || {
                    let (asked, patience) = (AtomicU32::new(0), thread_rng().gen_range(0..3));
                    let impatient = mark % 2 == 0;
                    let cancel = || match asked.fetch_add(1, Ordering::Relaxed) {
                        asked if impatient && asked >= patience => Err(Error::Cancelled),
                        _ => Ok(()),
                    };
                    match pool.enqueue(share).lease(up_to(2), device, &cancel) {
                        Ok(mut lease) => fill_and_check(&mut lease, mark),
                        Err(error) => {
                            assert!(impatient && matches!(error, Error::Cancelled), "{error}");
                        }
                    }
                });
            }
        });
        assert!(pool.state().waiting.is_empty());
    });
}

#[test]
fn buffers_come_back_after_their_copies() {
    check_model(RULES, || {
        let (device, pool) = (device(), Pool::new(LEN, 2, 1));
        let share = Share::new(1);
        let mut device_bytes = vec![0u8; 6 * LEN];
        // SAFETY: host memory, as that of the fake device; outlives the copies, and nothing else
        // uses it until they end.
        let memory = unsafe {
            DeviceMemory::new(device_bytes.as_mut_ptr().expose_provenance(), device_bytes.len())
        };
        let streams = [0, 1].map(|_| Arc::clone(&device).stream(Consumer(0)).unwrap());
        thread::scope(|scope| {
            for thread in 0..3u8 {
                let (device, pool, memory) = (&device, &pool, &memory);
                let stream = &streams[usize::from(thread % 2)];
                let share = (thread > 0).then_some(&share);
                scope.spawn(move || {
                    for part in 0..2u8 {
                        let number = 2 * thread + part;
                        let mut lease = pool.enqueue(share).lease(1, device, &Never).unwrap();
                        lease.buffers().into_iter().for_each(|buffer| buffer.fill(number + 1));
                        let at = usize::from(number) * LEN;
                        let copies = vec![((0, 0, LEN), memory, at)];
                        let upload = Upload { lease, copies, after: Vec::new() };
                        upload_all(&mut [upload], stream).unwrap();
                    }
                });
            }
        });
        streams.iter().for_each(|stream| stream.finish().unwrap());
        let of = |(chunk, number): (&[u8], u8)| chunk.iter().all(|&byte| byte == number);
        assert!(device_bytes.chunks(LEN).zip(1..).all(of));
        assert!(pool.size() <= 2 * LEN);
    });
}

#[test]
fn limit_may_change_and_memory_be_released_during_leases() {
    check_model(RULES, || {
        let (device, pool) = (device(), Pool::new(LEN, 4, 1));
        thread::scope(|scope| {
            for mark in 1..=2 {
                let (device, pool) = (&device, &pool);
                scope.spawn(move || {
                    for _ in 0..2 {
                        fill_and_check(
                            &mut pool.enqueue(None).lease(up_to(5), device, &Never).unwrap(),
                            mark,
                        );
                    }
                });
            }
            scope.spawn(|| {
                pool.set_limit(6 * LEN as u64);
                pool.release();
                pool.set_limit(4 * LEN as u64);
            });
        });
        pool.release();
        assert_eq!(pool.size(), 0);
    });
}

#[test]
fn waiting_reader_does_work_that_other_readers_need() {
    check_model(RULES, || {
        let (device, pool) = (device(), Pool::new(LEN, 2, 1));
        // Any idle thread may drop a filled lease, as with pieces that wait for their hash.
        let in_use: Mutex<Vec<StagingLease<'_>>> = Mutex::new(Vec::new());
        thread::scope(|scope| {
            for _ in 0..2 {
                let (device, pool, in_use) = (&device, &pool, &in_use);
                scope.spawn(move || {
                    let let_go = || Ok(in_use.lock().unwrap().pop().is_some());
                    for _ in 0..2 {
                        let ticket = pool.enqueue(None);
                        let lease =
                            ticket.lease_with_idle_work(1, device, &let_go, &Never).unwrap();
                        in_use.lock().unwrap().push(lease);
                    }
                    while let_go().unwrap() {}
                });
            }
        });
    });
}
