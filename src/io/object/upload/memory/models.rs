//! The memory of an upload under schedules that are chosen. No wait ends by itself.
#![allow(clippy::unwrap_used)]

use std::collections::VecDeque;
use std::time::Duration;

use super::*;
use crate::error::Error;
use crate::sys::sync::{ModelRules, Rng as _, check_model, thread, thread_rng};

/// Complete parts that no thread sends yet.
type ReadyParts = Mutex<VecDeque<Vec<u8>>>;

/// Sends what is complete, as an upload does; some requests are given up with their memory.
fn send_ready(memory: &PartMemory, ready: &ReadyParts, may_fail: bool) -> Result<()> {
    loop {
        let next = ready.lock().unwrap().pop_front();
        let Some(part) = next else { return Ok(()) };
        let sending = memory.sending();
        thread::yield_now();
        if may_fail && thread_rng().gen_ratio(1, 4) {
            return Err(Error::Cancelled);
        }
        let memory_is_lost = thread_rng().gen_ratio(1, 4);
        sending.done((!memory_is_lost).then_some(part));
    }
}

fn write(memory: &PartMemory, ready: &ReadyParts, parts: usize, may_fail: bool) -> Result<()> {
    for number in 0..parts {
        // Parts grow in the course of a file.
        let len = if number < parts / 2 { 10 } else { 20 };
        let part = memory.take(len, &|| send_ready(memory, ready, may_fail))?;
        assert_eq!(part.len(), len);
        thread::yield_now();
        memory.complete();
        ready.lock().unwrap().push_back(part);
    }
    send_ready(memory, ready, may_fail)
}

#[test]
fn writers_never_deadlock_and_the_limit_holds() {
    check_model(ModelRules { longest_timeout: Duration::ZERO, spawn_may_fail: false }, || {
        let writers = thread_rng().gen_range(1..=3);
        let parts = thread_rng().gen_range(1..=6);
        let memory = PartMemory::new(UploadBudget { writers, bytes: None, parts, object: 0 });
        let ready = ReadyParts::default();
        thread::scope(|scope| {
            for _ in 0..3 {
                scope.spawn(|| write(&memory, &ready, 4, false).unwrap());
            }
        });
        let state = memory.state();
        assert_eq!(state.sending, 0);
        // A part that is not complete has its memory in any case.
        assert!(state.held <= parts + 2, "{} of {parts}", state.held);
        assert_eq!(state.held, state.free.len());
    });
}

#[test]
fn a_failing_writer_blocks_no_other_writer() {
    check_model(ModelRules { longest_timeout: Duration::ZERO, spawn_may_fail: false }, || {
        let memory = PartMemory::new(UploadBudget { writers: 2, bytes: None, parts: 2, object: 0 });
        let ready = ReadyParts::default();
        thread::scope(|scope| {
            for _ in 0..3 {
                // The error is that of one writer; others find out by themselves.
                scope.spawn(|| drop(write(&memory, &ready, 3, true)));
            }
        });
        assert_eq!(memory.state().sending, ready.lock().unwrap().len());
    });
}
