//! A model of detached work under chosen schedules.
#![allow(clippy::unwrap_used)]

// Counters of the test, which are not part of the model.
use std::sync::atomic::{AtomicU32, Ordering};

use super::*;
use crate::sys::sync::{ModelRules, Rng as _, check_model, thread_rng};

#[test]
fn detached_work_runs_at_most_once_even_if_cancelled() {
    for longest_timeout in [Duration::ZERO, POLL] {
        check_model(ModelRules { longest_timeout, spawn_may_fail: true }, || {
            let (done, asked) = (Arc::new(AtomicU32::new(0)), AtomicU32::new(0));
            let gives_up_after = thread_rng().gen_range(0..4);
            let cancel = || match asked.fetch_add(1, Ordering::Relaxed) {
                asked if asked < gives_up_after => Ok(()),
                _ => Err(Error::Cancelled),
            };
            let count = Arc::clone(&done);
            let outcome = run_detached(&cancel, move || {
                thread::yield_now();
                count.fetch_add(1, Ordering::Relaxed)
            });
            match outcome {
                Ok(before) => assert_eq!((before, done.load(Ordering::Relaxed)), (0, 1)),
                Err(error) => {
                    assert!(matches!(error, Error::Cancelled));
                    assert!(done.load(Ordering::Relaxed) <= 1);
                }
            }
        });
    }
}
