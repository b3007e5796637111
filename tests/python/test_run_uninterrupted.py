"""`run_uninterrupted` tells its work of a signal, instead of interrupting it."""

import _thread
import gc
import os
import signal
import threading
import time
import weakref

import pytest
from tensorizer.group.rendezvous import run_uninterrupted


def interrupt_later(how, after=0.2):
    """Interrupt the main thread a while later."""
    timer = threading.Timer(after, how)
    timer.start()
    return timer


HOW = {
    "a signal": lambda: os.kill(os.getpid(), signal.SIGINT),
    "a call": _thread.interrupt_main,
}


@pytest.mark.parametrize("how", HOW.values(), ids=HOW)
def test_work_is_told_of_an_interruption_and_ends(how):
    done = []

    def work(leaving):
        done.append(leaving.wait(20))
        time.sleep(0.3)
        done.append("all of it")

    timer = interrupt_later(how)
    interruption, failure = run_uninterrupted(work)
    timer.join()
    assert isinstance(interruption, KeyboardInterrupt)
    assert failure is None
    assert done == [True, "all of it"]


def test_a_second_interruption_is_raised_at_once():
    end = threading.Event()
    timers = [interrupt_later(HOW["a signal"], after) for after in (0.2, 0.5)]
    begun = time.monotonic()
    with pytest.raises(KeyboardInterrupt):
        run_uninterrupted(lambda leaving: end.wait(20))
    assert time.monotonic() - begun < 10
    end.set()
    for timer in timers:
        timer.join()


def test_a_failure_is_returned_and_keeps_no_objects_alive():
    class Large:
        pass

    large = Large()
    gone = weakref.ref(large)

    def work(leaving, large=large):
        raise OSError(5, "Input/output error")

    gc.disable()
    try:
        interruption, failure = run_uninterrupted(work)
        assert interruption is None
        assert isinstance(failure, OSError)
        del failure, large, work
        assert gone() is None
    finally:
        gc.enable()


def test_work_runs_on_the_caller_if_no_thread_can_start(monkeypatch):
    def refuse(*_):
        raise RuntimeError("can't start new thread")

    monkeypatch.setattr(_thread, "start_new_thread", refuse)
    where = []
    assert run_uninterrupted(lambda leaving: where.append(threading.current_thread())) == (
        None,
        None,
    )
    assert where == [threading.main_thread()]


def test_an_interruption_before_there_is_a_thread(monkeypatch):
    def interrupted(*_):
        raise KeyboardInterrupt

    monkeypatch.setattr(_thread, "start_new_thread", interrupted)
    told = []
    interruption, failure = run_uninterrupted(lambda leaving: told.append(leaving.is_set()))
    assert isinstance(interruption, KeyboardInterrupt)
    assert (failure, told) == (None, [True])
