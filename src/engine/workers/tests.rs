//! Workers on threads of the tests.

use super::*;
use crate::cancel::Never;

#[test]
fn silent_source_gets_the_maximum_of_workers() {
    let max = 9;
    let started = AtomicUsize::new(0);
    let work = |control: &Control<'_>, number| {
        assert!(number < max);
        started.fetch_add(1, Ordering::Relaxed);
        while started.load(Ordering::Relaxed) < max && !control.stopped() {
            thread::sleep(TICK);
        }
        Ok(())
    };
    let range = WorkerRange { initial: 2, max, bytes: None };
    run_while(range, &Never, work, &mut || Ok(false)).unwrap();
    assert_eq!(started.into_inner(), max);
}

#[test]
fn last_worker_is_never_retired() {
    let pool = WorkerPool::new(WorkerRange { initial: 3, max: 8, bytes: None }, &Never, false);
    *pool.count() = WorkerCount { running: 3, wanted: 0 };
    let workers = [pool.control(), pool.control(), pool.control()];
    workers.iter().for_each(|worker| worker.arrived(1));
    let retired = workers.each_ref().map(Control::is_retired);
    assert_eq!(retired, [true, true, false]);
    assert_eq!(pool.count().running, 1);
    assert_eq!(pool.receiving.load(Ordering::Relaxed), 1);
}

#[test]
fn no_worker_is_started_when_ending_or_stopped() {
    let range = WorkerRange { initial: 2, max: 64, bytes: None };
    for (ending, stopped, missing) in [(false, false, 4), (true, false, 0), (false, true, 0)] {
        let pool = WorkerPool::new(range, &Never, false);
        let mut supervisor = Supervisor::new(range, &pool);
        // Without a byte for long enough that the controller wants more workers.
        supervisor.started = supervisor.started.checked_sub(Duration::from_secs(1)).unwrap();
        pool.ending.store(ending, Ordering::Relaxed);
        pool.stopped.store(stopped, Ordering::Relaxed);
        assert_eq!(supervisor.workers_to_start(), missing);
    }
}

#[test]
fn first_error_stops_all_workers_and_is_returned() {
    let range = WorkerRange { initial: 3, max: 6, bytes: None };
    let work = |control: &Control<'_>, number| {
        if number == 1 {
            return Err(Error::Closed("on purpose".to_owned()));
        }
        while !control.stopped() {
            thread::sleep(TICK);
        }
        control.check()
    };
    let outcome = run_while(range, &Never, work, &mut || Ok(false));
    assert!(matches!(outcome, Err(Error::Closed(_))));
}
