//! Model checks of calls whose workers come and go, under schedules that the checker chooses.
#![allow(clippy::unwrap_used)]

// Atomics of the standard library: the counters of the test are no part of the model.
use std::sync::atomic::{AtomicBool, AtomicUsize, Ordering};
use std::time::Duration;

use super::{Control, TICK, WorkerRange, run_while};
use crate::cancel::{Cancel as _, Never, POLL};
use crate::engine::plan::WorkQueue;
use crate::error::Error;
use crate::sys::sync::{ModelRules, Rng as _, check_model, thread, thread_rng};

fn any_range() -> WorkerRange {
    let max = thread_rng().gen_range(1..=4);
    WorkerRange { initial: thread_rng().gen_range(1..=max.min(2)), max, bytes: None }
}

/// The number of workers adapts to the model's clock, by which any wait may take long.
#[test]
fn each_piece_of_work_is_done_once_while_workers_come_and_go() {
    check_model(ModelRules { longest_timeout: TICK, spawn_may_fail: true }, || {
        const PIECES: usize = 8;
        let range = any_range();
        let queue =
            WorkQueue::new((0..PIECES).collect(), thread_rng().gen_range(1..=range.initial));
        let done = [const { AtomicUsize::new(0) }; PIECES];
        let (there, at_work) = (AtomicUsize::new(0), AtomicUsize::new(0));
        let work = |control: &Control<'_>, number| {
            there.fetch_add(1, Ordering::Relaxed);
            while !control.stopped() && !control.is_retired() {
                let Some(piece) = queue.next(number, |_| false) else { break };
                let now = at_work.fetch_add(1, Ordering::Relaxed);
                assert!(now < range.max, "{now} others of {range:?}");
                thread::sleep(Duration::from_millis(1));
                control.arrived(1000);
                done[piece].fetch_add(1, Ordering::Relaxed);
                at_work.fetch_sub(1, Ordering::Relaxed);
            }
            there.fetch_sub(1, Ordering::Relaxed);
            Ok(())
        };
        run_while(range, &Never, work, &mut || Ok(false)).unwrap();
        assert_eq!(there.into_inner(), 0);
        assert_eq!(done.map(AtomicUsize::into_inner), [1; PIECES]);
    });
}

/// No wait of a worker or of the calling thread times out, so a lost wake-up shows as a deadlock.
#[test]
fn fixed_number_of_workers_does_all_work_and_ends() {
    check_model(ModelRules { longest_timeout: Duration::ZERO, spawn_may_fail: true }, || {
        let queue = WorkQueue::new((0..3).collect(), 2);
        let done = AtomicUsize::new(0);
        let work = |_: &Control<'_>, number| {
            while queue.next(number, |_| false).is_some() {
                done.fetch_add(1, Ordering::Relaxed);
                thread::yield_now();
            }
            Ok(())
        };
        run_while(WorkerRange::fixed(3), &Never, work, &mut || Ok(false)).unwrap();
        assert_eq!(done.into_inner(), 3);
    });
}

#[test]
fn callers_error_takes_precedence_over_the_first_of_a_worker() {
    check_model(ModelRules { longest_timeout: POLL, spawn_may_fail: true }, || {
        let range = any_range();
        let interrupts = thread_rng().gen_range(0..8);
        let (asked, interrupted) = (AtomicUsize::new(0), AtomicBool::new(false));
        let cancel = || {
            if asked.fetch_add(1, Ordering::Relaxed) < interrupts {
                return Ok(());
            }
            interrupted.store(true, Ordering::Relaxed);
            Err(Error::Closed("by the caller".to_owned()))
        };
        let fails = thread_rng().gen_range(0..6);
        let (remaining, failed) = (AtomicUsize::new(40), AtomicBool::new(false));
        let work = |control: &Control<'_>, _| {
            while !control.is_retired() {
                control.check()?;
                let number = 40 - remaining.load(Ordering::Relaxed);
                if number == 40 {
                    break;
                }
                remaining.fetch_sub(1, Ordering::Relaxed);
                if number >= fails {
                    failed.store(true, Ordering::Relaxed);
                    return Err(Error::Closed("by a worker".to_owned()));
                }
                thread::sleep(Duration::from_millis(1));
            }
            Ok(())
        };
        let outcome = run_while(range, &cancel, work, &mut || Ok(false));
        let Err(Error::Closed(who)) = outcome else { panic!("{outcome:?}") };
        let callers = interrupted.into_inner();
        assert_eq!(who, if callers { "by the caller" } else { "by a worker" });
        assert!(callers || failed.into_inner());
        // Each worker notices the error between two pieces of work.
        assert!(remaining.into_inner() > 20);
    });
}
