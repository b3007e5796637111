//! Tests of the window, without threads.
#![allow(clippy::unwrap_used)]

use super::*;

fn deliver(window: &Window, tensor: usize) {
    let (memory, copy_events) = (ReadyMemory::Zeros, CopyEvents::new());
    window.deliver_all(vec![WaitingTensor { tensor, memory, copy_events }]).unwrap();
}

fn admits(window: &Window, first: usize, last: usize) -> bool {
    window.admits(first, last)
}

fn take(window: &Window) -> Vec<usize> {
    let items = window.take(Duration::ZERO).unwrap();
    items.into_iter().flatten().map(|item| item.tensor).collect()
}

#[test]
fn admitted_bytes_stay_within_the_budget() {
    let len = 2 * SMALL;
    let window = Window::new(vec![len; 5], 2 * len, Order::File, false);
    assert!(admits(&window, 0, 0) && admits(&window, 1, 1) && !admits(&window, 2, 2));
    deliver(&window, 1);
    assert_eq!(take(&window), [0usize; 0]);
    deliver(&window, 0);
    assert_eq!(take(&window), [0]);
    assert!(admits(&window, 2, 2) && !admits(&window, 3, 3));
    assert_eq!(take(&window), [1]);
    assert!(admits(&window, 3, 3));
    assert_eq!(window.delivered(), [true, true, false, false, false]);
}

#[test]
fn batch_beyond_the_budget_is_admitted_when_nothing_else_is_outstanding() {
    for allocates in [false, true] {
        let window = Window::new(vec![10, 90, 1], 50, Order::File, allocates);
        let allocate = || {
            while let Some(tensors) = window.to_allocate() {
                window.allocated(tensors.len());
            }
        };
        allocate();
        // Tensors 0 and 1 are of one batch.
        admits(&window, 0, 1);
        allocate();
        assert!(admits(&window, 0, 1), "{allocates}");
        assert!(!admits(&window, 2, 2));
        deliver(&window, 0);
        deliver(&window, 1);
        assert_eq!(take(&window), [0]);
        assert_eq!(take(&window), [1]);
        allocate();
        assert!(admits(&window, 2, 2));
    }
}

#[test]
fn small_tensors_come_in_groups_and_count_until_the_next_call() {
    let window = Window::new(vec![1; 64], 32, Order::Ready, false);
    assert!(admits(&window, 31, 31) && !admits(&window, 32, 32));
    (0..32).rev().for_each(|tensor| deliver(&window, tensor));
    assert_eq!(take(&window), [31, 30]);
    assert!(!admits(&window, 32, 32));
    assert_eq!(take(&window), [29, 28]);
    assert!(admits(&window, 33, 33) && !admits(&window, 34, 34));
}

#[test]
fn batch_across_two_tensors_is_admitted() {
    for order in [Order::File, Order::Ready] {
        let window = Window::new(vec![5, 60, 60, 60], 100, order, false);
        assert!(admits(&window, 0, 0) && admits(&window, 1, 1));
        // The end of tensor 1 comes with tensor 2; tensor 0 is still to be taken.
        assert!(!admits(&window, 1, 2));
        deliver(&window, 0);
        assert_eq!(take(&window), [0]);
        assert!(admits(&window, 1, 2) && !admits(&window, 2, 3));
    }
}

#[test]
fn two_requesters_wait_for_each_other_only_in_file_order() {
    let window = Window::new(vec![6; 4], 10, Order::File, false);
    assert!(admits(&window, 0, 0));
    assert!(!window.admits(1, 1) && !admits(&window, 2, 2));
    deliver(&window, 0);
    assert_eq!(take(&window), [0]);
    // Tensor 1 is granted to whichever asks next, and tensor 2 is not.
    assert!(!admits(&window, 2, 2) && window.admits(1, 1));
    deliver(&window, 1);
    assert_eq!(take(&window), [1]);
    assert!(admits(&window, 2, 2) && !window.admits(3, 3));
}

#[test]
fn tensors_taken_before_they_are_granted_do_not_count() {
    let window = Window::new(vec![6, 6, 6], 10, Order::Ready, false);
    deliver(&window, 1);
    assert_eq!(take(&window), [1]);
    assert!(admits(&window, 0, 0) && !admits(&window, 2, 2));
    deliver(&window, 0);
    assert_eq!(take(&window), [0]);
    assert!(admits(&window, 2, 2));
    assert_eq!(window.state().outstanding, 6);
}

#[test]
fn failed_allocation_is_an_error_only_if_nothing_will_be_freed() {
    let window = Window::new(vec![10, 10, 10], 30, Order::File, true);
    assert!(window.allocation_failed(3), "one by one");
    assert_eq!(window.to_allocate(), Some(0..1));
    window.allocated(1);
    assert!(admits(&window, 0, 0) && !admits(&window, 1, 1));
    assert!(window.allocation_failed(1));
    assert_eq!(window.to_allocate(), None);
    deliver(&window, 0);
    assert_eq!(take(&window), [0]);
    assert_eq!(window.to_allocate(), Some(1..2));
    assert!(!window.allocation_failed(1));
}

#[test]
fn an_error_comes_after_the_tensors_before_it() {
    let window = Window::new(vec![SMALL; 3], 9 * SMALL, Order::File, false);
    deliver(&window, 0);
    deliver(&window, 2);
    window.end(Err(Error::Cancelled));
    assert_eq!(take(&window), [0]);
    assert!(matches!(window.take(Duration::ZERO), Err(Error::Cancelled)));
    assert!(matches!(window.take(Duration::ZERO), Err(Error::Closed(_))));
}
