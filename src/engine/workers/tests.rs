//! Workers on threads of the tests.

use super::*;
use crate::cancel::Never;

#[test]
fn a_silent_source_gets_as_many_as_it_may_have() {
    let most = 9;
    let started = AtomicUsize::new(0);
    let work = |control: &Control<'_>, number| {
        assert!(number < most);
        started.fetch_add(1, Ordering::Relaxed);
        while started.load(Ordering::Relaxed) < most && !control.stopped() {
            thread::sleep(TICK);
        }
        Ok(())
    };
    run_adapting(WorkerRange { first: 2, most, bytes: None }, &Never, work).unwrap();
    assert_eq!(started.into_inner(), most);
}

#[test]
fn the_last_worker_is_never_too_many() {
    let shared = Shared::new(WorkerRange { first: 3, most: 8, bytes: None }, &Never, false);
    *shared.count() = Count { running: 3, wanted: 0 };
    let workers = [shared.control(), shared.control(), shared.control()];
    workers.iter().for_each(|worker| worker.arrived(1));
    let told = workers.each_ref().map(Control::is_retired);
    assert_eq!(told, [true, true, false]);
    assert_eq!(shared.count().running, 1);
    assert_eq!(shared.heard.load(Ordering::Relaxed), 1);
}

#[test]
fn no_thread_is_started_without_work_or_when_it_is_time_to_stop() {
    let range = WorkerRange { first: 2, most: 64, bytes: None };
    for (ending, stopped, missing) in [(false, false, 4), (true, false, 0), (false, true, 0)] {
        let shared = Shared::new(range, &Never, false);
        let mut watch = Watch::new(range, &shared);
        // Without a byte for long enough that the controller wants more workers.
        watch.begun = watch.begun.checked_sub(Duration::from_secs(1)).unwrap();
        shared.ending.store(ending, Ordering::Relaxed);
        shared.stopped.store(stopped, Ordering::Relaxed);
        assert_eq!(watch.missing(), missing);
    }
}

#[test]
fn the_first_error_ends_all_and_is_told() {
    let range = WorkerRange { first: 3, most: 6, bytes: None };
    let work = |control: &Control<'_>, number| {
        if number == 1 {
            return Err(Error::Closed("on purpose".to_owned()));
        }
        while !control.stopped() {
            thread::sleep(TICK);
        }
        control.check()
    };
    let outcome = run_adapting(range, &Never, work);
    assert!(matches!(outcome, Err(Error::Closed(_))));
}
